"""Puts an engine together from its config: model, memory, backend, scheduler."""

from __future__ import annotations

import logging
import time
from dataclasses import replace

import torch

from cairn.attention.backend import AttentionBackend, AttentionShape, resolve_backends
from cairn.attention.hsa.backend import HSABackend
from cairn.attention.hsa.kernel_sparse import KernelSparse
from cairn.attention.pair_backend import PairBackend
from cairn.config import EngineConfig
from cairn.engine.attention_options import AttentionPlan, plan_attention
from cairn.engine.engine import Engine
from cairn.engine.graphs import most_decode_rows
from cairn.engine.hisparse_options import (
    HiSparseOptions,
    apply_to_attention,
    check_together,
    hisparse_options,
)
from cairn.engine.pool_sizes import size_pools
from cairn.engine.runner import Runner
from cairn.engine.scheduler import Limits, Scheduler
from cairn.engine.step_time import step_sizes
from cairn.engine.tier_sizes import TierCosts, TierSizes, size_tier, split_group
from cairn.errors import ConfigError
from cairn.memory.cache import PagedCache
from cairn.memory.copies import PageCopies
from cairn.memory.geometry import PageGeometry
from cairn.memory.groups import group_layers
from cairn.memory.hisparse import HiSparseCoordinator
from cairn.memory.host_pool import HostPool
from cairn.memory.kv_pool import KVPool
from cairn.memory.landmarks import LandmarkPool, LandmarkShape
from cairn.models.checkpoint import Checkpoint
from cairn.models.config_reader import ConfigReader
from cairn.models.interface import LanguageModel
from cairn.models.layers import warm_up_products
from cairn.models.loader import Progress, build_model, fill, fill_dummy, quantize
from cairn.models.module import Module
from cairn.models.registry import read_spec
from cairn.models.source import Confirm, ModelSource, find_model
from cairn.models.spec import ModelSpec
from cairn.sparsity.config import SparseConfig

_RESERVED_OUTPUT = 1024
"""Tokens of output that admission counts on where pages live in host memory, which is large enough
to be generous; who generates more is retracted if it must be, and loses next to nothing."""


def locate(
    config: EngineConfig, confirm: Confirm | None = None, progress: Progress | None = None
) -> ModelSource:
    """Find the model, fetching it where that is possible."""
    ignored = (name.strip() for name in config.ignore_config_fields.split(","))
    return find_model(
        config.model,
        ignored_fields=tuple(name for name in ignored if name),
        confirm=confirm,
        progress=progress,
    )


def build_engine(
    config: EngineConfig, source: ModelSource, progress: Progress | None = None
) -> Engine:
    device = resolve_device(config.device)
    dtype = resolve_dtype(config.dtype, source.config, device)
    _check_quantization(config, dtype, device)
    model, notes = load_model(config, source, dtype, device, progress)
    spec = model.spec
    limits = _limits(config, device)
    options = hisparse_options(config)
    if options is not None:
        config = apply_to_attention(config, options, spec)
    attention = plan_attention(config, spec)
    geometry = PageGeometry(attention.page_size, spec.tokens_per_page(attention.page_size))
    groups = group_layers(spec.windows)
    context = _context_length(config, spec)
    landmark_shape = _landmark_shape(attention.sparse, dtype)
    sizes = None
    if options is not None:
        check_together(config, options, attention, device)
        sizes = _size_tier(
            config, options, attention, spec, limits, geometry, context, dtype, device
        )
        groups = sizes.groups
        limits = replace(
            limits,
            max_running_requests=sizes.max_running_requests,
            reserved_output=_RESERVED_OUTPUT,
        )
    shape = AttentionShape(
        num_heads=spec.num_heads,
        num_kv_heads=spec.num_kv_heads,
        head_dim=spec.head_dim,
        scale=spec.scale,
        page_size=geometry.page_size,
        dtype=dtype,
        device=device,
        groups=groups,
        max_seqs=most_decode_rows(limits.max_running_requests, spec.sparsity is not None),
        hides_landmark_rows=spec.sparsity is not None and spec.sparsity.hides_landmark_rows,
    )
    dense, choice = resolve_backends(attention.dense, shape)
    if sizes is None:
        num_pages = size_pools(config, spec, limits, shape, landmark_shape, context)
    else:
        num_pages = sizes.num_pages
    pool = KVPool(
        groups,
        num_pages,
        geometry.page_size,
        spec.num_kv_heads,
        spec.head_dim,
        dtype,
        device,
        hot_slots=0 if sizes is None else sizes.hot_slots,
    )
    tier = copies = None
    if options is not None and sizes is not None and attention.sparse is not None:
        tier = _build_tier(options, sizes, attention.sparse, pool, spec.head_dim, dtype)
        copies = PageCopies(num_pages[sizes.ids], num_pages[-1], tier)
    cache = PagedCache(
        geometry,
        groups,
        num_pages,
        eviction="lfu" if config.eviction == "lfu" else "lru",
        prefix_caching=not config.disable_radix_cache,
        copies=copies,
    )
    max_pages = geometry.pages(min(context, cache.max_tokens))
    gpu_notes = [choice] if device.type == "cuda" else []
    backends = [kind(shape, pool) for kind in dense]
    backend: AttentionBackend = backends[0] if len(backends) == 1 else PairBackend(*backends)
    if attention.sparse is not None and landmark_shape is not None:
        ids = pool.group_of[attention.sparse.layers[0]] if sizes is None else sizes.ids
        landmarks = LandmarkPool(landmark_shape, num_pages[ids], device)
        refused = KernelSparse.refusal(attention.sparse, shape)
        kernels = None
        if refused is None:
            kernels = KernelSparse(attention.sparse, shape, pool, landmarks, max_pages)
        backend = HSABackend(
            shape,
            pool,
            config=attention.sparse,
            landmarks=landmarks,
            dense=backend,
            kernels=kernels,
            tier=tier,
        )
        if device.type == "cuda" and refused is not None:
            gpu_notes.append(f"hsa runs in plain torch, its kernels cannot: {refused}")
    for warning in attention.warnings:
        logging.getLogger("cairn").warning(warning)
    runner = Runner(
        model,
        pool,
        backend,
        geometry,
        num_groups=len(groups),
        num_slots=limits.max_running_requests,
        max_pages=max_pages,
        device=device,
        tier=tier,
    )
    if device.type == "cuda" and limits.max_step_seconds is not None and isinstance(model, Module):
        warm_up_products(model, step_sizes(limits.chunked_prefill_size))
    unrecorded = _not_recorded(config, device, backend)
    if unrecorded is None:
        runner.record_graphs()
    if device.type == "cuda" and unrecorded is not None:
        gpu_notes.append(f"decode steps are not recorded as CUDA graphs: {unrecorded}")
    return Engine(
        spec,
        Scheduler(cache, limits, time.perf_counter),
        runner,
        context_length=context,
        eos_token_ids=source.eos_token_ids(),
        seed=config.seed,
        sparse=attention.sparse,
        overlap=device.type == "cuda" and not config.disable_overlap_schedule,
        notes=(
            *notes,
            *gpu_notes,
            *attention.notes,
            *((sizes.note,) if sizes is not None else ()),
            *attention.warnings,
        ),
    )


