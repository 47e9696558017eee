"""The commands of `cairn eval`: answer quality for any model and policy, through the engine."""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Callable, Iterator
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from cairn.cli_flags import OUTPUT, PLOT, add_command, check_at_least, collect, flag, flags_of
from cairn.config import EngineConfig
from cairn.errors import ConfigError

if TYPE_CHECKING:
    from cairn.eval.needle import Answer
    from cairn.eval.settings import Setting

_TASKS = ("single", "multikey", "multiquery", "variables", "absent")
_RECALL_COLUMNS = ("setting", "topk", "read", "mass", "far", "best", "top", "seconds")
_PPL_COLUMNS = ("setting", "topk", "ppl", "ppl_tail", "ratio", "seconds")
_TEXT = flag("text", None, "Text to use; public-domain prose otherwise.", metavar="FILE")
_PROMPTS = ("auto", "plain", "chat")
_BUDGET = "%% of the pages that the last token reads, its window (by default two pages) included"
_NEEDLE = (
    flag("task", "single", f"Of: {', '.join(_TASKS)}; or all.", metavar="A,B"),
    flag("lengths", "2048,8192", "Tokens of the whole prompt, exactly.", metavar="N,M"),
    flag("depths", "0,25,50,75,100", "Depth of the fact, in %% of the text.", metavar="N,M"),
    flag("samples", 4, "Texts for each length."),
    flag("keys", 8, "Facts or chains in a text of multikey and variables."),
    flag("prompt", "auto", "auto takes the model's chat format if it has one.", choices=_PROMPTS),
    flag("answer-start", "", "First words of the answer; {name} is the one asked about."),
    flag("max-tokens", 48, "Of an answer."),
    _TEXT,
    flag("answers", None, "Write every question and answer, a JSON line each.", metavar="FILE"),
)
_BUDGETS = (
    _TEXT,
    flag("tokens", 4096, "Of the text."),
    flag("budgets", "12,25,50", f"{_BUDGET}; or give --hsa-topk.", metavar="N,M"),
    flag("policies", None, "Ways to score pages; by default --hsa-policy, or quest."),
)
_ROWS = flag("rows", 16, "Queries, over the text's second half.")


def add_eval(commands: Any) -> None:
    parser = commands.add_parser("eval", help="measure quality", allow_abbrev=False)
    kinds = parser.add_subparsers(required=True, metavar="WHAT")
    rest: dict[str, Any] = {"results": [OUTPUT, PLOT], "engine": flags_of(EngineConfig)}

    text = "facts hidden in long texts, by length and depth"
    add_command(kinds, "needle", text, _needle, {"needle": _NEEDLE, **rest})
    text = "perplexity of a text, sparse against dense, by budget"
    add_command(kinds, "ppl", text, _ppl, {"text and budgets": _BUDGETS, **rest})
    text = "how much of dense attention a policy's pages hold"
    add_command(kinds, "recall", text, _recall, {"text and budgets": [*_BUDGETS, _ROWS], **rest})


