"""Puts an engine together from its config: model, memory, backend, scheduler."""

from __future__ import annotations

import logging
import time
from dataclasses import replace
from typing import TYPE_CHECKING

import torch

from cairn.attention.backend import AttentionShape
from cairn.config import EngineConfig
from cairn.engine.attention_options import AttentionPlan, plan_attention
from cairn.engine.build_runner import attention_shape, build_runner, landmark_shape
from cairn.engine.engine import Engine
from cairn.engine.hisparse_options import (
    HiSparseOptions,
    apply_to_attention,
    check_together,
    hisparse_options,
)
from cairn.engine.layout import Layout
from cairn.engine.load import load_model
from cairn.engine.locate import sampling_defaults
from cairn.engine.pool_sizes import size_pools
from cairn.engine.runner import Runner
from cairn.engine.scheduler import Limits, Scheduler
from cairn.engine.tier_sizes import TierCosts, TierSizes, size_tier, split_group
from cairn.engine.tp_options import check_tp, rank_device
from cairn.errors import ConfigError
from cairn.memory.cache import PagedCache
from cairn.memory.copies import PageCopies
from cairn.memory.device_swap import SwapBytes
from cairn.memory.geometry import PageGeometry
from cairn.memory.groups import group_layers, max_tokens
from cairn.memory.kv_pool import KVPool
from cairn.models.config_reader import ConfigReader
from cairn.models.loader import Progress
from cairn.models.parallel import Alone, Parallel
from cairn.models.source import ModelSource
from cairn.models.spec import ModelSpec

if TYPE_CHECKING:
    from cairn.engine.ranks import Ranks

_RESERVED_OUTPUT = 1024
"""Tokens of output that admission counts on where pages live in host memory, which is large enough
to be generous; who generates more is retracted if it must be, and loses next to nothing."""


def build_engine(
    config: EngineConfig,
    source: ModelSource,
    progress: Progress | None = None,
    compiling: Progress | None = None,
) -> Engine:
    """`progress` is told of weights that are read, `compiling` of kernels."""
    device = resolve_device(config.device)
    dtype = resolve_dtype(config.dtype, source.config, device)
    _check_quantization(config, dtype, device)
    if config.tp == 1:
        if config.threads is not None:
            torch.set_num_threads(config.threads)
        return _build(config, source, dtype, device, progress, compiling, None)
    check_tp(config, source, device)
    # Here, because an engine on one rank needs nothing of it.
    from cairn.engine.ranks import Ranks

    ranks = Ranks(config, source, dtype, device.type)
    with ranks.ended_by_failure():
        first = rank_device(device.type, 0)
        return _build(config, source, dtype, first, progress, compiling, ranks)


def _build(
    config: EngineConfig,
    source: ModelSource,
    dtype: torch.dtype,
    device: torch.device,
    progress: Progress | None,
    compiling: Progress | None,
    ranks: Ranks | None,
) -> Engine:
    parallel: Parallel = Alone() if ranks is None else ranks.group
    sampling_defaults(source)  # refused before weights are read
    model, notes = load_model(config, source, dtype, device, progress, parallel)
    if ranks is not None:
        config = ranks.agree_on_budget(config, device)
    layout = _plan_layout(config, model.spec, dtype, device)
    attention = plan_attention(layout.config, model.spec, device.type)
    if ranks is None:
        runner, gpu_notes = build_runner(
            layout, attention, model, device, parallel, progress=compiling
        )
    else:
        runner, gpu_notes = ranks.build_runner(layout, attention, model, device, compiling)
    for warning in attention.warnings:
        logging.getLogger("cairn").warning(warning)
    cache = _build_cache(layout, runner)
    runner.mark_ready()
    return Engine(
        model.spec,
        Scheduler(cache, layout.limits, time.perf_counter),
        runner,
        context_length=layout.context,
        eos_token_ids=source.eos_token_ids(),
        seed=config.seed,
        sparse=attention.sparse,
        overlap=device.type == "cuda" and not config.disable_overlap_schedule,
        notes=(
            *notes,
            *gpu_notes,
            *(() if ranks is None else (ranks.note,)),
            *attention.notes,
            *((layout.tier.note,) if layout.tier is not None else ()),
            *attention.warnings,
        ),
    )


