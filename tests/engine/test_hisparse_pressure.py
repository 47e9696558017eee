"""The host tier when there is not enough of something: served later, or refused, never a crash."""

from __future__ import annotations

import random
import time
from pathlib import Path
from typing import Any

import pytest

from cairn import LLM, SamplingParams
from cairn.engine.engine import Engine
from cairn.engine.request import Request
from cairn.errors import RequestError
from tests.engine.lanes import LaggingRunner, Lane, ScriptedMover, tier_of
from tests.engine.tiered import (
    MODELS,
    PAGE,
    check,
    check_clean,
    expected,
    options_of,
    tiered,
)
from tests.helpers import poison_free_memory, tokens_of, write_model


@pytest.fixture(
    scope="module",
    params=["dense", *(pytest.param(own, marks=pytest.mark.slow) for own in ("quest", "rows"))],
)
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp(request.param), MODELS[request.param][0])


def submit(engine: Engine, prompt: list[int], most: int) -> Request:
    (request,) = engine.make_requests(prompt, SamplingParams(max_tokens=most, ignore_eos=True))
    engine.submit(request)
    return request


def assert_right(folder: Path, request: Request) -> None:
    prompt = tuple(request.token_ids[: request.prompt_len])
    assert request.output_ids == expected(folder, prompt, request.params)


def drain(engine: Engine) -> None:
    while engine.has_work:
        engine.step()
        check(engine)


@pytest.mark.parametrize("radix", [True, False])
def test_a_full_host_evicts_or_queues(folder: Path, radix: bool) -> None:
    with tiered(folder, frames=20, pages=24, disable_radix_cache=not radix) as llm:
        requests = [submit(llm.engine, tokens_of(100, seed=seed), 30) for seed in range(8)]
        drain(llm.engine)
        for request in requests:
            assert_right(folder, request)
        assert llm.engine.scheduler.stats.retractions == 0  # they waited for room instead
        if radix:
            assert llm.engine.scheduler.cache.stats.evicted_pages > 0
        check_clean(llm.engine)


def test_a_full_device_gives_frames_to_one_after_the_other(folder: Path) -> None:
    with tiered(folder, frames=6, hot=2, max_running_requests=4) as llm:
        requests = [submit(llm.engine, tokens_of(90, seed=seed), 20) for seed in range(4)]
        drain(llm.engine)
        for request in requests:
            assert_right(folder, request)
        check_clean(llm.engine)


def test_a_request_that_outlives_its_reservation_is_retracted_and_resumes(folder: Path) -> None:
    with tiered(folder, frames=40, pages=14, max_running_requests=2) as llm:
        object.__setattr__(llm.engine.scheduler.limits, "reserved_output", 20)
        requests = [submit(llm.engine, tokens_of(60, seed=seed), 100) for seed in (1, 2)]
        drain(llm.engine)
        assert llm.engine.scheduler.stats.retractions > 0
        for request in requests:
            assert_right(folder, request)
        check_clean(llm.engine)


def test_output_is_reserved_for_at_admission(folder: Path) -> None:
    """Two would fit by their prompts, not by what they may generate."""
    with tiered(folder, frames=40, pages=14, max_running_requests=2) as llm:
        requests = [submit(llm.engine, tokens_of(60, seed=seed), 100) for seed in (1, 2)]
        llm.engine.step()
        assert llm.engine.scheduler.num_running == 1
        drain(llm.engine)
        assert llm.engine.scheduler.stats.retractions == 0
        for request in requests:
            assert_right(folder, request)


def test_retraction_costs_no_page_that_was_complete(folder: Path) -> None:
    with tiered(folder, frames=60) as llm:
        mover = ScriptedMover(llm.engine, Lane(), late=True, rng=random.Random(1))
        other = submit(llm.engine, tokens_of(5, seed=8), 60)
        request = submit(llm.engine, tokens_of(150), 60)
        while request.num_output < 20:
            llm.engine.step()
        computed = llm.engine.stats.computed_tokens
        known = len(request.token_ids)
        llm.engine.scheduler._retract(request)
        steps = 0
        while request.pages is None:  # its pages are still on their way: it waits for them
            llm.engine.step()
            steps += 1
            mover.finish(1)
        assert steps > 2
        llm.engine.step()
        again = llm.engine.stats.computed_tokens - computed - steps - 1
        assert 0 < again <= known % PAGE + 1
        drain(llm.engine)
        assert_right(folder, request)
        assert_right(folder, other)


def test_a_prompt_that_no_host_memory_could_hold_is_refused(folder: Path) -> None:
    with tiered(folder, frames=20, pages=12) as llm:
        with pytest.raises(RequestError, match="the KV cache holds 192"):
            llm.generate(tokens_of(300), max_tokens=5)
        assert llm.generate(tokens_of(100), max_tokens=5).token_ids
        check_clean(llm.engine)


