"""Whatever is asked of an engine, in any order: its ranks stay in step, and nobody sees that there
are two. One engine for each configuration serves all of the random interleavings."""

from __future__ import annotations

import os
import random
import signal
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cairn import LLM, SamplingParams
from cairn.engine.memory_plan import size_pools
from cairn.engine.request import Request
from cairn.errors import RankError
from cairn.memory.copies import Transfer
from cairn.memory.movers import HostMover
from tests.engine.tiered import MODELS, check_clean, tiered
from tests.helpers import TINY_HILS, TINY_LLAMA, TINY_OLMO3, tokens_of, write_model
from tests.parallel.ranks import SPARSE, in_step, lead, load
from tests.patience import PATIENCE

DENSE: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "llama": (TINY_LLAMA, {}),
    "olmo3": (TINY_OLMO3, {}),
    "hils-native": (TINY_HILS, {}),
    "hsa": (TINY_LLAMA, SPARSE),
}
ASYNC = '{"host_gib": 0.1, "async_backup": true}'
LENGTHS = (1, 15, 16, 17, 40, 70, 110)


@dataclass
class Pair:
    """An engine on two ranks, and one on one rank that says what is right."""

    two: LLM
    one: LLM
    known: dict[tuple[tuple[int, ...], SamplingParams], list[int]] = field(default_factory=dict)

    def expected(self, prompt: list[int], params: SamplingParams) -> list[int]:
        key = tuple(prompt), params
        if key not in self.known:
            self.known[key] = self.one.generate(prompt, params).token_ids
        return self.known[key]


def scarce(folder: Path, pages: int, **options: Any) -> LLM:
    """Two ranks with so few pages in each group that requests are retracted."""

    def sized(*args: Any) -> list[int]:
        return [min(count, pages) for count in size_pools(*args)]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("cairn.engine.memory_plan.size_pools", sized)
        return load(folder, 2, **options)


QUICK = ("llama", "hils-async")
"""The others differ in what a step computes, and little in what ranks must agree on."""


@pytest.fixture(
    scope="module",
    params=[
        pytest.param(name, marks=() if name in QUICK else pytest.mark.slow)
        for name in (*DENSE, "quest", "windows", "hils", "hils-async")
    ],
)
def pair(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Pair]:
    name = request.param
    common = {"dtype": "float64", "chunked_prefill_size": 24, "max_running_requests": 4}
    if name in DENSE:
        config, own = DENSE[name]
        folder = write_model(tmp_path_factory.mktemp(name) / name, config)
        two = scarce(folder, 14, **common, **own)
    else:
        config, own = MODELS[name.removesuffix("-async")]
        folder = write_model(tmp_path_factory.mktemp(name) / name, config)
        if name == "hils-async":
            common["hisparse_config"] = ASYNC
        two = tiered(folder, frames=16, pages=40, hot=12, tp=2, **{**common, **own})
    alone = {**own, "dtype": "float64", "disable_radix_cache": True}
    with two, load(folder, 1, **alone) as one:
        yield Pair(two, one)


def params_of(draw: random.Random) -> SamplingParams:
    return SamplingParams(
        max_tokens=draw.choice([1, 7, 30]),
        ignore_eos=True,
        temperature=draw.choice([0.0, 0.9]),
        seed=draw.randrange(2),
        presence_penalty=draw.choice([0.0, 0.5]),
    )


