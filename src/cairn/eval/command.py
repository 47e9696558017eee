"""`cairn eval`: how good answers are. For any model and any policy, through the engine."""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from cairn.cli_flags import add_flags, collect
from cairn.config import EngineConfig
from cairn.errors import ConfigError

if TYPE_CHECKING:
    from cairn.eval.needle import Answer
    from cairn.eval.settings import Setting

_TASKS = ("single", "multikey", "multiquery", "variables", "absent")
_RECALL_COLUMNS = ("setting", "topk", "read", "mass", "far", "best", "top", "seconds")
_PPL_COLUMNS = ("setting", "topk", "ppl", "ppl_tail", "ratio", "seconds")


def add_eval(commands: Any) -> None:
    parser = commands.add_parser("eval", help="measure quality", allow_abbrev=False)
    kinds = parser.add_subparsers(required=True, metavar="WHAT")
    _add_needle(kinds)
    ppl = kinds.add_parser(
        "ppl", help="perplexity of a text, sparse against dense, by budget", allow_abbrev=False
    )
    _add_budgets(ppl.add_argument_group("text and budgets"), tokens=4096)
    _finish_parser(ppl, _ppl)
    recall = kinds.add_parser(
        "recall", help="how much of dense attention a policy's pages hold", allow_abbrev=False
    )
    group = recall.add_argument_group("text and budgets")
    _add_budgets(group, tokens=4096)
    group.add_argument(
        "--rows", type=int, default=16, metavar="N", help="Queries, over the text's second half."
    )
    _finish_parser(recall, _recall)


def _add_needle(kinds: Any) -> None:
    parser = kinds.add_parser(
        "needle", help="facts hidden in long texts, by length and depth", allow_abbrev=False
    )
    group = parser.add_argument_group("needle")
    group.add_argument(
        "--task",
        default="single",
        metavar="A,B",
        help=f"Of: {', '.join(_TASKS)}; or all. Default: %(default)s.",
    )
    group.add_argument(
        "--lengths",
        default="2048,8192",
        metavar="N,M",
        help="Tokens of the whole prompt, exactly. Default: %(default)s.",
    )
    group.add_argument(
        "--depths",
        default="0,25,50,75,100",
        metavar="N,M",
        help="Where the fact stands, in %% of the text. Default: %(default)s.",
    )
    group.add_argument(
        "--samples", type=int, default=4, metavar="N", help="Texts for each length. Default: 4."
    )
    group.add_argument(
        "--keys",
        type=int,
        default=8,
        metavar="N",
        help="Facts or chains in a text of multikey and variables. Default: 8.",
    )
    group.add_argument(
        "--prompt",
        choices=("auto", "plain", "chat"),
        default="auto",
        help="Plain completion, or the model's chat format, which auto takes if it has one.",
    )
    group.add_argument(
        "--answer-start",
        default="",
        metavar="TEXT",
        help="Words the answer is made to begin with; {name} is what is asked about.",
    )
    group.add_argument(
        "--max-tokens", type=int, default=48, metavar="N", help="Of an answer. Default: 48."
    )
    group.add_argument(
        "--text", metavar="FILE", help="Text to hide facts in; public-domain prose otherwise."
    )
    group.add_argument(
        "--answers", metavar="FILE", help="Write every question and answer, a JSON line each."
    )
    _finish_parser(parser, _needle)


def _add_budgets(group: argparse._ArgumentGroup, tokens: int) -> None:
    group.add_argument("--text", metavar="FILE", help="Any text; public-domain prose otherwise.")
    group.add_argument(
        "--tokens", type=int, default=tokens, metavar="N", help="Of the text. Default: %(default)s."
    )
    group.add_argument(
        "--budgets",
        default="12,25,50",
        metavar="N,M",
        help="Share of the pages that the last token reads, its window included, in %%; "
        "--hsa-topk gives a number of pages instead. Default: %(default)s.",
    )
    group.add_argument(
        "--policies",
        metavar="A,B",
        help="Ways to score pages; by default --hsa-policy, or quest. --hsa-window is two pages "
        "unless given.",
    )


def _finish_parser(
    parser: argparse.ArgumentParser, run: Callable[[argparse.Namespace], int]
) -> None:
    group = parser.add_argument_group("results")
    group.add_argument("--output", metavar="FILE", help="Write the JSON line to a file too.")
    group.add_argument("--plot", metavar="FILE", help="Draw a PNG.")
    add_flags(parser.add_argument_group("engine"), EngineConfig)
    parser.set_defaults(run=run)