@pytest.mark.parametrize("when", ["launch", "finish"])
def test_a_step_that_fails_loses_no_page_and_no_token(folder: Path, when: str) -> None:
    with tiered(folder, frames=20, overlap=True) as llm:
        engine = llm.engine
        if when == "finish":  # the device finds out long after the host has gone on
            lane = Lane()
            LaggingRunner(engine, lane)
            poison_free_memory(engine, lane.add)
        warm = submit(engine, tokens_of(130), 10)
        drain(engine)
        while engine.scheduler.cache.tree.evictable_pages(1):
            engine.scheduler.cache.tree.evict_one(1)
        requests = [submit(engine, [*tokens_of(130), seed], 20) for seed in (1, 2)]
        requests.append(submit(engine, tokens_of(100, seed=7), 20))  # completes pages at once
        begin, calls = tier_of(engine).begin_step, 0

        def fail_twice(edits: Any) -> None:
            nonlocal calls
            calls += 1
            if calls in (1, 6, 9):
                raise OSError("no more")
            begin(edits)

        tier_of(engine).begin_step = fail_twice  # type: ignore[method-assign]
        failures = 0
        while engine.has_work:
            try:
                engine.step()
            except OSError:
                failures += 1
            check(engine)
        assert failures == 3
        for request in (warm, *requests):
            assert_right(folder, request)
        check_clean(engine)


@pytest.mark.parametrize("failing", ["_copy_in", "_copy_out", "stage.fill", "stage._copy_in"])
def test_a_copy_that_is_interrupted_leaves_nothing_wrong_behind(folder: Path, failing: str) -> None:
    """Ctrl-C in the middle of a step, wherever copies are made."""
    prompt = tokens_of(250)
    params = SamplingParams(max_tokens=30, ignore_eos=True)
    for when in (1, 2, 5, 6):
        with tiered(folder, frames=8, hot=4, chunked_prefill_size=32) as llm:
            tier, calls = tier_of(llm.engine), 0
            copies: Any = tier.stage if "stage" in failing else tier
            if copies is None:
                pytest.skip("prompts are read sparsely")
            name = failing.removeprefix("stage.")
            real = getattr(copies, name)

            def interrupted(*given: Any, real: Any = real, when: int = when) -> None:
                nonlocal calls
                calls += 1
                if calls == when:
                    raise KeyboardInterrupt
                real(*given)

            setattr(copies, name, interrupted)
            tier._mover._copy = tier._copy_out
            with pytest.raises(KeyboardInterrupt):
                llm.generate(prompt, params)
            result = llm.generate(prompt, params)
            assert result.token_ids == expected(folder, tuple(prompt), params)
            check_clean(llm.engine)


def test_as_many_run_at_once_as_there_are_frames_for(folder: Path) -> None:
    """Who decodes does not keep a prefill chunk's frames from others."""
    most = 0
    with tiered(folder, frames=60, max_running_requests=8, chunked_prefill_size=256) as llm:
        for seed in range(8):
            submit(llm.engine, tokens_of(100, seed=seed), 60)
        while llm.engine.has_work:
            llm.engine.step()
            most = max(most, llm.engine.scheduler.num_running)
        assert most == 8 and llm.engine.scheduler.stats.retractions == 0


def test_copies_in_a_thread(folder: Path) -> None:
    prompts = [tokens_of(150, seed=seed) for seed in range(4)]
    params = SamplingParams(max_tokens=30, ignore_eos=True)
    options = {"enable_hisparse": True, "kv_cache_gib": 0.002, "max_running_requests": 3}
    settings = '{"host_gib": 0.01, "async_backup": true}'
    if "rows" in folder.name:
        options["kv_cache_gib"] = 0.004  # the index keys of all pages
    with LLM(folder, **options_of(folder), **options, hisparse_config=settings) as llm:
        for _ in range(2):
            results = llm.generate(prompts, params)
            for prompt, result in zip(prompts, results, strict=True):
                assert result.token_ids == expected(folder, tuple(prompt), params)
        check_clean(llm.engine)
        report = llm.engine.tier()
        assert report is not None and "hits" in str(report)
        assert sum(report.pages.values()) == llm.engine.scheduler.cache.allocators[0].num_pages
        assert report.totals.bytes_out > 0


def soak(folder: Path, seconds: float) -> None:
    """Mixed load with aborts, in at least three waves; accounting is exact whenever nothing runs,
    and the process does not grow."""
    rng = random.Random(5)
    deadline = time.monotonic() + seconds
    with tiered(folder, frames=30, pages=80, hot=6, overlap=True) as llm:
        engine = llm.engine
        ScriptedMover(engine, Lane(), late=True, rng=rng)
        sizes = []
        waves = 0
        while waves < 3 or time.monotonic() < deadline:
            waves += 1
            for _ in range(12):
                shared = tokens_of(250, seed=rng.randrange(6))
                prompt = [*shared[: rng.randrange(1, 250)], rng.randrange(3, 60)]
                submit(engine, prompt, rng.randrange(1, 60))
            while engine.has_work:
                engine.step()
                if rng.random() < 0.02:
                    open_ = list(engine.scheduler._requests)
                    engine.abort(rng.choice(open_) if open_ else "none")
            engine.step()
            while engine.scheduler.cache.reclaim():
                pass
            check(engine)
            assert all(usage.owned == 0 for usage in engine.usage())
            sizes.append(_resident_mib())
        check_clean(engine)
        assert sizes[-1] - sizes[len(sizes) // 4] < 16, sizes


def _resident_mib() -> float:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) / 1024 for line in lines if line.startswith("VmRSS"))


def test_closing_lets_go_of_host_memory(folder: Path) -> None:
    with tiered(folder, frames=20) as llm:
        llm.generate(tokens_of(100), max_tokens=5)
        tier = tier_of(llm.engine)
        assert tier._host.tensors()
    assert not tier._host.tensors()


def test_a_short_soak(folder: Path) -> None:
    soak(folder, 0)


@pytest.mark.slow
def test_a_long_soak(folder: Path) -> None:
    soak(folder, 15 * 60)
