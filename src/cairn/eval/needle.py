"""`cairn eval needle`: facts hidden in long texts, by length and depth, through the engine."""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from cairn.errors import ConfigError
from cairn.eval.haystack import Prose
from cairn.eval.prompts import Frame, build_prompts, choose_style
from cairn.eval.scoring import is_right, wilson
from cairn.eval.tasks import TASKS
from cairn.eval.wording import NameMaker
from cairn.llm import LLM
from cairn.text.tokenizer import Tokenizer


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


def need_tokenizer(llm: LLM) -> Tokenizer:
    if llm.tokenizer is None:
        raise ConfigError(
            f"eval needs text and {llm.config.model} has no tokenizer.json; add one to its folder"
        )
    return llm.tokenizer


def ask(
    llm: LLM, text: str, options: NeedleOptions, progress: Callable[[int, int], None]
) -> Iterator[Answer]:
    """Ask all questions of a sample at once, deepest facts first. Pages before the point where two
    texts differ are then computed only once. The order does not change any answer."""
    tokenizer = need_tokenizer(llm)
    frame = Frame(tokenizer, choose_style(tokenizer, options.prompt), options.answer_start)
    most = llm.engine.max_tokens - options.max_tokens
    for length in options.lengths:
        if length > most:
            raise ConfigError(
                f"--lengths has {length}; with answers of {options.max_tokens} tokens at most "
                f"{most} are possible: the context length is {llm.engine.context_length}, the KV "
                f"cache holds {llm.engine.scheduler.cache.max_tokens}; shorten it, or raise "
                "--kv-cache-gib"
            )
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