def _plan_layout(
    config: EngineConfig, spec: ModelSpec, dtype: torch.dtype, device: torch.device
) -> Layout:
    limits = _limits(config, device)
    options = hisparse_options(config)
    if options is not None:
        config = apply_to_attention(config, options, spec)
    attention = plan_attention(config, spec, device.type)
    geometry = PageGeometry(attention.page_size, spec.tokens_per_page(attention.page_size))
    groups = group_layers(spec.windows)
    context = _context_length(config, spec)
    sizes = None
    shape = attention_shape(spec, limits, geometry, groups, dtype, device)
    if options is not None:
        refused = None
        if attention.sparse is not None and attention.backend is not None:
            refused = attention.backend.kernel_refusal(attention.sparse, shape)
        check_together(config, options, attention, device, refused)
        assert attention.sparse is not None
        sizes = _size_tier(
            config, options, attention, spec, limits, geometry, context, shape, refused is None
        )
        groups, num_pages = sizes.groups, sizes.num_pages
        limits = replace(
            limits,
            max_running_requests=sizes.max_running_requests,
            reserved_output=_RESERVED_OUTPUT,
            # Rows of prompts find their pages in the stage, others by selection.
            cuts_at_prompt=attention.sparse.dense_prompt_below > 0,
        )
    else:
        landmarks = None
        if attention.sparse is not None:
            landmarks = landmark_shape(attention.sparse, dtype)
        num_pages = size_pools(config, spec, limits, shape, landmarks, context)
    longest = min(context, max_tokens(groups, num_pages, geometry))
    return Layout(
        config=config,
        dtype=dtype,
        limits=limits,
        context=context,
        geometry=geometry,
        groups=groups,
        num_pages=tuple(num_pages),
        max_pages=geometry.pages(longest),
        tier=sizes,
    )


def _build_cache(layout: Layout, runner: Runner) -> PagedCache:
    copies = None
    if layout.tier is not None and runner.mover is not None:
        pages, frames = layout.num_pages[layout.tier.ids], layout.num_pages[-1]
        copies = PageCopies(pages, frames, runner.mover)
    return PagedCache(
        layout.geometry,
        layout.groups,
        layout.num_pages,
        eviction="lfu" if layout.config.eviction == "lfu" else "lru",
        prefix_caching=not layout.config.disable_radix_cache,
        copies=copies,
    )


def _size_tier(
    config: EngineConfig,
    options: HiSparseOptions,
    attention: AttentionPlan,
    spec: ModelSpec,
    limits: Limits,
    geometry: PageGeometry,
    context: int,
    shape: AttentionShape,
    by_kernels: bool,
) -> TierSizes:
    assert attention.sparse is not None
    landmarks = landmark_shape(attention.sparse, shape.dtype)
    assert landmarks is not None
    groups = split_group(shape.groups, attention.sparse)
    page_bytes = [
        KVPool.page_bytes(group, geometry.page_size, spec.num_kv_heads, spec.head_dim, shape.dtype)
        for group in groups
    ]
    swap = SwapBytes.of(len(groups[-1].layers), spec.num_kv_heads) if by_kernels else None
    return size_tier(
        config,
        options,
        attention.sparse,
        groups,
        TierCosts(page_bytes, landmarks.page_bytes, swap),
        geometry,
        max_running=limits.max_running_requests,
        chunk=limits.chunked_prefill_size,
        context=context,
        device=shape.device,
    )


def _limits(config: EngineConfig, device: torch.device) -> Limits:
    cuda = device.type == "cuda"
    return Limits(
        chunked_prefill_size=config.chunked_prefill_size or (8192 if cuda else 2048),
        max_running_requests=config.max_running_requests or (256 if cuda else 64),
        max_queued_requests=config.max_queued_requests,
        max_step_seconds=None if config.max_step_ms is None else config.max_step_ms / 1e3,
    )


def _check_quantization(config: EngineConfig, dtype: torch.dtype, device: torch.device) -> None:
    if config.quantization == "none":
        return
    if device.type != "cpu" or dtype != torch.float32 or config.model_impl == "transformers":
        raise ConfigError(
            "quantization=int8 is for Cairn's own models on a CPU in float32; the device is "
            f"{device.type}, dtype {dtype}, model_impl {config.model_impl}"
        )


def _context_length(config: EngineConfig, spec: ModelSpec) -> int:
    if config.context_length is None:
        return spec.context_length
    if config.context_length > spec.context_length:
        raise ConfigError(
            f"context_length is {config.context_length}, the model's own limit is "
            f"{spec.context_length}; lower it, or scale rope in the model's config"
        )
    return config.context_length


def resolve_device(name: str) -> torch.device:
    if name == "auto":
        if torch.cuda.is_available():
            return torch.device("cuda")
        return torch.device("mps" if torch.backends.mps.is_available() else "cpu")
    if name == "cuda" and not torch.cuda.is_available():
        raise ConfigError("device is 'cuda', but torch finds no CUDA device; see `cairn doctor`")
    if name == "mps" and not torch.backends.mps.is_available():
        raise ConfigError("device is 'mps', but torch finds no Apple GPU; see `cairn doctor`")
    return torch.device(name)


def resolve_dtype(name: str, config: ConfigReader, device: torch.device) -> torch.dtype:
    if name == "auto":
        # CPUs without bfloat16 units are far slower in it; float32 is exact and fast everywhere.
        if device.type == "cpu":
            return torch.float32
        name = config.peek("dtype") or config.peek("torch_dtype") or "bfloat16"
    names = ("float32", "float16", "bfloat16", "float64")
    if name not in names:
        raise ConfigError(f"dtype is {name!r}; choose one of {', '.join(names)}")
    if name == "float64" and device.type == "mps":
        raise ConfigError("dtype is 'float64', which Apple GPUs do not have; use float32")
    dtype: torch.dtype = getattr(torch, name)
    return dtype
