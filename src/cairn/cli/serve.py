"""`cairn serve`: the HTTP server."""

from __future__ import annotations

import argparse
import os
from typing import Any

from cairn.cli_flags import add_flags, collect
from cairn.config import EngineConfig
from cairn.errors import ConfigError
from cairn.server.options import ServeConfig


def add_serve(commands: Any) -> None:
    parser = commands.add_parser(
        "serve", help="serve a model over HTTP, with OpenAI's API and a page", allow_abbrev=False
    )
    add_flags(parser.add_argument_group("server"), ServeConfig)
    add_flags(parser.add_argument_group("engine"), EngineConfig)
    parser.set_defaults(run=_serve)


def _serve(arguments: argparse.Namespace) -> int:
    given = collect(arguments, ServeConfig)
    given.setdefault("api_key", os.environ.get("CAIRN_API_KEY") or None)
    serve = ServeConfig(**given)
    engine = EngineConfig.from_kwargs(collect(arguments, EngineConfig))
    try:
        from cairn.server.run import run_server
    except ModuleNotFoundError as error:
        raise ConfigError(
            f"cairn serve needs the package {error.name}; pip install 'cairn[server]'"
        ) from error
    run_server(engine, serve)
    return 0
