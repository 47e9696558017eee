"""Builds what each rank runs from the resolved choices: pools, host tier, attention, runner."""

from __future__ import annotations

from dataclasses import replace
from typing import NamedTuple, Protocol

import torch

from cairn.attention.backend import AttentionBackend, SparseBackend, SparseParts, missing_module
from cairn.attention.pair_backend import PairBackend
from cairn.engine.graphs import most_decode_rows
from cairn.engine.hisparse_options import prompt_stages
from cairn.engine.memory_plan import MemoryPlan, TierSizes
from cairn.engine.resolve import EngineChoices
from cairn.engine.runner import Runner
from cairn.engine.step_time import step_sizes
from cairn.engine.warm_up import rehearsals, rungs_of
from cairn.kernels.interface import COPY_THREADS
from cairn.memory.device_swap import SwapShape
from cairn.memory.geometry import PageGeometry
from cairn.memory.hisparse import HiSparseCoordinator
from cairn.memory.host_pool import HostPool
from cairn.memory.kv_pool import KVPool
from cairn.memory.landmarks import LandmarkPool
from cairn.models.interface import LanguageModel
from cairn.models.layers import warm_up_products
from cairn.models.loader import Progress
from cairn.models.parallel import Parallel

_MOST_RECORDED_ROWS = 8192
"""Rows of the largest mixed step that is recorded. With more rows the device takes longer than the
host needs to launch the kernels, so a graph saves nothing."""


class MakeRunner(Protocol):
    """Makes the runner: `Runner`, or its counterpart on rank 0 of several ranks."""

    def __call__(
        self,
        model: LanguageModel,
        pool: KVPool,
        backend: AttentionBackend,
        geometry: PageGeometry,
        *,
        num_groups: int,
        num_slots: int,
        max_pages: int,
        device: torch.device,
        tier: HiSparseCoordinator | None = None,
        parallel: Parallel | None = None,
    ) -> Runner: ...


class BuiltRunner(NamedTuple):
    runner: Runner
    notes: tuple[str, ...]
    """Messages for the user about how it runs on a GPU."""


def build_runner(
    choices: EngineChoices,
    memory: MemoryPlan,
    model: LanguageModel,
    parallel: Parallel,
    make: MakeRunner = Runner,
    progress: Progress | None = None,
) -> BuiltRunner:
    geometry, groups, sparse = choices.geometry, choices.groups, choices.sparse
    most_running, device = memory.limits.max_running_requests, choices.device
    # A recorded mixed step has one more sequence, for padding.
    max_seqs = most_decode_rows(most_running, model.spec.sparsity is not None) + 1
    shape = replace(choices.shape, max_seqs=max_seqs)
    hot_slots = 0 if memory.tier is None else memory.tier.hot_slots
    pool = KVPool(groups, memory.num_pages, geometry.page_size, device, hot_slots=hot_slots)
    notes = [choices.dense_reason] if device.type == "cuda" else []
    # The window of the frame group only says which frames may be freed. Dense attention must not
    # apply it: dense attention reads the missing pages from the stage.
    unbounded = (g if g.copy_of is None else replace(g, window=None) for g in groups)
    dense_shape = replace(shape, groups=tuple(unbounded))
    backends = [kind(dense_shape, pool) for kind in choices.dense]
    backend: AttentionBackend = backends[0] if len(backends) == 1 else PairBackend(*backends)
    tier = None
    if sparse is not None and choices.attention.backend is not None:
        page_group = pool.group_of[sparse.layers[0]]
        if memory.tier is not None:
            page_group = memory.tier.page_group
            tier = _build_tier(choices, memory, memory.tier, pool, max_seqs)
        landmarks = None
        if choices.landmarks is not None:
            landmarks = LandmarkPool(choices.landmarks, memory.num_pages[page_group], device)
        in_stage = None
        if tier is not None and tier.stage is not None:
            in_stage = choices.dense[0](dense_shape, tier.stage)
        backend = choices.attention.backend(
            SparseParts(
                shape=shape,
                pool=pool,
                config=sparse,
                max_pages=memory.max_pages,
                dense=backend,
                landmarks=landmarks,
                tier=tier,
                in_stage=in_stage,
            )
        )
        notes.extend(backend.notes)
    runner = make(
        model,
        pool,
        backend,
        geometry,
        num_groups=len(groups),
        num_slots=most_running,
        max_pages=memory.max_pages,
        device=device,
        tier=tier,
        parallel=parallel,
    )
    if device.type == "cuda":
        unrecorded = choices.unrecorded
        if unrecorded is None and not backend.graphs:
            unrecorded = f"attention backend {backend.name} cannot be recorded"
        _warm_up(choices, memory, model, runner, progress, records=unrecorded is None)
        if unrecorded is not None:
            notes.append(f"steps are not recorded as CUDA graphs: {unrecorded}")
    return BuiltRunner(runner, tuple(notes))


def _warm_up(
    choices: EngineChoices,
    memory: MemoryPlan,
    model: LanguageModel,
    runner: Runner,
    progress: Progress | None,
    *,
    records: bool,
) -> None:
    limits, geometry, sparse = memory.limits, choices.geometry, choices.sparse
    chunk = limits.chunked_prefill_size
    if missing_module("triton", "triton") is not None:
        return  # without Triton there is nothing to compile
    if limits.max_step_seconds is not None:
        warm_up_products(model, step_sizes(chunk))
    backend = runner.backend
    max_seqs, max_pages = limits.max_running_requests, memory.max_pages
    dense_below = 0 if sparse is None else sparse.dense_below
    own = backend.rungs(max_seqs, max_pages) if isinstance(backend, SparseBackend) else None
    if own is None and not backend.graphs:
        # Attention does not use Cairn's own kernels. What other libraries launch depends only on
        # the number of rows, so a few sequences and pages are enough.
        max_seqs, max_pages, dense_below = 2, min(max_pages, geometry.pages(chunk)), 0
    rungs = rungs_of(backend, max_seqs, max_pages)
    steps = rehearsals(
        rungs,
        page_size=geometry.page_size,
        max_pages=max_pages,
        chunk=chunk,
        dense_below=dense_below,
    )
    most = min(_MOST_RECORDED_ROWS, chunk) if records else None
    runner.warm_up(
        list(steps),
        rungs,
        sparse_layers=() if sparse is None else sparse.layers,
        most_recorded_rows=most,
        progress=progress,
    )


def _build_tier(
    choices: EngineChoices, memory: MemoryPlan, sizes: TierSizes, pool: KVPool, max_seqs: int
) -> HiSparseCoordinator:
    options, sparse, device = choices.hisparse, choices.sparse, choices.device
    assert options is not None and sparse is not None
    swap = None
    if choices.kernel_refusal is None:
        threads = options.swap_in_block_size or COPY_THREADS
        stages = prompt_stages(sparse)
        swap = SwapShape(max_seqs, sparse.topk, memory.max_pages, threads, stages)
    asynchronous = options.async_backup
    if asynchronous is None:
        asynchronous = device.type == "cuda"
    host = HostPool(
        choices.groups[-1], memory.num_pages[sizes.page_group], pool.page_size, device=device
    )
    return HiSparseCoordinator(
        pool,
        host,
        num_frames=memory.num_pages[-1],
        hot_slots=sizes.hot_slots,
        asynchronous=asynchronous,
        kernels=swap,
        page_group=sizes.page_group,
        longest=memory.max_pages if sparse.dense_prompt_below else None,
    )
