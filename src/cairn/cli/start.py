"""Starting a model from the command line."""

from __future__ import annotations

import argparse
import sys

from cairn.cli_flags import collect
from cairn.config import EngineConfig
from cairn.frontend import Frontend
from cairn.llm import LLM


def start(arguments: argparse.Namespace) -> LLM:
    """Build the engine and print its notes. On a terminal, ask before a model is downloaded."""
    config = EngineConfig.from_kwargs(collect(arguments, EngineConfig))
    on_terminal = all(s is not None and s.isatty() for s in (sys.stdin, sys.stderr))
    frontend = Frontend(config, _ask if on_terminal else None)
    for note in frontend.engine.notes:
        print(f"cairn: {note}", file=sys.stderr)
    return LLM.from_frontend(frontend)


def _ask(question: str) -> bool:
    print(f"{question} [Y/n] ", end="", file=sys.stderr, flush=True)
    return sys.stdin.readline().strip().lower() in ("", "y", "yes")
