"""The `cairn` command."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

from cairn import __version__
from cairn.cli.flags import add_flags, collect
from cairn.config import EngineConfig
from cairn.engine.sampling_params import SamplingParams
from cairn.errors import CairnError, ConfigError, RequestError

_USAGE_ERROR, _FAILURE, _INTERRUPTED = 2, 1, 130


def main(argv: Sequence[str] | None = None) -> int:
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
    # The engine's --seed seeds the one request as well.
    add_flags(generate.add_argument_group("sampling"), SamplingParams, skip=("seed",))
    add_flags(generate.add_argument_group("engine"), EngineConfig)
    generate.set_defaults(run=_generate)

    doctor = commands.add_parser(
        "doctor", help="versions, devices, and what runs here or why not", allow_abbrev=False
    )
    doctor.add_argument("--json", action="store_true", help="Print JSON.")
    doctor.set_defaults(run=_doctor)
    return parser


def _generate(arguments: argparse.Namespace) -> int:
    from cairn.llm import LLM

    options = collect(arguments, EngineConfig)
    sampling = collect(arguments, SamplingParams)
    sampling.pop("seed", None)
    params = SamplingParams(**sampling)
    if "model" not in options:
        raise ConfigError("--model is missing; give a model folder, or a preset's name")
    with LLM(**options) as llm, llm.stream(arguments.prompt, params) as stream:
        for chunk in stream:
            print(chunk.text, end="", flush=True)
    print()
    return 0


def _doctor(arguments: argparse.Namespace) -> int:
    from cairn.cli.doctor import examine, print_report

    print_report(examine(), as_json=arguments.json)
    return 0


if __name__ == "__main__":
    sys.exit(main())
