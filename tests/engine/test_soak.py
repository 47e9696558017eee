"""Many requests at once, each equal to the same request alone.

Pages are so few that requests are retracted. KV is in host memory or on the device, some requests
are bound by grammars, whose masks come from their processes whenever they come, and some are
aborted. Without host memory, all of them draft, and some drafts are lies.
"""

from __future__ import annotations

import random
import select
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from llguidance import LLMatcher

from cairn import LLM, SamplingParams
from cairn.engine.engine import Progress
from cairn.engine.request import Request
from cairn.frontend import Driver
from cairn.server.grammars import Follower, Grammars
from cairn.server.wire import Grammar
from cairn.text.tokenizer import Tokenizer
from tests.engine.test_speculation import Always, Liar
from tests.engine.tiered import MODELS, check_clean, load, tiered
from tests.helpers import byte_tokenizer, tokens_of, write_model

END = 255
KV_GIB = 7e-5
LETTERS = r"[a-f]{1,40}"
LIST = r"\[([0-9]{1,3}, ){0,12}[0-9]{1,3}\]"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    config = {**MODELS["quest"][0], "vocab_size": 256, "eos_token_id": END}
    return write_model(tmp_path_factory.mktemp("quest"), config)


@pytest.fixture(scope="module")
def grammars() -> Iterator[Grammars]:
    made = Grammars(Tokenizer(byte_tokenizer(), None), 256, frozenset({END}))
    yield made
    made.close()


@dataclass(frozen=True)
class Asked:
    prompt: tuple[int, ...]
    params: SamplingParams
    grammar: Grammar | None


def draw(rng: random.Random, count: int) -> list[Asked]:
    """Some share a prefix; some ask for the same."""
    asked = []
    for _ in range(count):
        shared = tokens_of(rng.choice((0, 16, 48, 90)), seed=rng.randrange(3))
        own = tokens_of(rng.randrange(1, 60), seed=rng.randrange(count))
        params = SamplingParams(
            max_tokens=rng.randrange(1, 60),
            temperature=rng.choice((0.0, 1.0)),
            seed=rng.randrange(5),
        )
        grammar = rng.choice((None, None, LETTERS, LIST))
        bound = grammar and Grammar(LLMatcher.grammar_from_regex(grammar), "response_format")
        asked.append(Asked(tuple(shared + own), params, bound or None))
    return asked


class Soaked(Driver[list[Follower]]):
    """Drives an engine as the server's engine process does."""

    def __init__(self, llm: LLM, grammars: Grammars) -> None:
        super().__init__(llm.engine)
        self._grammars = grammars
        self._numbers = iter(range(10**9))
        self.asked: list[Request] = []

    def ask(self, asked: Asked) -> Request:
        number = next(self._numbers)
        (request,) = self.engine.make_requests(list(asked.prompt), asked.params, first_id=number)
        followers = []
        if asked.grammar is not None:
            followers = self._grammars.follow(asked.grammar, [number])
            request.allowed_tokens, request.host_tokens = followers[0], True
        self.add([request], [followers])
        self.asked.append(request)
        return request

    def deliver(self, progress: Sequence[Progress]) -> None:
        speculation = self.engine.scheduler.speculation
        for each in progress:
            ended = each.request.finish_reason is not None
            for follower in self._open[each.request.id]:
                drafts = [] if ended or not speculation else speculation.suggest(each.request)
                follower.close() if ended else follower.advance(each.new_tokens, drafts)
            if ended:
                del self._open[each.request.id]

    def leave(self, request: Request) -> None:
        for follower in self.end(request.id, "abort") or ():
            follower.close()

    def advance(self) -> None:
        self._grammars.take()
        assert not self._grammars.take_failed()
        if self.engine.has_work:
            self.step()
        if self.engine.stalled:
            select.select([connection for connection, _ in self._grammars.watched()], [], [], 1)


def alone(folder: Path, grammars: Grammars, dtype: str, asked: Sequence[Asked]) -> list[list[int]]:
    results = []
    options = {"disable_radix_cache": True, "chunked_prefill_size": 4096}
    with load(folder, dtype=dtype, **options) as llm:
        driver = Soaked(llm, grammars)
        for each in asked:
            request = driver.ask(each)
            while driver.engine.has_work:
                driver.advance()
            results.append(request.output_ids)
    return results


def soak(
    folder: Path, grammars: Grammars, *, tier: bool, dtype: str, chunk: int, count: int, seed: int
) -> int:
    """Returns the number of retractions."""
    rng = random.Random(seed)
    asked = draw(rng, count)
    expected = alone(folder, grammars, dtype, asked)
    options: dict[str, Any] = {
        "dtype": dtype,
        "chunked_prefill_size": chunk,
        "max_running_requests": 6,
    }
    overlap = seed % 2 == 1
    if tier:
        llm = tiered(folder, frames=40, pages=18, overlap=overlap, **options)
    else:
        room = KV_GIB * (2 if dtype == "float64" else 1)
        llm = load(folder, kv_cache_gib=room, speculative="ngram", **options)
        llm.engine.overlap = overlap
        speculation = llm.engine.scheduler.speculation
        assert speculation is not None
        truth = [(*each.prompt, *own) for each, own in zip(asked, expected, strict=True)]
        speculation.pace, speculation.drafter = Always(), Liar(truth, seed, honest=0.9)
    with llm:
        object.__setattr__(llm.engine.scheduler.limits, "reserved_output", 4)
        driver = Soaked(llm, grammars)
        waiting = list(enumerate(asked))
        running: dict[int, Request] = {}
        different = []
        while waiting or running:
            while waiting and len(running) < 10:
                index, each = waiting.pop()
                running[index] = driver.ask(each)
            driver.advance()
            if rng.random() < 0.02:
                left = rng.choice(list(running))
                driver.leave(running.pop(left))
            for index, request in list(running.items()):
                if request.finish_reason is not None:
                    del running[index]
                    if request.output_ids != expected[index]:
                        different.append(index)
        while driver.engine.has_work:
            driver.advance()
        driver.engine.step()
        assert different == []
        if tier:
            check_clean(driver.engine)
        else:
            assert bound_drafts(driver.asked) > 0
        return llm.engine.scheduler.stats.retractions


def bound_drafts(requests: Sequence[Request]) -> int:
    """Number of right drafts of requests with a grammar."""
    return sum(own.accepted_tokens for own in requests if own.allowed_tokens is not None)


@pytest.mark.parametrize(("tier", "seed"), [(True, 2), (False, 3)])
def test_a_short_soak(folder: Path, grammars: Grammars, tier: bool, seed: int) -> None:
    assert soak(folder, grammars, tier=tier, dtype="float64", chunk=64, count=12, seed=seed) > 0


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["float64", "float32"])
@pytest.mark.parametrize("tier", [True, False])
@pytest.mark.parametrize("chunk", [16, 64, 2048])
def test_a_long_soak(folder: Path, grammars: Grammars, tier: bool, dtype: str, chunk: int) -> None:
    retractions = 0
    for seed in range(2):
        retractions += soak(
            folder, grammars, tier=tier, dtype=dtype, chunk=chunk, count=100, seed=seed
        )
    assert retractions > 0
