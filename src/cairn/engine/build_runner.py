"""What a rank makes of the layout: pools, host tier, attention and the runner on top of them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import NamedTuple, Protocol

import torch

from cairn.attention.backend import (
    AttentionBackend,
    AttentionShape,
    DenseBackend,
    SparseBackend,
    SparseParts,
    missing_module,
    resolve_backends,
)
from cairn.attention.pair_backend import PairBackend
from cairn.config import EngineConfig
from cairn.engine.attention_options import AttentionPlan
from cairn.engine.graphs import most_decode_rows
from cairn.engine.hisparse_options import hisparse_options
from cairn.engine.layout import Layout
from cairn.engine.runner import Runner
from cairn.engine.scheduler import Limits
from cairn.engine.step_time import step_sizes
from cairn.engine.tier_sizes import TierSizes, prompt_stages
from cairn.engine.warm_up import rehearsals, rungs_of
from cairn.errors import ConfigError
from cairn.kernels.interface import COPY_THREADS
from cairn.memory.device_swap import SwapShape
from cairn.memory.geometry import PageGeometry
from cairn.memory.groups import LayerGroup
from cairn.memory.hisparse import HiSparseCoordinator
from cairn.memory.host_pool import HostPool
from cairn.memory.kv_pool import KVPool
from cairn.memory.landmarks import LandmarkPool, LandmarkShape
from cairn.models.interface import LanguageModel
from cairn.models.layers import warm_up_products
from cairn.models.loader import Progress
from cairn.models.parallel import Parallel
from cairn.models.spec import ModelSpec
from cairn.sparsity.config import SparseConfig

_MOST_RECORDED_ROWS = 8192
"""Rows of the largest mixed step that is recorded: with more, the device takes longer than the
host takes to launch its kernels."""


class MakeRunner(Protocol):
    """Runner itself, or what stands for it on rank 0 of several."""

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
    """What a user should know of how it runs on a GPU."""


def build_runner(
    layout: Layout,
    attention: AttentionPlan,
    model: LanguageModel,
    device: torch.device,
    parallel: Parallel,
    make: MakeRunner = Runner,
    progress: Progress | None = None,
) -> BuiltRunner:
    config, sizes, spec = layout.config, layout.tier, model.spec
    geometry, groups, num_pages = layout.geometry, layout.groups, layout.num_pages
    shape = attention_shape(spec, layout.limits, geometry, groups, layout.dtype, device)
    dense, choice = resolve_backends(attention.dense, shape)
    pool = KVPool(
        groups,
        num_pages,
        geometry.page_size,
        spec.num_kv_heads,
        spec.head_dim,
        layout.dtype,
        device,
        hot_slots=0 if sizes is None else sizes.hot_slots,
    )
    sparse, sparse_backend = attention.sparse, attention.backend
    tier = None
    if sparse is not None and sparse_backend is not None:
        if (reason := sparse_backend.unavailable_reason(device)) is not None:
            raise ConfigError(
                f"attention_backend {sparse_backend.name!r} cannot run here: {reason}; use another"
            )
        _check_plans(dense, sparse, sparse_backend, groups)
        if sizes is not None:
            by_kernels = sparse_backend.kernel_refusal(sparse, shape) is None
            tier = _build_tier(layout, sizes, sparse, pool, shape, by_kernels=by_kernels)
    notes = [choice] if device.type == "cuda" else []
    # Frames behind the window are freed. Dense attention must not apply that window: it reads the
    # missing pages from the stage.
    unbounded = (g if g.copy_of is None else replace(g, window=None) for g in groups)
    dense_shape = replace(shape, groups=tuple(unbounded))
    backends = [kind(dense_shape, pool) for kind in dense]
    backend: AttentionBackend = backends[0] if len(backends) == 1 else PairBackend(*backends)
    if sparse is not None and sparse_backend is not None:
        landmarks = landmark_shape(sparse, layout.dtype)
        landmark_pool = None
        if landmarks is not None:
            ids = pool.group_of[sparse.layers[0]] if sizes is None else sizes.ids
            landmark_pool = LandmarkPool(landmarks, num_pages[ids], device)
        in_stage = None
        if tier is not None and tier.stage is not None:
            in_stage = dense[0](dense_shape, tier.stage)
        backend = sparse_backend(
            SparseParts(
                shape=shape,
                pool=pool,
                config=sparse,
                max_pages=layout.max_pages,
                dense=backend,
                landmarks=landmark_pool,
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
        num_slots=layout.limits.max_running_requests,
        max_pages=layout.max_pages,
        device=device,
        tier=tier,
        parallel=parallel,
    )
    unrecorded = _not_recorded(config, device, backend)
    if device.type == "cuda":
        _warm_up(layout, attention, model, runner, progress, records=unrecorded is None)
        if unrecorded is not None:
            notes.append(f"steps are not recorded as CUDA graphs: {unrecorded}")
    return BuiltRunner(runner, tuple(notes))


def _check_plans(
    dense: Sequence[type[DenseBackend]],
    sparse: SparseConfig,
    backend: type[SparseBackend],
    groups: Sequence[LayerGroup],
) -> None:
    """Rows of sparse layers that are dense have other lengths than those of dense layers."""
    own = set(sparse.layers)
    mixed = any(own & set(group.layers) and set(group.layers) - own for group in groups)
    names = [kind.name for kind in dense if kind.keeps_one_plan]
    if mixed and names:
        raise ConfigError(
            f"attention_backend is {names[0]},{backend.name} and hsa_layers names {len(own)} "
            f"layers; {names[0]} plans a step once for all full-attention layers: leave hsa_layers "
            "out, or use another backend"
        )


def _warm_up(
    layout: Layout,
    attention: AttentionPlan,
    model: LanguageModel,
    runner: Runner,
    progress: Progress | None,
    *,
    records: bool,
) -> None:
    limits, geometry = layout.limits, layout.geometry
    chunk = limits.chunked_prefill_size
    if missing_module("triton", "triton") is not None:
        return  # there is nothing to compile
    if limits.max_step_seconds is not None:
        warm_up_products(model, step_sizes(chunk))
    backend = runner.backend
    max_seqs, max_pages = limits.max_running_requests, layout.max_pages
    dense_below = 0 if attention.sparse is None else attention.sparse.dense_below
    own = backend.rungs(max_seqs, max_pages) if isinstance(backend, SparseBackend) else None
    if own is None and not backend.graphs:
        # Attention is not Cairn's own kernels: what others launch depends on rows alone.
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
        sparse_layers=() if attention.sparse is None else attention.sparse.layers,
        most_recorded_rows=most,
        progress=progress,
    )


def attention_shape(
    spec: ModelSpec,
    limits: Limits,
    geometry: PageGeometry,
    groups: tuple[LayerGroup, ...],
    dtype: torch.dtype,
    device: torch.device,
) -> AttentionShape:
    return AttentionShape(
        num_heads=spec.num_heads,
        num_kv_heads=spec.num_kv_heads,
        head_dim=spec.head_dim,
        scale=spec.scale,
        page_size=geometry.page_size,
        dtype=dtype,
        device=device,
        groups=groups,
        # A mixed step that is recorded has one more, for padding.
        max_seqs=most_decode_rows(limits.max_running_requests, spec.sparsity is not None) + 1,
        hides_landmark_rows=spec.sparsity is not None and spec.sparsity.hides_landmark_rows,
    )


def landmark_shape(sparse: SparseConfig, dtype: torch.dtype) -> LandmarkShape | None:
    policy = sparse.policy
    if policy is None:
        return None
    return LandmarkShape(
        sparse.layers, policy.landmark_heads, policy.landmark_width, policy.has_bias, dtype
    )


def _build_tier(
    layout: Layout,
    sizes: TierSizes,
    sparse: SparseConfig,
    pool: KVPool,
    shape: AttentionShape,
    *,
    by_kernels: bool,
) -> HiSparseCoordinator:
    options = hisparse_options(layout.config)
    assert options is not None
    swap = None
    if by_kernels:
        threads = options.swap_in_block_size or COPY_THREADS
        stages = prompt_stages(sparse)
        swap = SwapShape(shape.max_seqs, sparse.topk, layout.max_pages, threads, stages)
    asynchronous = options.async_backup
    if asynchronous is None:
        asynchronous = shape.device.type == "cuda"
    host = HostPool(
        sparse.layers,
        layout.num_pages[sizes.ids],
        pool.page_size,
        pool.kv_heads,
        shape.head_dim,
        layout.dtype,
        device=shape.device,
    )
    return HiSparseCoordinator(
        pool,
        host,
        num_frames=layout.num_pages[-1],
        hot_slots=sizes.hot_slots,
        asynchronous=asynchronous,
        kernels=swap,
        ids=sizes.ids,
        longest=layout.max_pages if sparse.dense_prompt_below else None,
    )


def _not_recorded(
    config: EngineConfig, device: torch.device, backend: AttentionBackend
) -> str | None:
    """Why decode steps are launched kernel by kernel; None if they are recorded."""
    if device.type != "cuda":
        for name in ("disable_cuda_graph", "disable_overlap_schedule"):
            if getattr(config, name):
                raise ConfigError(f"{name} is for CUDA and the device is {device.type}")
        return f"the device is {device.type}"
    if (missing := missing_module("triton", "triton")) is not None:
        return missing
    if config.disable_cuda_graph:
        return "disable_cuda_graph is set"
    if config.tp > 1:
        return "what ranks say to each other (tp) is not recorded"
    if not backend.graphs:
        return f"attention backend {backend.name} cannot be recorded"
    return None
