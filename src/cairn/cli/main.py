"""The `cairn` command."""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NoReturn

from cairn import __version__
from cairn.bench.command import add_bench
from cairn.cli.demo import add_demo
from cairn.cli_flags import add_command, collect, flag, flags_of
from cairn.config import EngineConfig
from cairn.engine.sampling_params import SamplingParams
from cairn.errors import CairnError, ConfigError, RequestError, install
from cairn.eval.command import add_eval
from cairn.server.options import ServeConfig

_USAGE_ERROR, _FAILURE, _INTERRUPTED = 2, 1, 130

# The engine's --seed seeds the requests; one answer is printed, without scores.
_NOT_FOR_TEXT = ("seed", "n", "logprobs", "prompt_logprobs", "logit_bias")


def main(argv: Sequence[str] | None = None) -> int:
    for stream in (sys.stdout, sys.stderr):
        if hasattr(stream, "reconfigure"):
            stream.reconfigure(errors="replace")  # for terminals that cannot show a character
    arguments = _parser().parse_args(argv)
    try:
        code: int = arguments.run(arguments)
        return code
    except CairnError as error:
        print(f"cairn: error: {error}", file=sys.stderr)
        return _USAGE_ERROR if isinstance(error, ConfigError | RequestError) else _FAILURE
    except KeyboardInterrupt:
        print("cairn: interrupted", file=sys.stderr)
        return _INTERRUPTED
    except OSError as error:  # a file or a pipe that cannot be written to
        if not isinstance(error, BrokenPipeError):  # then nobody reads our output any more
            print(f"cairn: error: {error}", file=sys.stderr)
        # Without this Python complains when it flushes.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return _FAILURE


class _Parser(argparse.ArgumentParser):
    """Subcommands are of this class too."""

    def error(self, message: str) -> NoReturn:
        """Without the list of flags, behind which the message would not be seen."""
        self.exit(_USAGE_ERROR, f"{self.prog}: error: {message}; see {self.prog} --help\n")


def _parser() -> argparse.ArgumentParser:
    parser = _Parser(
        prog="cairn",
        description="Serve long-context language models from one machine.",
        allow_abbrev=False,
    )
    parser.add_argument("--version", action="version", version=f"cairn {__version__}")
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    engine = {"engine": flags_of(EngineConfig)}
    model = {"sampling": flags_of(SamplingParams, skip=_NOT_FOR_TEXT), **engine}
    text = "complete a prompt; only the text goes to stdout"
    generate = add_command(commands, "generate", text, _generate, model)
    generate.add_argument("prompt", metavar="PROMPT")
    text = "Write which pages each token read, as JSON (hsa)."
    generate.add_argument("--trace", metavar="FILE", help=text)
    chat = add_command(commands, "chat", "talk to a model in the terminal", _chat, model)
    chat.add_argument("--system", metavar="TEXT", help="A system message to begin with.")
    text = "fetch a model into the user's cache folder"
    add_command(commands, "pull", text, _pull, {}).add_argument("name", metavar="NAME")
    text = "serve a model over HTTP, with OpenAI's API and a page"
    add_command(commands, "serve", text, _serve, {"server": flags_of(ServeConfig), **engine})
    add_bench(commands)
    add_eval(commands)
    add_demo(commands)
    flags = [
        flag("json", False, "Print JSON.", action="store_true"),
        flag("sglang", False, "Check the SGLang plug-in; fail if broken.", action="store_true"),
    ]
    text = "versions, devices, and what runs here or why not"
    add_command(commands, "doctor", text, "cairn.cli.doctor:doctor", {"what to print": flags})
    return parser


def _generate(arguments: argparse.Namespace) -> int:
    from cairn.bench.report import check_files
    from cairn.cli.start import start

    params = SamplingParams(**collect(arguments, SamplingParams, skip=_NOT_FOR_TEXT))
    check_files(trace=arguments.trace)
    with start(arguments) as llm:
        trace = None
        with llm.stream(arguments.prompt, params, trace=arguments.trace is not None) as stream:
            for chunk in stream:
                print(chunk.text, end="", flush=True)
                trace = trace if chunk.result is None else chunk.result.trace
        print()
    if arguments.trace is not None and trace is not None:
        Path(arguments.trace).write_text(json.dumps(trace.as_dict()), encoding="utf-8")
    return 0


def _chat(arguments: argparse.Namespace) -> int:
    from cairn.cli.chat import Chat
    from cairn.cli.start import start
    from cairn.engine.locate import locate, sampling_defaults

    given = collect(arguments, SamplingParams, skip=_NOT_FOR_TEXT)
    chat_params({}, given)  # refuse bad values before the model is loaded
    with start(arguments) as llm:
        params = chat_params(sampling_defaults(locate(llm.config)), given)
        return Chat(llm, params, system=arguments.system).run()


def chat_params(own: dict[str, Any], given: dict[str, Any]) -> SamplingParams:
    """What the user gave, then the model's own defaults, then ours."""
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


def _serve(arguments: argparse.Namespace) -> int:
    given = {"api_key": os.environ.get("CAIRN_API_KEY") or None, **collect(arguments, ServeConfig)}
    options = ServeConfig(**given)
    engine = EngineConfig.from_kwargs(collect(arguments, EngineConfig))
    try:
        from cairn.server.run import run_server
    except ModuleNotFoundError as error:
        raise ConfigError(
            f"cairn serve needs the package {error.name}; {install('server')}"
        ) from error
    run_server(engine, options)
    return 0


if __name__ == "__main__":
    sys.exit(main())
