"""The `cairn` command."""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from cairn import __version__
from cairn.cli_flags import add_flags, collect
from cairn.config import EngineConfig
from cairn.engine.sampling_params import SamplingParams
from cairn.errors import CairnError, ConfigError, RequestError

_USAGE_ERROR, _FAILURE, _INTERRUPTED = 2, 1, 130

# The engine's --seed seeds the requests; one answer is printed, without scores.
_NOT_FOR_TEXT = ("seed", "n", "logprobs", "prompt_logprobs", "logit_bias")


def main(argv: Sequence[str] | None = None) -> int:
    for stream in (sys.stdout, sys.stderr):
        if hasattr(stream, "reconfigure"):
            stream.reconfigure(errors="replace")  # a terminal that cannot show a character
    arguments = _parser().parse_args(argv)
    try:
        code: int = arguments.run(arguments)
        return code
    except (ConfigError, RequestError) as error:
        print(f"cairn: error: {error}", file=sys.stderr)
        return _USAGE_ERROR
    except CairnError as error:
        print(f"cairn: error: {error}", file=sys.stderr)
        return _FAILURE
    except KeyboardInterrupt:
        print("cairn: interrupted", file=sys.stderr)
        return _INTERRUPTED
    except BrokenPipeError:
        # Whoever read our output has gone; keep Python from complaining when it flushes.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return _FAILURE


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="cairn",
        description="Serve long-context language models from one machine.",
        allow_abbrev=False,
    )
    parser.add_argument("--version", action="version", version=f"cairn {__version__}")
    commands = parser.add_subparsers(required=True, metavar="COMMAND")

    generate = commands.add_parser(
        "generate", help="complete a prompt; only the text goes to stdout", allow_abbrev=False
    )
    generate.add_argument("prompt", metavar="PROMPT")
    generate.add_argument(
        "--trace", metavar="FILE", help="Write which pages each token read, as JSON (hsa)."
    )
    add_flags(generate.add_argument_group("sampling"), SamplingParams, skip=_NOT_FOR_TEXT)
    add_flags(generate.add_argument_group("engine"), EngineConfig)
    generate.set_defaults(run=_generate)

    chat = commands.add_parser("chat", help="talk to a model in the terminal", allow_abbrev=False)
    chat.add_argument("--system", metavar="TEXT", help="A system message to begin with.")
    add_flags(chat.add_argument_group("sampling"), SamplingParams, skip=_NOT_FOR_TEXT)
    add_flags(chat.add_argument_group("engine"), EngineConfig)
    chat.set_defaults(run=_chat)

    pull = commands.add_parser(
        "pull", help="fetch a model into the user's cache folder", allow_abbrev=False
    )
    pull.add_argument("name", metavar="NAME")
    pull.set_defaults(run=_pull)

    from cairn.bench.command import add_bench
    from cairn.cli.demo import add_demo
    from cairn.cli.serve import add_serve
    from cairn.eval.command import add_eval

    add_serve(commands)
    add_bench(commands)
    add_eval(commands)
    add_demo(commands)

    doctor = commands.add_parser(
        "doctor", help="versions, devices, and what runs here or why not", allow_abbrev=False
    )
    doctor.add_argument("--json", action="store_true", help="Print JSON.")
    doctor.add_argument(
        "--sglang",
        action="store_true",
        help="Examine the plug-in for SGLang; fails if it is broken.",
    )
    doctor.set_defaults(run=_doctor)
    return parser


def _generate(arguments: argparse.Namespace) -> int:
    from cairn.cli.start import start
    from cairn.llm import LLM

    params = SamplingParams(**collect(arguments, SamplingParams, skip=_NOT_FOR_TEXT))
    if arguments.trace is not None:
        _check_writable(Path(arguments.trace))
    with LLM.from_frontend(start(arguments)) as llm:
        trace = None
        with llm.stream(arguments.prompt, params, trace=arguments.trace is not None) as stream:
            for chunk in stream:
                print(chunk.text, end="", flush=True)
                trace = trace if chunk.result is None else chunk.result.trace
        print()
    if arguments.trace is not None and trace is not None:
        Path(arguments.trace).write_text(json.dumps(trace.as_dict()), encoding="utf-8")
    return 0


def _check_writable(path: Path) -> None:
    """Before the work is done whose result would be lost."""
    place = path if path.exists() else path.parent
    if path.is_dir() or not os.access(place, os.W_OK):
        raise ConfigError(f"--trace {path} cannot be written; name a file in a folder that exists")


def _chat(arguments: argparse.Namespace) -> int:
    from cairn.cli.chat import Chat
    from cairn.cli.start import start
    from cairn.engine.locate import locate, sampling_defaults
    from cairn.llm import LLM

    given = collect(arguments, SamplingParams, skip=_NOT_FOR_TEXT)
    chat_params({}, given)  # refused before the model is loaded
    with LLM.from_frontend(start(arguments)) as llm:
        params = chat_params(sampling_defaults(locate(llm.config)), given)
        return Chat(llm, params, system=arguments.system).run()


def chat_params(own: dict[str, Any], given: dict[str, Any]) -> SamplingParams:
    """As the user says, and else the model's makers."""
    own = {"temperature": 1.0, **own} if own else {"temperature": 0.7, "top_p": 0.9}
    return SamplingParams.from_kwargs({"max_tokens": 512, **own, **given})


def _pull(arguments: argparse.Namespace) -> int:
    from cairn.models.pull import PULLABLE, pull
    from cairn.progress import loading_bar

    if arguments.name not in PULLABLE:
        raise ConfigError(f"NAME is {arguments.name!r}; choose one of {', '.join(PULLABLE)}")
    with loading_bar(f"Unpacking {arguments.name}") as progress:
        path = pull(arguments.name, progress)
    print(path)
    return 0


def _doctor(arguments: argparse.Namespace) -> int:
    from cairn.cli.doctor import examine, examine_sglang, print_report, print_sglang

    if arguments.sglang:
        found = examine_sglang()
        print_sglang(found, as_json=arguments.json)
        return _FAILURE if any(part["problem"] for part in found.values()) else 0
    print_report(examine(), as_json=arguments.json)
    return 0


if __name__ == "__main__":
    sys.exit(main())