@settings(max_examples=min(6, settings().max_examples // 25))
@given(seed=st.integers(0, 2**32), overlap=st.booleans(), length=st.integers(5, 30))
def test_ranks_stay_in_step(pair: Pair, seed: int, overlap: bool, length: int) -> None:
    draw = random.Random(seed)
    engine = pair.two.engine
    engine.overlap = overlap
    submitted: list[tuple[Request, list[int]]] = []
    for _ in range(length):
        match draw.choice(["submit", "submit", "step", "step", "step", "abort", "clear"]):
            case "submit":
                prompt = tokens_of(110, seed=draw.randrange(2))[: draw.choice(LENGTHS)]
                (request,) = engine.make_requests(prompt, params_of(draw))
                engine.submit(request)
                submitted.append((request, prompt))
            case "step" if engine.has_work:
                engine.step()
            case "abort" if submitted:
                engine.abort(draw.choice(submitted)[0].id)
            case "clear":
                engine.scheduler.cache.clear()
        in_step(pair.two.engine)
    while engine.has_work or engine._in_flight is not None:
        engine.step()
        in_step(engine)
    for request, prompt in submitted:
        whole = pair.expected(prompt, request.params)
        assert request.output_ids == whole[: len(request.output_ids)]
        if request.finish_reason != "abort":
            assert len(request.output_ids) == len(whole)


def test_retraction_and_prefix_hits(pair: Pair) -> None:
    stem = tokens_of(40, seed=7)
    prompts = [stem + tokens_of(10 + i, seed=i) for i in range(5)]
    params = SamplingParams(max_tokens=65, ignore_eos=True)
    cache, before = pair.two.engine.scheduler.cache, pair.two.engine.scheduler.stats.retractions
    for _ in range(2):
        results = pair.two.generate(prompts, params)
        for prompt, result in zip(prompts, results, strict=True):
            assert result.token_ids == pair.expected(prompt, params)
        in_step(pair.two.engine)
    assert cache.stats.hit_tokens > 0
    if cache.copies is None:
        assert pair.two.engine.scheduler.stats.retractions > before
    else:
        report = pair.two.engine.tier()
        assert report is not None
        # Pages left the device on both ranks, and were read from host memory or fetched again.
        assert report.totals.misses and cache.copies.fetched_pages
        runner = lead(pair.two.engine)
        assert runner.tier is not None
        assert report.totals.bytes_out == 2 * runner.tier.stats.bytes_out
        check_clean(pair.two.engine)


def test_a_rank_that_differs_is_found(tmp_path: Path) -> None:
    with load(write_model(tmp_path, TINY_LLAMA), 2) as llm:
        llm.generate([5, 6, 7], max_tokens=2)
        in_step(llm.engine)
        lead(llm.engine).tables.pages[0, 0, 0] += 1
        with pytest.raises(RankError, match="rank 1 has other tables"):
            llm.engine.step()


def test_a_page_has_arrived_when_every_rank_has_copied_it(tmp_path: Path) -> None:
    folder = write_model(tmp_path / "quest", TINY_LLAMA)
    with tiered(folder, frames=16, tp=2) as llm:
        runner = lead(llm.engine)
        (pid,) = runner.ranks.pids
        assert runner.mover is not None and runner.tier is not None
        page = Transfer(page=3, frame=5)
        os.kill(pid, signal.SIGSTOP)
        runner.mover.back_up([page])
        assert runner.tier.stats.bytes_out > 0  # rank 0 has its part
        assert runner.mover.poll() == []
        os.kill(pid, signal.SIGCONT)
        assert runner.mover.wait() == [page]
        assert runner.mover.poll() == []


def test_a_page_that_the_other_rank_copies_first(tmp_path: Path) -> None:
    """Waiting ends with rank 0's own copy: nothing more is to come from the other."""
    folder = write_model(tmp_path / "quest", TINY_LLAMA)
    with tiered(folder, frames=16, tp=2, hisparse_config=ASYNC) as llm:
        runner = lead(llm.engine)
        assert runner.mover is not None and runner.tier is not None
        copier = runner.tier._mover
        assert isinstance(copier, HostMover) and copier._thread is not None
        go_on = threading.Event()
        copier._thread.submit(go_on.wait)
        page = Transfer(page=3, frame=5)
        runner.mover.back_up([page])
        assert runner.ranks._wait_for_any(PATIENCE) == 1
        assert runner.mover.poll() == []
        go_on.set()
        assert runner.mover.wait() == [page]
