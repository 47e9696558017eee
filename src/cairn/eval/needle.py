"""`cairn eval needle`: facts hidden in long texts, by length and depth, through the engine."""

from __future__ import annotations

import argparse
import itertools
import math
import random
import re
import sys
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from cairn.bench.report import check_files
from cairn.cli_flags import check_at_least, collect
from cairn.config import EngineConfig
from cairn.engine.resolve import resolve_device
from cairn.errors import ConfigError
from cairn.eval import report, resume
from cairn.eval.haystack import Prose, need_tokenizer, read_text
from cairn.eval.prompts import Frame, build_prompts, choose_style
from cairn.eval.tasks import TASKS, UNKNOWN, Case, NameMaker
from cairn.llm import LLM
from cairn.progress import loading_bar

_NUMBER = re.compile(r"\d{1,3}(?:,\d{3})+(?!\d)|\d+")
_Z95 = 1.959963984540054
_RESAMPLES = 2000
_TOKENS_AT_ONCE = {"cuda": 2**20}
"""By device: tokens of prompts that are asked together, where one text does not use all of it."""

Sample = tuple[str, int, int]
"""Task, length and number of a text."""


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

    @property
    def of(self) -> Sample:
        return self.task, self.length, self.sample


def command(arguments: argparse.Namespace) -> int:
    check_at_least(arguments, 1, "samples", "keys", "max_tokens")
    given = ("lengths", "samples", "keys", "prompt", "answer_start", "max_tokens")
    options = NeedleOptions(
        tasks=list(TASKS) if "all" in arguments.task else arguments.task,
        depths=[percent / 100 for percent in arguments.depths],
        seed=getattr(arguments, "seed", 0),
        **{name: getattr(arguments, name) for name in given},
    )
    check_files(output=arguments.output, plot=arguments.plot, answers=arguments.answers)
    text = read_text(arguments.text)
    engine = collect(arguments, EngineConfig)
    asked = {
        "model": getattr(arguments, "model", EngineConfig().model),
        "text": arguments.text,
        **asdict(options),
    }
    varies = ("tasks", "lengths", "samples")
    same = {**{name: asked[name] for name in asked if name not in varies}, "options": engine}
    done: list[Answer] = []
    if arguments.resume:
        done = [Answer(**one) for one in resume.earlier(arguments.answers, "--answers", same)]
        counts = Counter(answer.of for answer in done)
        done = [answer for answer in done if counts[answer.of] == len(options.depths)]
    other: list[Answer] = []
    if arguments.against is not None:
        # Of another engine or model, but over the same questions.
        questions = {name: same[name] for name in same if name not in ("model", "options")}
        found = resume.earlier(arguments.against, "--against", questions)
        other = [Answer(**one) for one in found]
    with LLM(**engine) as llm, loading_bar("Asking") as progress:
        asking = ask(llm, text, options, progress, {answer.of for answer in done})
        answers, whole = resume.take(asking, arguments.answers, same, done)
    wanted = set(samples_of(options))
    answers = [answer for answer in answers if answer.of in wanted]
    record = report.make_record("needle", engine, {**asked, "whole": whole}, tally(answers))
    if arguments.against is not None:
        record["against"] = {"answers": arguments.against, **against(answers, other)}
    report.show_needle(record)
    if not whole:
        print(resume.say_stopped(len(answers), arguments.answers), file=sys.stderr)
    report.finish(record, arguments)
    return 0


def samples_of(options: NeedleOptions) -> list[Sample]:
    return list(itertools.product(options.tasks, options.lengths, range(options.samples)))


def ask(
    llm: LLM,
    text: str,
    options: NeedleOptions,
    progress: Callable[[int, int], None],
    done: Collection[Sample] = (),
) -> Iterator[Answer]:
    """Ask all questions of a text at once, deepest facts first. Pages before the point where two
    texts differ are then computed only once. The order does not change any answer. Texts that are
    `done` are left out."""
    tokenizer = need_tokenizer(llm)
    frame = Frame(tokenizer, choose_style(tokenizer, options.prompt), options.answer_start)
    check_lengths(llm, options.lengths, options.max_tokens)
    prose = Prose(text, frame.encode)
    depths = sorted(options.depths, reverse=True)
    samples = samples_of(options)
    left = [sample for sample in samples if sample not in set(done)]
    while left:
        progress(len(samples) - len(left), len(samples))
        count = at_once(llm, left[0][1] * len(depths), 1)
        batch, left = left[:count], left[count:]
        asked: list[tuple[Sample, Case, list[int]]] = []
        for task, length, number in batch:
            rng = random.Random(f"{options.seed} {task} {length} {number}")
            names = NameMaker(rng, prose.words, lambda word: len(frame.encode(word)))
            cases = TASKS[task](rng, names, depths, options.keys)
            queries = [case.query for case in cases]
            prompts = build_prompts(frame, prose, queries, length, rng.randrange(2**32))
            for case, prompt in zip(cases, prompts, strict=True):
                asked.append(((task, length, number), case, prompt.tokens))
        results = llm.generate_each([ids for _, _, ids in asked], max_tokens=options.max_tokens)
        for ((task, length, number), case, _), result in zip(asked, results, strict=True):
            yield Answer(
                task=task,
                length=length,
                depth=case.depth,
                sample=number,
                name=case.query.name,
                expected=case.answer,
                said=result.text or "",
                right=is_right(result.text or "", case.answer),
                cached_tokens=result.usage.cached_tokens,
            )
    progress(len(samples), len(samples))


def at_once(llm: LLM, tokens: int, least: int) -> int:
    """How many prompts, or groups of prompts, of `tokens` tokens to ask together."""
    return max(least, _TOKENS_AT_ONCE.get(resolve_device(llm.config.device).type, 0) // tokens)


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


def against(answers: Sequence[Answer], other: Sequence[Answer]) -> dict[str, Any]:
    """Right answers compared with those of another run, over the questions that both have."""
    theirs = {(*answer.of, answer.depth): answer.right for answer in other}
    keys = {(*answer.of, answer.depth): answer.right for answer in answers}
    pairs = [(right, theirs[key]) for key, right in keys.items() if key in theirs]
    own, base = [right for right, _ in pairs], [right for _, right in pairs]
    share, low, high = kept(own, base) or (None, None, None)
    lost, won = pairs.count((False, True)), pairs.count((True, False))
    counts = {"asked": len(pairs), "right": sum(own), "theirs": sum(base)}
    return {**counts, "lost": lost, "won": won, "kept": share, "low": low, "high": high}


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


def kept(own: Sequence[bool], base: Sequence[bool]) -> tuple[float, float, float] | None:
    """Right answers as a share of those of the base, with a 95 % interval over questions, each
    drawn with both of its answers. None if the base has no right answer."""
    if not any(base):
        return None
    draw, pairs = random.Random(0), list(zip(own, base, strict=True))
    shares = []
    for _ in range(_RESAMPLES):
        drawn = draw.choices(pairs, k=len(pairs))
        of_base = sum(right for _, right in drawn)
        if of_base:
            shares.append(sum(right for right, _ in drawn) / of_base)
    shares.sort()
    cut = len(shares) // 40
    whole = sum(own) / sum(base)
    return round(whole, 4), round(shares[cut], 4), round(shares[-1 - cut], 4)