def _needle(arguments: argparse.Namespace) -> int:
    from cairn.bench.report import check_files
    from cairn.eval import report
    from cairn.eval.haystack import read_text
    from cairn.eval.needle import NeedleOptions, ask, tally
    from cairn.llm import LLM
    from cairn.progress import loading_bar

    tasks = list(_TASKS) if arguments.task == "all" else arguments.task.split(",")
    for task in tasks:
        if task not in _TASKS:
            raise ConfigError(f"--task has {task!r}; choose among {', '.join(_TASKS)}, or all")
    check_at_least(arguments, 1, "samples", "keys", "max_tokens")
    lengths = arguments.lengths.split(",")
    for part in lengths:
        if not part.strip().isdecimal() or int(part) < 1:
            raise ConfigError(f"--lengths has {part!r}; write whole numbers from 1 on, with commas")
    same = ("samples", "keys", "prompt", "answer_start", "max_tokens")
    options = NeedleOptions(
        tasks=tasks,
        lengths=[int(part) for part in lengths],
        depths=_shares(arguments, "depths"),
        seed=getattr(arguments, "seed", 0),
        **{name: getattr(arguments, name) for name in same},
    )
    check_files(output=arguments.output, plot=arguments.plot, answers=arguments.answers)
    text = read_text(arguments.text)
    engine = collect(arguments, EngineConfig)
    with LLM(**engine) as llm, loading_bar("Asking") as progress:
        model = llm.config.model
        answers, whole = _take(ask(llm, text, options, progress), arguments.answers)
    asked = {"model": model, "text": arguments.text, **asdict(options), "whole": whole}
    record = report.make_record("needle", engine, asked, tally(answers))
    report.show_needle(record)
    if not whole:
        print(f"cairn: stopped by Ctrl-C after {len(answers)} answers", file=sys.stderr)
    report.finish(record, arguments.output, arguments.plot)
    return 0


def _take(asking: Iterator[Answer], path: str | None) -> tuple[list[Answer], bool]:
    """The answers, and whether all arrived before Ctrl-C. Writes each to the file as it arrives."""
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
    from cairn.attention.backend import sparse_class
    from cairn.eval import ppl, report

    backend = getattr(arguments, "attention_backend", "") or "auto"
    names = [name.strip() for name in backend.split(",")]
    if len(names) > 1 and sparse_class(names) is not None:
        raise ConfigError(
            f"--attention-backend is {backend!r}, which reads prompts densely, and a text is "
            f"scored as a prompt; use {names[-1]} alone"
        )
    record = _compare(arguments, "ppl", ppl.measure, dense=True)
    report.show_rows(record, _PPL_COLUMNS)
    report.finish(record, arguments.output, arguments.plot)
    return 0


def _recall(arguments: argparse.Namespace) -> int:
    from cairn.eval import recall, report

    check_at_least(arguments, 1, "rows")

    def measure(settings: list[Setting], text: str, tokens: int, progress: Any) -> Any:
        return recall.measure(settings, text, tokens, arguments.rows, progress)

    record = _compare(arguments, "recall", measure, dense=False)
    report.show_layers(record)
    report.show_rows(record, _RECALL_COLUMNS)
    report.finish(record, arguments.output, arguments.plot)
    return 0


def _compare(
    arguments: argparse.Namespace, kind: str, measure: Callable[..., Any], *, dense: bool
) -> dict[str, Any]:
    """Measure every setting on the text; returns the record."""
    from cairn.bench.report import check_files
    from cairn.eval.haystack import read_text
    from cairn.eval.report import make_record
    from cairn.eval.settings import make_settings
    from cairn.progress import loading_bar

    check_at_least(arguments, 4, "tokens")
    policies = None if arguments.policies is None else arguments.policies.split(",")
    engine = collect(arguments, EngineConfig)
    budgets = _shares(arguments, "budgets")
    settings = make_settings(engine, arguments.tokens, policies, budgets, dense=dense)
    check_files(output=arguments.output, plot=arguments.plot)
    text = read_text(arguments.text)
    with loading_bar("Measuring") as progress:
        rows = measure(settings, text, arguments.tokens, progress)
    names = ("text", "tokens", "budgets", "policies", "rows")
    asked = {name: getattr(arguments, name) for name in names if hasattr(arguments, name)}
    model = getattr(arguments, "model", EngineConfig().model)
    return make_record(kind, engine, {"model": model, **asked}, rows)


def _shares(arguments: argparse.Namespace, name: str) -> list[float]:
    """Parse comma-separated percentages into shares of 1."""
    shares = []
    for part in getattr(arguments, name).split(","):
        try:
            percent = float(part)
        except ValueError:
            percent = -1.0
        if not 0 <= percent <= 100:
            raise ConfigError(f"--{name} has {part!r}; write numbers from 0 to 100, with commas")
        shares.append(percent / 100)
    return shares
