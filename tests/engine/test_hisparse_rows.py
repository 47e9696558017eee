"""The host tier where an index selects single rows: pages are kept, rows are read.

With the tier and without, every token is the same, and every row that a query read.
"""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from cairn import LLM, SamplingParams
from cairn.attention.dsa_backend import DSABackend
from cairn.engine.engine import Engine, Progress
from cairn.engine.request import Request
from cairn.memory.hot_cache import HotCache
from cairn.memory.layout import INDEX
from tests.engine.lanes import Lane, ScriptedMover, tier_of
from tests.engine.tiered import MODELS, PAGE, check, check_clean, expected, load, tiered
from tests.helpers import GOLDENS, tokens_of, write_model
from tests.models.test_dsa import CASES, QUICK, SHARED, check_selections, read_by

SLOW = pytest.mark.slow
RECORDING = {"attention_backend": "tests.models.test_dsa:Recording", "dtype": "float32"}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("rows"), MODELS["rows"][0])


def golden_tier(case: str, page_size: int, **options: Any) -> LLM:
    """As few frames as one request can run with, and as few hot pages as one query needs. Whatever
    can leave the device has left it when a step begins."""
    topk = json.loads((GOLDENS / case / "config.json").read_text())["index_topk"]
    options = {"max_running_requests": 1, **RECORDING, **options}
    hot = -(-topk // page_size)
    llm = tiered(GOLDENS / case, frames=3, hot=hot, page_size=page_size, **options)
    step = llm.engine.step

    def step_alone() -> list[Progress]:
        leave_the_device(llm.engine)
        return step()

    llm.engine.step = step_alone  # type: ignore[method-assign]
    return llm


def leave_the_device(engine: Engine) -> None:
    tree = engine.scheduler.cache.tree
    while tree.evictable_pages(1):
        tree.evict_one(1)


GOLDEN_CASES = [
    (case, size, chunk)
    for case in CASES
    for size in (16, 64, 128)
    for chunk in (1, 7, 199, 200, 100, 4096)
    if case == SHARED or chunk in (7, 100)
]


@pytest.mark.parametrize(
    ("case", "page_size", "chunk"),
    [pytest.param(*own, marks=() if own == QUICK[0] else SLOW) for own in GOLDEN_CASES],
)
def test_goldens(case: str, page_size: int, chunk: int) -> None:
    golden = load_file(GOLDENS / case / "golden.safetensors")
    ids = golden["input_ids_a"].tolist()
    off = load(GOLDENS / case, page_size=page_size, chunked_prefill_size=chunk, **RECORDING)
    with golden_tier(case, page_size, chunked_prefill_size=chunk) as llm, off:
        expected = golden["logits_a"].log_softmax(-1)
        torch.testing.assert_close(llm.logprobs(ids), expected, rtol=0, atol=2e-4)
        check_selections(llm, case)
        for name in ("a", "short", "b"):  # b begins as a does; they part inside a page
            ids = golden[f"input_ids_{name}"].tolist()
            for own in (llm, off):
                read_by(own).clear()
                for _ in range(2):  # the recorder compares what is computed twice
                    result = own.generate(ids, max_tokens=32, ignore_eos=True)
                    assert result.token_ids == golden[f"greedy_ids_{name}"].tolist()
            assert read_by(llm) == read_by(off) != {}
        stats = tier_of(llm.engine).stats
        assert stats.misses > 0 and stats.bytes_out > 0
        check_clean(llm.engine)


class Rows(DSABackend):
    """Keeps which rows each query read, of whatever request."""

    name = "rows"

    def __init__(self, parts: Any) -> None:
        super().__init__(parts)
        self.read: set[tuple[int, int, tuple[int, ...]]] = set()

    def attend(self, layer: int, query: Any, piece: Any, positions: Any, step: Any) -> Any:
        for row, own in enumerate(positions.tolist()):
            self.read.add((layer, piece.first + row, tuple(own)))
        return super().attend(layer, query, piece, positions, step)


def rows_read(llm: LLM) -> set[tuple[int, int, tuple[int, ...]]]:
    backend = llm.engine.runner.stepper.backend
    assert isinstance(backend, Rows)
    return backend.read


@pytest.mark.parametrize("page_size", [16, pytest.param(64, marks=SLOW)])
@pytest.mark.parametrize("chunk", [40, pytest.param(7, marks=SLOW)])
def test_batched_traced_and_retracted_requests_read_the_same_rows(
    folder: Path, page_size: int, chunk: int
) -> None:
    shared = tokens_of(130, seed=9)
    prompts = [tokens_of(200), shared, [*shared[:100], *tokens_of(30, seed=5)], tokens_of(12)]
    params = SamplingParams(max_tokens=40, ignore_eos=True)
    options: dict[str, Any] = {
        "attention_backend": "tests.engine.test_hisparse_rows:Rows",
        "page_size": page_size,
        "chunked_prefill_size": chunk,
    }
    with load(folder, **options) as llm:
        off = llm.generate(prompts, params, trace=True)
        everything = rows_read(llm)
    with tiered(folder, frames=200 // page_size + 2, hot=64 // page_size, **options) as llm:
        for _ in range(2):  # cold, and warm
            on = llm.generate(prompts, params, trace=True)
            assert [own.token_ids for own in on] == [own.token_ids for own in off]
            for one, other in zip(on, off, strict=True):
                assert one.trace is not None and other.trace is not None
                for own, same in zip(one.trace.tokens, other.trace.tokens, strict=True):
                    assert [x.pages for x in own.layers] == [x.pages for x in same.layers]
        assert rows_read(llm) == everything
        check_clean(llm.engine)
        rows_read(llm).clear()
        requests = [submit(llm.engine, prompt, 40) for prompt in prompts]
        steps = 0
        while llm.engine.has_work:
            llm.engine.step()
            steps += 1
            running = list(llm.engine.scheduler._running.values())
            if running and steps % 5 == 0 and steps < 60:
                llm.engine.scheduler._retract(running[steps // 5 % len(running)])
            check(llm.engine)
        assert [own.output_ids for own in requests] == [own.token_ids for own in off]
        assert rows_read(llm) == everything
        check_clean(llm.engine)


def submit(engine: Engine, prompt: list[int], most: int) -> Request:
    params = SamplingParams(max_tokens=most, ignore_eos=True)
    (request,) = engine.make_requests(prompt, params)
    engine.submit(request)
    return request


# -- one plan for layers that share a selection -------------------------------------------------


def test_layers_that_share_a_selection_share_one_plan(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plans: list[HotCache] = []
    plan = HotCache.plan

    def counted(self: HotCache, *given: Any) -> Any:
        plans.append(self)
        return plan(self, *given)

    monkeypatch.setattr(HotCache, "plan", counted)
    with tiered(folder, frames=8, max_running_requests=1) as llm:
        tier = tier_of(llm.engine)
        assert tier._hot[0] is tier._hot[1] is not tier._hot[2]  # full, shared, full
        request = submit(llm.engine, tokens_of(200), 40)
        while request.num_output < 2:
            llm.engine.step()
        leave_the_device(llm.engine)
        plans.clear()
        before = tier.stats
        copied: list[tuple[int, list[int], list[int]]] = []
        copy = tier._copy_in

        def copy_in(layer: int, heads: Any, slices: Any, slots: Any) -> None:
            copied.append((layer, slices.tolist(), slots.tolist()))
            copy(layer, heads, slices, slots)

        monkeypatch.setattr(tier, "_copy_in", copy_in)
        llm.engine.step()
        assert plans == [tier._hot[0], tier._hot[2]]
        (first, *one), (second, *same), _ = copied
        assert (first, second) == (0, 1) and one == same
        reads = tier.stats.resident + tier.stats.hits + tier.stats.misses
        assert reads - before.resident - before.hits - before.misses == 3 * 24


@pytest.mark.parametrize("naive", [False, True], ids=["ours", "naive"])
@pytest.mark.parametrize("layer", [0, 1, 2])
def test_a_step_that_fails_between_layers_of_one_plan(
    folder: Path, naive: bool, layer: int
) -> None:
    """The plan says that both layers have the rows, and only the first has copied them."""
    with tiered(folder, frames=8, max_running_requests=1) as llm:
        engine, tier = llm.engine, tier_of(llm.engine)
        if naive:
            tier.forget = lambda: None  # type: ignore[method-assign]
        request = submit(engine, tokens_of(200), 40)
        while request.num_output < 2:
            engine.step()
        leave_the_device(engine)
        again = tier.swap_in_again

        def fail(own: int, swapped: Any) -> None:
            if own == layer:
                raise KeyboardInterrupt
            again(own, swapped)

        tier.swap_in_again = fail  # type: ignore[assignment, method-assign]
        with pytest.raises(KeyboardInterrupt):
            engine.step()
        tier.swap_in_again = again  # type: ignore[method-assign]
        leave_the_device(engine)

        def run() -> None:
            check(engine)
            while engine.has_work:
                engine.step()
            wanted = expected(folder, tuple(tokens_of(200)), request.params)
            assert request.output_ids == wanted
            check_clean(engine)

        if naive and layer == 1:  # a layer that makes the plan forgets it by itself
            with pytest.raises(AssertionError):
                run()
        else:
            run()


def test_a_step_that_fails_while_it_reads_the_stage(folder: Path) -> None:
    """The layer in the stage is freed at once, and the next step fills it as if nothing was."""
    with tiered(folder, frames=8, max_running_requests=1, chunked_prefill_size=64) as llm:
        engine = llm.engine
        stage, backend = tier_of(engine).stage, engine.runner.stepper.backend
        assert stage is not None and isinstance(backend, DSABackend)
        request = submit(engine, tokens_of(200), 20)
        attend, staged = backend.attend, list[int]()

        def fail(layer: int, query: Any, piece: Any, *given: Any) -> Any:
            if layer == 1 and piece.staged:
                staged.extend(stage._staged)
                raise KeyboardInterrupt
            return attend(layer, query, piece, *given)

        backend.attend = fail  # type: ignore[assignment, method-assign]
        with pytest.raises(KeyboardInterrupt):
            while engine.has_work:
                leave_the_device(engine)
                engine.step()
        assert request.num_output == 0 and staged == [1] and not stage._staged
        backend.attend = attend  # type: ignore[method-assign]
        while engine.has_work:
            engine.step()
        assert request.output_ids == expected(folder, tuple(tokens_of(200)), request.params)
        assert not stage._staged
        check_clean(engine)


# -- who reads what -----------------------------------------------------------------------------


def test_requests_on_one_prefix_share_hot_rows(folder: Path) -> None:
    """A later request reads what an earlier one has brought to the device."""
    prompt = tokens_of(160)
    with tiered(folder, frames=8, hot=40) as llm:  # room for every row that is read
        tier = tier_of(llm.engine)
        copied: list[set[int]] = []
        copy = tier._copy_in

        def copy_in(layer: int, heads: Any, slices: Any, slots: Any) -> None:
            if layer == 0:
                copied[-1] |= set(slices.tolist())
            copy(layer, heads, slices, slots)

        tier._copy_in = copy_in  # type: ignore[method-assign]
        for _ in range(3):
            copied.append(set())
            hits = tier.stats.hits
            result = llm.generate(prompt, max_tokens=20, ignore_eos=True)
            leave_the_device(llm.engine)
        assert result.usage.cached_tokens == 144 and tier.stats.hits > hits
        group = tier.page_group
        prefix = {node.pages[group] for node in llm.engine.scheduler.cache.tree.nodes()}
        first, second, third = ({row for row in own if row // PAGE in prefix} for own in copied)
        assert len(first | second) > 100 and not third & (first | second)
        check_clean(llm.engine)


def test_index_keys_of_recycled_pages_are_never_read(folder: Path) -> None:
    """Ids go from request to request, and what is free is NaN."""
    with tiered(folder, frames=8, pages=16, max_running_requests=1) as llm:
        pool, group = llm.engine.runner.stepper.pool, tier_of(llm.engine).page_group
        keys = [pool.part(layer, INDEX) for layer in (0, 2)]
        assert all(len(tensor) == 17 for tensor in keys)
        assert all(any(own is tensor for own in pool._by_group[group]) for tensor in keys)
        used = llm.engine.scheduler.cache.stats
        for seed in range(6):
            prompt, params = tokens_of(150, seed), SamplingParams(max_tokens=20, ignore_eos=True)
            result = llm.generate(prompt, params)
            assert result.token_ids == expected(folder, tuple(prompt), params)
        assert used.evicted_pages > 32
        check_clean(llm.engine)
        assert all(tensor[1:].isnan().all() for tensor in keys)


@pytest.mark.parametrize("chunk", [16, pytest.param(64, marks=SLOW)])
def test_an_abort_at_every_point(folder: Path, chunk: int) -> None:
    prompt = tokens_of(100)
    with tiered(folder, frames=7, pages=24, chunked_prefill_size=chunk) as llm:
        mover = ScriptedMover(llm.engine, Lane(), late=True, rng=random.Random(0))
        for steps in range(1, 22):
            other = submit(llm.engine, tokens_of(40, seed=3), 8)
            aborted = submit(llm.engine, prompt, 12)
            for _ in range(steps):
                if llm.engine.has_work:
                    llm.engine.step()
                    mover.finish(1)
            llm.engine.abort(aborted.id)
            while llm.engine.has_work:
                llm.engine.step()
                mover.finish(2)
                check(llm.engine)
            wanted = expected(folder, tuple(tokens_of(40, seed=3)), other.params)
            assert other.output_ids == wanted
        check_clean(llm.engine)
