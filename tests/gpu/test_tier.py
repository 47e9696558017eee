"""The host tier on a CUDA device: registered memory, streams, recorded steps, equal tokens."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from cairn import LLM, SamplingParams
from cairn.attention.hsa.backend import HSABackend
from cairn.engine.plan import StepPlan
from cairn.engine.step_result import InFlight
from cairn.memory import prompt_stage
from cairn.memory.copies import Transfer
from cairn.memory.groups import LayerGroup
from cairn.memory.kv_pool import HostPool
from cairn.memory.layout import CacheLayout
from cairn.memory.movers import StreamMover
from cairn.memory.pinned import CudaRegistry
from cairn.memory.prompt_stage import StagedStep
from tests.engine.lanes import tier_of
from tests.engine.tiered import check_clean, load, tiered
from tests.helpers import TINY_HILS, TINY_LLAMA, tokens_of, watch_frees, write_model

pytestmark = pytest.mark.gpu

CUDA = torch.device("cuda")
WIDE = {"hidden_size": 64}  # heads of 16, the least that kernels have
MODELS: dict[str, dict[str, Any]] = {
    "many": {**TINY_LLAMA, **WIDE},
    "mixed": {**TINY_LLAMA, **WIDE},
    "spread": {**TINY_LLAMA, **WIDE},
    "hils": {**TINY_HILS, **WIDE},
}
DENSE_PROMPTS = "dense"
SPARSE_ROWS = {"hsa_dense_below": 0}  # as with the tier, which knows no such rows by default
OPTIONS: dict[str, Any] = {"device": "cuda", "dtype": "float32", "chunked_prefill_size": 128}
PROMPTS = [tokens_of(60) + tokens_of(n, seed=n) for n in (20, 250, 90, 160)]
DRAWN = SamplingParams(max_tokens=40, temperature=0.8, seed=5, ignore_eos=True)
SLEEP = 10_000_000  # cycles, some milliseconds


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    models = {**MODELS, DENSE_PROMPTS: {**TINY_LLAMA, **WIDE}}
    return {
        name: write_model(tmp_path_factory.mktemp(name), config) for name, config in models.items()
    }


def answers(llm: LLM) -> list[list[int]]:
    """Cold, and again on prefixes that are in host memory by then."""
    found = [result.token_ids for result in llm.generate(PROMPTS, DRAWN)]
    return found + [result.token_ids for result in llm.generate(PROMPTS[1:3], DRAWN)]


@pytest.mark.parametrize("graph", [True, False], ids=["graph", "eager"])
@pytest.mark.parametrize("model", MODELS)
def test_tier_changes_no_token(model: str, graph: bool, folders: dict[str, Path]) -> None:
    options = {**OPTIONS, "disable_cuda_graph": not graph, "max_running_requests": 4}
    options |= {} if model == "hils" else SPARSE_ROWS
    with load(folders[model], kv_cache_gib=0.1, **options) as llm:
        expected = answers(llm)
    misses = []
    more = 2 if model == "spread" else 1  # its pages are half as large
    for frames in (28, 200):
        sizes = {"frames": more * frames, "pages": more * 200, "hot": more * 48}
        with tiered(folders[model], overlap=True, **{**options, **sizes}) as llm:
            assert (llm.engine.runner.stepper.graphs is not None) == graph
            assert answers(llm) == expected
            report = llm.engine.tier()
            assert report is not None and report.totals.resident > 0
            assert report.totals.hits > 0 or frames == 200
            misses.append(report.totals.misses)
            check_clean(llm.engine)
    # Where all fits, only pages that the prefix tree has already leave the device.
    assert misses[0] > 4 * misses[1]


@pytest.mark.parametrize("late", ["nothing", "copies", "attention"])
@pytest.mark.parametrize("copied", ["by run", "by kernel"])
def test_dense_prompts_through_the_stage(
    copied: str, late: str, folders: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Pages of the next layer are copied while attention reads those of this one, and neither
    outruns the other, however long one of them takes."""
    if copied == "by kernel":
        monkeypatch.setattr(prompt_stage, "_MOST_RUNS", 0)
    folder, options = folders[DENSE_PROMPTS], {**OPTIONS, **SPARSE_ROWS, "max_running_requests": 4}
    with load(folder, kv_cache_gib=0.1, **options) as llm:
        expected = answers(llm)
    with tiered(folder, frames=28, hot=48, overlap=True, **options) as llm:
        tier, backend = tier_of(llm.engine), llm.engine.runner.stepper.backend
        stage = tier.stage
        assert stage is not None and isinstance(backend, HSABackend)
        assert backend._tiered is not None and llm.engine.runner.stepper.graphs is not None
        # On whichever stream the work is put.
        slow: Any = stage if late == "copies" else backend._tiered._in_stage
        name = "_copy_in" if late == "copies" else "forward"
        real = getattr(slow, name)

        def slowly(*given: Any) -> Any:
            if late != "nothing":
                torch.cuda._sleep(SLEEP)  # type: ignore[no-untyped-call]
            return real(*given)

        setattr(slow, name, slowly)
        ahead = []
        begin = stage.begin

        def noted(step: StagedStep) -> None:
            ahead.append(step.ahead)
            begin(step)

        stage.begin = noted  # type: ignore[method-assign]
        assert answers(llm) == expected
        assert stage.bytes_in > 0 and any(ahead)
        check_clean(llm.engine)