def _needle(arguments: argparse.Namespace) -> int:
    from cairn.eval.haystack import read_text
    from cairn.eval.needle import NeedleOptions, ask, tally
    from cairn.eval.plots import plot_needle
    from cairn.eval.report import check_files, finish, make_record, show_needle
    from cairn.llm import LLM
    from cairn.progress import loading_bar

    tasks = list(_TASKS) if arguments.task == "all" else arguments.task.split(",")
    for task in tasks:
        if task not in _TASKS:
            raise ConfigError(f"--task has {task!r}; choose among {', '.join(_TASKS)}, or all")
    _check_positive(arguments, "samples", "keys", "max_tokens")
    options = NeedleOptions(
        tasks=tasks,
        lengths=[_whole("lengths", part, 1) for part in arguments.lengths.split(",")],
        depths=[_share("depths", part) for part in arguments.depths.split(",")],
        samples=arguments.samples,
        keys=arguments.keys,
        prompt=arguments.prompt,
        answer_start=arguments.answer_start,
        max_tokens=arguments.max_tokens,
        seed=getattr(arguments, "seed", 0),
    )
    check_files(output=arguments.output, plot=arguments.plot, answers=arguments.answers)
    text = read_text(arguments.text)
    engine = collect(arguments, EngineConfig)
    with LLM(**engine) as llm, loading_bar("Asking") as progress:
        model = llm.config.model
        answers, whole = _take(ask(llm, text, options, progress), arguments.answers)
    asked = {"model": model, "text": arguments.text, **asdict(options), "whole": whole}
    record = make_record("needle", engine, asked, tally(answers))
    show_needle(record)
    if not whole:
        print(f"cairn: stopped by Ctrl-C after {len(answers)} answers", file=sys.stderr)
    if arguments.plot is not None:
        plot_needle(record, Path(arguments.plot))
    finish(record, arguments.output)
    return 0


def _take(asking: Iterator[Answer], path: str | None) -> tuple[list[Answer], bool]:
    """All answers, or those until Ctrl-C, each written to the file as it comes; whether all."""
    answers: list[Answer] = []
    with open(path or os.devnull, "w", encoding="utf-8") as file:
        try:
            for answer in asking:
                answers.append(answer)
                print(json.dumps(asdict(answer)), file=file, flush=True)
        except KeyboardInterrupt:
            if not answers:
                raise
            return answers, False
    return answers, True


def _ppl(arguments: argparse.Namespace) -> int:
    from cairn.eval.haystack import read_text
    from cairn.eval.plots import plot_ppl
    from cairn.eval.ppl import measure
    from cairn.eval.report import check_files, finish, make_record, show_rows
    from cairn.progress import loading_bar

    backend = getattr(arguments, "attention_backend", "") or ""
    if "," in backend and "hsa" in backend:
        raise ConfigError(
            f"--attention-backend is {backend!r}, which reads prompts densely, and a text is "
            "scored as a prompt; use hsa"
        )
    settings = _settings(arguments, dense=True)
    check_files(output=arguments.output, plot=arguments.plot)
    text = read_text(arguments.text)
    with loading_bar("Scoring") as progress:
        rows = measure(settings, text, arguments.tokens, progress)
    record = make_record("ppl", collect(arguments, EngineConfig), _asked(arguments), rows)
    show_rows(record, _PPL_COLUMNS)
    if arguments.plot is not None:
        plot_ppl(record, Path(arguments.plot))
    finish(record, arguments.output)
    return 0


def _recall(arguments: argparse.Namespace) -> int:
    from cairn.eval.haystack import read_text
    from cairn.eval.plots import plot_recall
    from cairn.eval.recall import measure
    from cairn.eval.report import check_files, finish, make_record, show_layers, show_rows
    from cairn.progress import loading_bar

    _check_positive(arguments, "rows")
    settings = _settings(arguments, dense=False)
    check_files(output=arguments.output, plot=arguments.plot)
    text = read_text(arguments.text)
    with loading_bar("Comparing") as progress:
        rows = measure(settings, text, arguments.tokens, arguments.rows, progress)
    record = make_record("recall", collect(arguments, EngineConfig), _asked(arguments), rows)
    show_layers(record)
    show_rows(record, _RECALL_COLUMNS)
    if arguments.plot is not None:
        plot_recall(record, Path(arguments.plot))
    finish(record, arguments.output)
    return 0


def _settings(arguments: argparse.Namespace, *, dense: bool) -> Sequence[Setting]:
    from cairn.eval.settings import make_settings

    if arguments.tokens < 4:
        raise ConfigError(f"--tokens is {arguments.tokens}; it must be at least 4")
    policies = None if arguments.policies is None else arguments.policies.split(",")
    budgets = [_share("budgets", part) for part in arguments.budgets.split(",")]
    engine = collect(arguments, EngineConfig)
    return make_settings(engine, arguments.tokens, policies, budgets, dense=dense)


def _asked(arguments: argparse.Namespace) -> dict[str, Any]:
    names = ("text", "tokens", "budgets", "policies", "rows")
    asked = {name: getattr(arguments, name) for name in names if hasattr(arguments, name)}
    return {"model": getattr(arguments, "model", EngineConfig().model), **asked}


def _check_positive(arguments: argparse.Namespace, *names: str) -> None:
    for name in names:
        value = getattr(arguments, name)
        if value < 1:
            raise ConfigError(f"--{name.replace('_', '-')} is {value}; it must be at least 1")


def _whole(name: str, part: str, low: int) -> int:
    if not part.strip().isdecimal() or int(part) < low:
        raise ConfigError(f"--{name} has {part!r}; write whole numbers from {low} on, with commas")
    return int(part)


def _share(name: str, part: str) -> float:
    """A percentage as a share of 1."""
    try:
        percent = float(part)
    except ValueError:
        percent = -1.0
    if not 0 <= percent <= 100:
        raise ConfigError(f"--{name} has {part!r}; write numbers from 0 to 100, with commas")
    return percent / 100