def _size_tier(
    config: EngineConfig,
    options: HiSparseOptions,
    attention: AttentionPlan,
    spec: ModelSpec,
    limits: Limits,
    geometry: PageGeometry,
    context: int,
    dtype: torch.dtype,
    device: torch.device,
) -> TierSizes:
    landmarks = _landmark_shape(attention.sparse, dtype)
    assert attention.sparse is not None and landmarks is not None
    groups = split_group(group_layers(spec.windows), attention.sparse)
    page_bytes = [
        KVPool.page_bytes(group, geometry.page_size, spec.num_kv_heads, spec.head_dim, dtype)
        for group in groups
    ]
    return size_tier(
        config,
        options,
        attention.sparse,
        groups,
        TierCosts(page_bytes, landmarks.page_bytes),
        geometry,
        max_running=limits.max_running_requests,
        chunk=limits.chunked_prefill_size,
        context=context,
        device=device,
    )


def _build_tier(
    options: HiSparseOptions,
    sizes: TierSizes,
    sparse: SparseConfig,
    pool: KVPool,
    head_dim: int,
    dtype: torch.dtype,
) -> HiSparseCoordinator:
    host = HostPool(
        sparse.layers,
        sizes.num_pages[sizes.ids],
        pool.page_size,
        pool.kv_heads,
        head_dim,
        dtype,
        pinned=False,
    )
    return HiSparseCoordinator(
        pool,
        host,
        num_frames=sizes.num_pages[-1],
        hot_slots=sizes.hot_slots,
        asynchronous=options.async_backup,
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
    if config.disable_cuda_graph:
        return "disable_cuda_graph is set"
    if not backend.graphs:
        return f"attention backend {backend.name} cannot be recorded"
    return None


def _limits(config: EngineConfig, device: torch.device) -> Limits:
    cuda = device.type == "cuda"
    return Limits(
        chunked_prefill_size=config.chunked_prefill_size or (8192 if cuda else 2048),
        max_running_requests=config.max_running_requests or (256 if cuda else 64),
        max_queued_requests=config.max_queued_requests,
        max_step_seconds=None if config.max_step_ms is None else config.max_step_ms / 1e3,
    )


def load_model(
    config: EngineConfig,
    source: ModelSource,
    dtype: torch.dtype,
    device: torch.device,
    progress: Progress | None,
) -> tuple[LanguageModel, tuple[str, ...]]:
    """The model, and what its user should know about how it was loaded."""
    if config.model_impl == "transformers":
        if source.folder is None or config.load_format == "dummy":
            raise ConfigError(
                "model_impl=transformers needs a model folder or a hub id, with weights"
            )
        from cairn.models.hf_model import load_transformers_model

        return load_transformers_model(source.folder, dtype, device), ()
    decoder = read_spec(source.config)
    model = build_model(decoder, dtype, device)
    if config.load_format == "dummy":
        fill_dummy(model, config.seed)
    elif source.gguf is not None:
        fill(model, source.gguf, source.gguf.path, progress)
    elif source.folder is not None:
        fill(model, Checkpoint.open(source.folder), source.folder, progress)
    else:
        raise ConfigError(
            f"model {config.model!r} is a preset, a shape without weights; use load_format=dummy"
        )
    return model, (str(quantize(model)),) if config.quantization == "int8" else ()


def _landmark_shape(sparse: SparseConfig | None, dtype: torch.dtype) -> LandmarkShape | None:
    if sparse is None:
        return None
    policy = sparse.policy
    return LandmarkShape(
        sparse.layers, policy.landmark_heads, policy.landmark_width, policy.has_bias, dtype
    )


def _check_quantization(config: EngineConfig, dtype: torch.dtype, device: torch.device) -> None:
    if config.quantization == "none":
        return
    if device.type != "cpu" or dtype != torch.float32 or config.model_impl != "cairn":
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