def test_a_prompt_longer_than_the_device_is_read_densely(folders: dict[str, Path]) -> None:
    options = {**OPTIONS, **SPARSE_ROWS, "chunked_prefill_size": 64, "max_running_requests": 1}
    prompt = tokens_of(440)
    with load(folders[DENSE_PROMPTS], kv_cache_gib=0.1, **options) as llm:
        expected = llm.generate(prompt, DRAWN).token_ids
    with tiered(folders[DENSE_PROMPTS], frames=12, hot=24, overlap=True, **options) as llm:
        assert llm.generate(prompt, DRAWN).token_ids == expected
        assert tier_of(llm.engine).stats.bytes_in > 0
        check_clean(llm.engine)


@pytest.mark.parametrize("own_stream", [True, False], ids=["own stream", "between steps"])
@pytest.mark.parametrize("place", ["before", "after", "steps"])
def test_copies_and_steps_that_are_late_change_nothing(
    place: str, own_stream: bool, folders: dict[str, Path]
) -> None:
    """Copies that begin late, that are told late, and a device that lags far behind its host."""
    folder = folders["many"]
    options = {**OPTIONS, **SPARSE_ROWS, "max_running_requests": 4}
    with load(folder, kv_cache_gib=0.1, **options) as llm:
        expected = answers(llm)
    config = f'{{"host_gib": 0.1, "async_backup": {str(own_stream).lower()}}}'
    with tiered(folder, frames=28, hot=48, overlap=True, hisparse_config=config, **options) as llm:
        delay(llm, place)
        assert answers(llm) == expected
        check_clean(llm.engine)


def test_a_frame_is_held_until_its_copy_is_done() -> None:
    """And whoever took it earlier would be noticed: what is copied then is what they wrote."""
    frame, page = torch.empty(4096, device=CUDA), torch.empty(4096, pin_memory=True)

    def late(_: Sequence[Transfer]) -> None:
        torch.cuda._sleep(100 * SLEEP)  # type: ignore[no-untyped-call]
        page.copy_(frame, non_blocking=True)

    mover = StreamMover(late, CUDA, own_stream=True)
    transfers = [Transfer(page=2, frame=1)]
    for patient, copied in ((False, 3.0), (True, 1.0)):
        frame.fill_(1.0)
        mover.back_up(transfers)
        assert mover.poll() == []
        if patient:
            assert mover.wait() == transfers
        frame.fill_(3.0)
        torch.cuda.synchronize()
        assert page.eq(copied).all()
        assert mover.poll() == ([] if patient else transfers)


def delay(llm: LLM, place: str) -> None:
    tier = tier_of(llm.engine)
    pool, cache = llm.engine.runner.stepper.pool, llm.engine.scheduler.cache
    mover = tier._mover
    assert isinstance(mover, StreamMover)
    copy, launch = mover._copy, llm.engine.runner.launch

    def late(transfers: Sequence[Transfer]) -> None:
        if place == "before":
            torch.cuda._sleep(SLEEP)  # type: ignore[no-untyped-call]
        copy(transfers)
        if place == "after":
            torch.cuda._sleep(SLEEP)  # type: ignore[no-untyped-call]

    def lagging(plan: StepPlan) -> InFlight:
        torch.cuda._sleep(SLEEP)  # type: ignore[no-untyped-call]
        return launch(plan)

    mover._copy = late
    if place == "steps":
        llm.engine.runner.launch = lagging  # type: ignore[method-assign]
    # What nobody owns holds something else: numbers, since NaN might be drawn as no token at all.
    for tensor in (*pool.tensors(), *tier._host.tensors()):
        tensor.fill_(3.0)
    for g, allocator in enumerate(cache.allocators):

        def freed(page: int, group: int = g) -> None:
            for tensor in pool._by_group[group]:
                tensor[page] = 3.0

        watch_frees(allocator, freed)


def test_host_memory_is_registered_and_given_back() -> None:
    registry = CudaRegistry(CUDA)
    for _ in range(2):
        layout = CacheLayout.of_heads(2, 16, torch.bfloat16)
        host = HostPool(LayerGroup("kv", (0, 1), layout=layout), 3, 16, device=CUDA)
        assert all(tensor.is_pinned() for tensor in host.tensors())
        tensor = host.part(1)
        assert registry.register(tensor.data_ptr(), tensor.nbytes) is not None  # once is enough
        # Nobody else is blamed for that.
        assert torch.arange(5, device=CUDA).sum().item() == 10
        host.close()
        assert not tensor.is_pinned()


def test_the_engine_gives_host_memory_back(folders: dict[str, Path]) -> None:
    with tiered(folders["many"], frames=28, hot=48, **OPTIONS) as llm:
        tensors = tier_of(llm.engine)._host.tensors()
        assert all(tensor.is_pinned() for tensor in tensors)
        llm.generate(PROMPTS[0], max_tokens=4)
    assert not any(tensor.is_pinned() for tensor in tensors)


@pytest.mark.parametrize("threads", [32, 1024])
def test_any_block_size_swaps_the_same_pages_in(threads: int, folders: dict[str, Path]) -> None:
    found = []
    for size in (None, threads):
        block = "" if size is None else f', "swap_in_block_size": {size}'
        config = f'{{"host_gib": 0.1{block}}}'
        with tiered(folders["many"], frames=28, hot=48, hisparse_config=config, **OPTIONS) as llm:
            found.append(llm.generate(PROMPTS[1], DRAWN).token_ids)
    assert found[0] == found[1]
