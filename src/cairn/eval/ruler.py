"""`cairn eval ruler`: RULER's tasks, by length, through the engine."""

from __future__ import annotations

import argparse
import itertools
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from random import Random
from typing import Any

from cairn.bench.report import check_files
from cairn.cli_flags import check_at_least, collect
from cairn.config import EngineConfig
from cairn.errors import ConfigError
from cairn.eval import report, resume
from cairn.eval.haystack import need_tokenizer, read_text
from cairn.eval.needle import at_once, check_lengths, wilson
from cairn.eval.prompts import choose_style
from cairn.eval.ruler_tasks import TASKS, Corpus, Sample, Task, fit_size, read_questions
from cairn.llm import LLM
from cairn.progress import loading_bar
from cairn.text.tokenizer import Tokenizer

_AT_ONCE = 8  # questions that are asked together, at least
_SHRINK = 0.02  # share of its size that a sample loses if it is too long

Key = tuple[str, int, int]
"""Task, length and number of a sample."""


@dataclass(frozen=True, slots=True)
class Answer:
    task: str
    length: int
    sample: int
    tokens: int
    """Of the prompt and the longest answer."""
    expected: Sequence[str]
    said: str
    score: float

    @property
    def key(self) -> Key:
        return self.task, self.length, self.sample


def command(arguments: argparse.Namespace) -> int:
    check_at_least(arguments, 1, "samples")
    tasks = [name for name in TASKS if name in arguments.tasks or "all" in arguments.tasks]
    if arguments.qa is None:
        if "qa" in arguments.tasks:
            raise ConfigError(
                "the task qa needs --qa FILE, questions in SQuAD's or HotpotQA's format"
            )
        tasks = [name for name in tasks if name != "qa"]
    check_files(output=arguments.output, plot=arguments.plot, answers=arguments.answers)
    questions = ((), ()) if arguments.qa is None else read_questions(arguments.qa)
    corpus = Corpus(read_text(arguments.text), *questions)
    engine = collect(arguments, EngineConfig)
    given = ("lengths", "prompt", "text", "qa")
    asked = {
        "model": getattr(arguments, "model", EngineConfig().model),
        "seed": getattr(arguments, "seed", 0),
        **{name: getattr(arguments, name) for name in given},
    }
    same = {**{name: asked[name] for name in asked if name != "lengths"}, "options": engine}
    done: list[Answer] = []
    if arguments.resume:
        done = [Answer(**one) for one in resume.earlier(arguments.answers, "--answers", same)]
    keys = list(itertools.product(tasks, arguments.lengths, range(arguments.samples)))
    with LLM(**engine) as llm, loading_bar("Asking") as progress:
        ruler = Ruler(llm, corpus, arguments.prompt, str(asked["seed"]))
        asking = ruler.ask(keys, {answer.key for answer in done}, progress)
        answers, whole = resume.take(asking, arguments.answers, same, done)
    wanted = set(keys)
    answers = [answer for answer in answers if answer.key in wanted]
    record = report.make_record("ruler", engine, {**asked, "whole": whole}, tally(answers))
    report.show_ruler(record)
    if not whole:
        print(resume.say_stopped(len(answers), arguments.answers), file=sys.stderr)
    report.finish(record, arguments)
    return 0


class Ruler:
    """Makes samples that fit a model's tokens, and asks them."""

    def __init__(self, llm: LLM, corpus: Corpus, prompt: str, seed: str) -> None:
        self._llm = llm
        self._corpus = corpus
        self._seed = seed
        self._tokenizer = need_tokenizer(llm)
        self._style = choose_style(self._tokenizer, prompt)

    def ask(
        self, keys: Sequence[Key], done: set[Key], progress: Callable[[int, int], None]
    ) -> Iterator[Answer]:
        for task, length in dict.fromkeys((task, length) for task, length, _ in keys):
            check_lengths(self._llm, [length], 0)
            size: int | None = None
            left = [key for key in keys if key[:2] == (task, length) and key not in done]
            count = at_once(self._llm, length, _AT_ONCE)
            for begin in range(0, len(left), count):
                batch = left[begin : begin + count]
                progress(len(done), len(keys))
                if size is None:
                    size = self.fit(TASKS[task], task, length)
                samples = [self.sample(TASKS[task], key, size) for key in batch]
                prompts = [self.encode(sample) for sample in samples]
                results = self._llm.generate_each(prompts, max_tokens=TASKS[task].max_tokens)
                for key, sample, tokens, result in zip(
                    batch, samples, prompts, results, strict=True
                ):
                    done.add(key)
                    said = result.text or ""
                    score = TASKS[task].score(said, sample.answers)
                    total = len(tokens) + TASKS[task].max_tokens
                    yield Answer(*key, total, sample.answers, said, score)
        progress(len(keys), len(keys))

    def fit(self, task: Task, name: str, length: int) -> int:
        return fit_size(task, self._corpus, length, self._count, self._key(name, length, 0))

    def sample(self, task: Task, key: Key, size: int) -> Sample:
        """The sample of this number: of the given size, or a little smaller so that it fits."""
        length = key[1]
        while True:
            sample = task.make(Random(self._key(*key)), self._corpus, size, length, key[2])
            if size == task.least_size or self._count(sample) + task.max_tokens <= length:
                return sample
            size = max(task.least_size, min(size - 1, int(size * (1 - _SHRINK))))

    def encode(self, sample: Sample) -> list[int]:
        """The prompt as a user's message if the model chats, then the answer's first words."""
        return encode_sample(self._tokenizer, self._style, sample)

    def _count(self, sample: Sample) -> int:
        return len(self.encode(sample))

    def _key(self, task: str, length: int, sample: int) -> str:
        return f"{self._seed} {task} {length} {sample}"


def encode_sample(tokenizer: Tokenizer, style: str, sample: Sample) -> list[int]:
    if style == "plain":
        return tokenizer.encode(sample.prompt + sample.answer_start)
    assert tokenizer.template is not None
    rendered = tokenizer.template.render([{"role": "user", "content": sample.prompt}])
    return tokenizer.encode(rendered + sample.answer_start, add_special_tokens=False)


def tally(answers: Sequence[Answer]) -> list[dict[str, Any]]:
    """Mean scores by task and length. Task "all" is the mean of the tasks."""
    cells: dict[tuple[str, int], list[Answer]] = {}
    for answer in answers:
        cells.setdefault((answer.task, answer.length), []).append(answer)
    rows = []
    for (task, length), own in cells.items():
        right = sum(answer.score for answer in own)
        low, high = (round(bound, 4) for bound in wilson(right, len(own)))
        tokens = round(sum(answer.tokens for answer in own) / len(own))
        row = {"task": task, "length": length, "asked": len(own), "tokens": tokens}
        rows.append({**row, "share": round(right / len(own), 4), "low": low, "high": high})
    return [*rows, *_means(rows)]


def _means(rows: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    means = []
    for length in dict.fromkeys(row["length"] for row in rows):
        shares = [row["share"] for row in rows if row["length"] == length]
        mean = round(sum(shares) / len(shares), 4)
        means.append({"task": "all", "length": length, "asked": len(shares), "share": mean})
    return means
