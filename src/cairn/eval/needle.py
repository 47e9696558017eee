"""`cairn eval needle`: facts hidden in long texts, by length and depth, through the engine."""

from __future__ import annotations

import argparse
import itertools
import json
import math
import os
import random
import re
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Any, TypeVar

from cairn.bench.report import check_files
from cairn.cli_flags import check_at_least, collect
from cairn.config import EngineConfig
from cairn.errors import ConfigError
from cairn.eval import report
from cairn.eval.haystack import Prose, need_tokenizer, read_text
from cairn.eval.prompts import Frame, build_prompts, choose_style
from cairn.eval.tasks import TASKS, UNKNOWN, NameMaker
from cairn.llm import LLM
from cairn.progress import loading_bar

_NUMBER = re.compile(r"\d{1,3}(?:,\d{3})+(?!\d)|\d+")
_Z95 = 1.959963984540054
T = TypeVar("T")  # of answers: a dataclass


@dataclass(frozen=True, slots=True)
class NeedleOptions:
    tasks: Sequence[str]
    lengths: Sequence[int]
    depths: Sequence[float]  # 0 to 1
    samples: int
    keys: int
    prompt: str
    answer_start: str
    max_tokens: int
    seed: int


@dataclass(frozen=True, slots=True)
class Answer:
    task: str
    length: int
    depth: float
    sample: int
    name: str
    expected: str
    said: str
    right: bool
    cached_tokens: int


def command(arguments: argparse.Namespace) -> int:
    check_at_least(arguments, 1, "samples", "keys", "max_tokens")
    same = ("lengths", "samples", "keys", "prompt", "answer_start", "max_tokens")
    options = NeedleOptions(
        tasks=list(TASKS) if "all" in arguments.task else arguments.task,
        depths=[percent / 100 for percent in arguments.depths],
        seed=getattr(arguments, "seed", 0),
        **{name: getattr(arguments, name) for name in same},
    )
    check_files(output=arguments.output, plot=arguments.plot, answers=arguments.answers)
    text = read_text(arguments.text)
    engine = collect(arguments, EngineConfig)
    with LLM(**engine) as llm, loading_bar("Asking") as progress:
        model = llm.config.model
        answers, whole = take_answers(ask(llm, text, options, progress), arguments.answers)
    asked = {"model": model, "text": arguments.text, **asdict(options), "whole": whole}
    record = report.make_record("needle", engine, asked, tally(answers))
    report.show_needle(record)
    if not whole:
        print(f"cairn: stopped by Ctrl-C after {len(answers)} answers", file=sys.stderr)
    report.finish(record, arguments)
    return 0


def take_answers(asking: Iterator[T], path: str | None, mode: str = "w") -> tuple[list[T], bool]:
    """The answers, and whether all arrived before Ctrl-C. Writes each to the file as it arrives."""
    answers: list[T] = []
    with open(path or os.devnull, mode, encoding="utf-8") as file:
        try:
            for answer in asking:
                answers.append(answer)
                print(json.dumps(asdict(answer)), file=file, flush=True)  # type: ignore[call-overload]
        except KeyboardInterrupt:
            if not answers:
                raise
            return answers, False
    return answers, True


def ask(
    llm: LLM, text: str, options: NeedleOptions, progress: Callable[[int, int], None]
) -> Iterator[Answer]:
    """Ask all questions of a sample at once, deepest facts first. Pages before the point where two
    texts differ are then computed only once. The order does not change any answer."""
    tokenizer = need_tokenizer(llm)
    frame = Frame(tokenizer, choose_style(tokenizer, options.prompt), options.answer_start)
    check_lengths(llm, options.lengths, options.max_tokens)
    prose = Prose(text, frame.encode)
    depths = sorted(options.depths, reverse=True)
    samples = list(itertools.product(options.tasks, options.lengths, range(options.samples)))
    for done, (task, length, sample) in enumerate(samples):
        progress(done, len(samples))
        rng = random.Random(f"{options.seed} {task} {length} {sample}")
        names = NameMaker(rng, prose.words, lambda word: len(frame.encode(word)))
        cases = TASKS[task](rng, names, depths, options.keys)
        queries = [case.query for case in cases]
        prompts = build_prompts(frame, prose, queries, length, rng.randrange(2**32))
        tokens = [prompt.tokens for prompt in prompts]
        results = llm.generate(tokens, max_tokens=options.max_tokens)
        for case, result in zip(cases, results, strict=True):
            yield Answer(
                task=task,
                length=length,
                depth=case.depth,
                sample=sample,
                name=case.query.name,
                expected=case.answer,
                said=result.text or "",
                right=is_right(result.text or "", case.answer),
                cached_tokens=result.usage.cached_tokens,
            )
    progress(len(samples), len(samples))


def check_lengths(llm: LLM, lengths: Sequence[int], max_tokens: int) -> None:
    """Refuse prompts that leave no room for `max_tokens` more."""
    most = llm.engine.max_tokens - max_tokens
    for length in lengths:
        if length > most:
            raise ConfigError(
                f"--lengths has {length}; with answers of {max_tokens} tokens at most {most} are "
                f"possible: the context length is {llm.engine.context_length}, the KV cache holds "
                f"{llm.engine.scheduler.cache.max_tokens}; shorten it, or raise --kv-cache-gib"
            )


def tally(answers: Sequence[Answer]) -> list[dict[str, Any]]:
    """Shares of right answers by task, length and depth; depth None stands for all depths."""
    cells: dict[tuple[str, int, float | None], list[bool]] = {}
    for answer in answers:
        for depth in (answer.depth, None):
            cells.setdefault((answer.task, answer.length, depth), []).append(answer.right)
    rows = []
    for (task, length, depth), rights in cells.items():
        right, asked = sum(rights), len(rights)
        low, high = (round(bound, 4) for bound in wilson(right, asked))
        row = {"task": task, "length": length, "depth": depth, "right": right, "asked": asked}
        rows.append({**row, "share": round(right / asked, 4), "low": low, "high": high})
    return rows


def is_right(said: str, answer: str) -> bool:
    """Whether the first number in `said` equals the answer, digit for digit. If the answer is
    `unknown`, `said` must say so and contain no number."""
    number = _NUMBER.search(said)
    if answer == UNKNOWN:
        return number is None and UNKNOWN in said.lower()
    return number is not None and number.group().replace(",", "") == answer


def wilson(right: float, asked: int, z: float = _Z95) -> tuple[float, float]:
    """Wilson's 95 % interval of a share. It is also valid for few questions and near 0 and 1, and
    too wide rather than too narrow if answers can be partly right."""
    if asked == 0:
        return 0.0, 1.0
    share = right / asked
    spread = z * z / asked
    middle = share + spread / 2
    half = z * math.sqrt(share * (1 - share) / asked + spread / (4 * asked))
    # At 0 and 1 the bound is exact; rounding must not move it.
    low = 0.0 if right == 0 else (middle - half) / (1 + spread)
    high = 1.0 if right == asked else (middle + half) / (1 + spread)
    return low, high
