"""Resolves the options and the model into `EngineChoices`: makes each choice once, with its reason.

    resolve(options, model, device) -> EngineChoices -> plan_memory -> MemoryPlan -> build

Each rank resolves for its own device; all ranks make the same choices.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch

from cairn.attention.backend import (
    AUTO_SPARSE,
    AttentionShape,
    DenseBackend,
    SparseBackend,
    missing_module,
    resolve_backends,
)
from cairn.attention.widened import widened_bytes
from cairn.config import MOST_DRAFTS, EngineConfig
from cairn.engine.attention_options import AttentionPlan, plan_attention
from cairn.engine.drafters.drafter import Drafter, drafter_class
from cairn.engine.hisparse_options import (
    HiSparseOptions,
    check_together,
    hisparse_options,
    imply,
    split_group,
)
from cairn.engine.limits import Limits
from cairn.engine.quantization import FP8_CAPABILITY
from cairn.errors import ConfigError
from cairn.kernels.fp8_rows import CACHE_TYPES
from cairn.memory.geometry import PageGeometry
from cairn.memory.groups import LayerGroup
from cairn.memory.landmarks import LandmarkShape
from cairn.memory.layout import KV, LATENT, QUERY, CacheLayout, CachePart
from cairn.models.config_reader import ConfigReader
from cairn.models.spec import ModelSpec
from cairn.sparsity.config import SparseConfig

_RESERVED_OUTPUT = 1024
"""Output tokens that admission reserves room for with a host tier. Host memory is large enough for
that. A request that generates more may be retracted, which costs it almost nothing."""


@dataclass(frozen=True, slots=True)
class EngineChoices:
    config: EngineConfig
    """The options, with those that other options imply filled in."""
    limits: Limits
    context: int
    """Most tokens of a request."""
    geometry: PageGeometry
    attention: AttentionPlan
    shape: AttentionShape
    """Shape of all layers; `max_seqs` is set once memory is planned."""
    dense: tuple[type[DenseBackend], ...]
    """One dense backend, or two: for prefill and for decode."""
    dense_reason: str
    kernel_refusal: str | None
    """Why sparse attention runs in plain torch; None if it runs by kernels or there is none."""
    landmarks: LandmarkShape | None
    hisparse: HiSparseOptions | None
    unrecorded: str | None
    """Why no step is recorded as a CUDA graph, if that is known before the backend is built."""
    drafter: type[Drafter] | None
    draft_tokens: int
    """Most tokens to draft; 0 without a drafter."""

    @property
    def sparse_drafts(self) -> bool:
        """Sparse attention only drafts, and all other rows are dense."""
        return self.drafter is not None and self.drafter.by_model

    @property
    def sparse(self) -> SparseConfig | None:
        return self.attention.sparse

    @property
    def dense_shape(self) -> AttentionShape:
        """The shape for dense backends."""
        return unbounded_frames(self.shape)

    @property
    def buffer_bytes(self) -> int:
        """Bytes that attention keeps on the device beside the KV cache."""
        backend, widened = self.attention.backend, widened_bytes(self.dense, self.dense_shape)
        if backend is None or self.kernel_refusal is not None:
            return widened
        return widened + backend.buffer_bytes(self.shape)

    @property
    def groups(self) -> tuple[LayerGroup, ...]:
        """Layer groups. With a host tier the last one holds the device copies of pages."""
        return self.shape.groups

    @property
    def page_group(self) -> int:
        """The group whose page ids name the pages of sparse layers."""
        assert self.sparse is not None
        (g,) = (g for g, group in enumerate(self.groups) if self.sparse.layers[0] in group.layers)
        copied = self.groups[g].copy_of
        return g if copied is None else copied

    @property
    def device(self) -> torch.device:
        return self.shape.device


def resolve(
    config: EngineConfig, spec: ModelSpec, dtype: torch.dtype, device: torch.device
) -> EngineChoices:
    """Make all choices for an engine; `dtype` is the type of weights and queries."""
    unrecorded = _unrecorded(config, device)
    hisparse = hisparse_options(config)
    drafter = _drafter(config)
    if config.attention_backend is None:
        # The host tier works only with sparse attention, so enabling it selects a sparse backend.
        # `auto` does so for models with an index.
        indexed = spec.index_topk is not None
        default = "auto" if hisparse is None or indexed else AUTO_SPARSE
        named = os.environ.get("ATTN_BACKEND") or default
        config = replace(config, attention_backend=named)
    if hisparse is not None:
        config = imply(config, hisparse, spec)
    by_model = drafter is not None and drafter.by_model
    attention = plan_attention(config, spec, device.type, drafts=by_model)
    sparse = attention.sparse
    geometry = PageGeometry(attention.page_size, spec.tokens_per_page(attention.page_size))
    context = _context_length(config, spec)
    cache_dtype = _cache_dtype(config, spec, attention, dtype, device)
    groups = _with_queries(spec, sparse, dtype).groups(cache_dtype)
    limits = _limits(config, device, geometry)
    shape = attention_shape(spec, sparse, geometry, groups, dtype, device)
    shape = replace(shape, longest=geometry.pages(context) * geometry.page_size)
    refused = None
    if sparse is not None and attention.backend is not None:
        refused = attention.backend.kernel_refusal(sparse, shape)
    if hisparse is not None:
        sparse = check_together(config, hisparse, attention, device, refused)
        shape = replace(shape, groups=split_group(groups, sparse))
        moved = [part.name for part in shape.groups[-1].layout.leaving.parts]
        if moved != [LATENT if sparse.by_row else KV]:
            raise ConfigError(
                "enable_hisparse moves keys and values of heads, or the latent rows that an index "
                f"selects; layers of {spec.architecture} keep {', '.join(moved)}, which may leave "
                "the device: leave enable_hisparse out"
            )
        limits = replace(
            limits,
            reserved_output=_RESERVED_OUTPUT,
            # Prompt rows read their pages from the stage, other rows find theirs by selection.
            cuts_at_prompt=sparse.dense_prompt_below > 0,
        )
    dense, reason = resolve_backends(attention.dense, unbounded_frames(shape))
    if device.type == "cuda" and any(kind.name == "torch" for kind in dense):
        attention = replace(attention, warnings=(*attention.warnings, _slow_note(reason)))
    if sparse is not None and attention.backend is not None:
        if (why := attention.backend.unavailable_reason(device)) is not None:
            raise ConfigError(
                f"attention_backend {attention.backend.name!r} cannot run here: {why}; use another"
            )
        _check_plans(dense, sparse, attention.backend, shape.groups)
    return EngineChoices(
        config=config,
        limits=limits,
        context=context,
        geometry=geometry,
        attention=attention,
        shape=shape,
        dense=tuple(dense),
        dense_reason=reason,
        kernel_refusal=refused,
        landmarks=None if sparse is None else landmark_shape(sparse, dtype),
        hisparse=hisparse,
        unrecorded=unrecorded,
        drafter=drafter,
        draft_tokens=0 if drafter is None else config.speculative_tokens or drafter.tokens,
    )


def unbounded_frames(shape: AttentionShape) -> AttentionShape:
    """The same shape without the window of a host tier's frames. That window only says which frames
    may be freed; dense attention reads the missing pages from the stage."""
    groups = (g if g.copy_of is None else replace(g, window=None) for g in shape.groups)
    return replace(shape, groups=tuple(groups))


def _slow_note(reason: str) -> str:
    return f"dense attention runs in plain torch on CUDA, many times slower than kernels; {reason}"


def _drafter(config: EngineConfig) -> type[Drafter] | None:
    """The drafter that `speculative` names. Raises ConfigError for what does not go with it."""
    if config.speculative is None:
        if config.speculative_tokens is not None:
            raise ConfigError("speculative_tokens is given but speculative is not; give both")
        return None
    if config.enable_hisparse:
        raise ConfigError(
            f"speculative is {config.speculative!r} and enable_hisparse is set; the host tier "
            "copies a page as soon as it is complete, and drafts that fail take pages back: use "
            "one of them"
        )
    found = drafter_class(config.speculative)
    if config.speculative_tokens is None and found.tokens not in range(1, MOST_DRAFTS + 1):
        raise ConfigError(
            f"speculative {config.speculative!r} drafts {found.tokens!r} tokens at most, as its "
            f"class says; it must be a whole number from 1 to {MOST_DRAFTS}: change the class, or "
            "give speculative_tokens"
        )
    return found


def _check_plans(
    dense: Sequence[type[DenseBackend]],
    sparse: SparseConfig,
    backend: type[SparseBackend],
    groups: Sequence[LayerGroup],
) -> None:
    """Refuse a dense backend that keeps one plan if a group has both dense and sparse layers.

    The dense rows of sparse layers need a plan with other lengths than dense layers do.
    """
    own = set(sparse.layers)
    mixed = any(own & set(group.layers) and set(group.layers) - own for group in groups)
    names = [kind.name for kind in dense if kind.keeps_one_plan]
    if mixed and names:
        raise ConfigError(
            f"attention_backend is {names[0]},{backend.name} and hsa_layers names {len(own)} "
            f"layers; {names[0]} plans a step once for all full-attention layers: leave hsa_layers "
            "out, or use another backend"
        )


def _with_queries(spec: ModelSpec, sparse: SparseConfig | None, dtype: torch.dtype) -> ModelSpec:
    """The same model, whose sparse layers also keep queries if the policy looks back at them."""
    if sparse is None or sparse.policy is None or not sparse.policy.observed:
        return spec
    layers = list(spec.layers)
    for layer in sparse.layers:
        own = layers[layer]
        part = CachePart(QUERY, (own.num_heads, own.head_dim), dtype)
        layers[layer] = replace(own, cache=CacheLayout((*own.layout.parts, part)))
    return replace(spec, layers=tuple(layers))


def landmark_shape(sparse: SparseConfig, dtype: torch.dtype) -> LandmarkShape | None:
    policy = sparse.policy
    if policy is None:
        return None
    own = policy.landmark_heads, policy.landmark_width, policy.has_bias
    return LandmarkShape(sparse.layers, *own, dtype, sparse.units)


def _cache_dtype(
    config: EngineConfig,
    spec: ModelSpec,
    attention: AttentionPlan,
    dtype: torch.dtype,
    device: torch.device,
) -> torch.dtype:
    """The type of the cached data; `dtype` is the type of the weights."""
    name = config.kv_cache_dtype
    if name == "auto":
        return dtype
    for part in {part for layer in spec.layers for part in layer.layout.parts}:
        if part.dtype is None and part.shape[-1] % 8 and not part.own_scales:
            what = f"{part.name} of {part.shape[-1]} columns"
            raise ConfigError(
                f"kv_cache_dtype is {name!r}, and layers of {spec.architecture} keep {what}; "
                "scales are stored behind rows whose size is a multiple of 8: use auto"
            )
    if name == "fp8" and device.type == "cuda":
        major, minor = torch.cuda.get_device_capability(device)
        if (major, minor) < FP8_CAPABILITY:
            raise ConfigError(
                "kv_cache_dtype is 'fp8', which needs compute capability 8.9; this GPU has "
                f"{major}.{minor}: use int8 or auto"
            )
    if attention.backend is not None and not attention.backend.reads_8_bits:
        raise ConfigError(
            f"kv_cache_dtype is {name!r} and attention_backend is {attention.backend.name!r}, "
            "which does not read a cache of 8 bits (its class does not set reads_8_bits); use "
            "kv_cache_dtype=auto, or another backend"
        )
    return CACHE_TYPES[name]


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
        # CPUs without bfloat16 units are far slower with it; float32 is exact and fast everywhere.
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


def _unrecorded(config: EngineConfig, device: torch.device) -> str | None:
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
    return None


def _limits(config: EngineConfig, device: torch.device, geometry: PageGeometry) -> Limits:
    cuda = device.type == "cuda"
    return Limits(
        chunked_prefill_size=config.chunked_prefill_size or geometry.rows(8192 if cuda else 2048),
        max_running_requests=config.max_running_requests or (256 if cuda else 64),
        max_queued_requests=config.max_queued_requests,
        max_step_seconds=None if config.max_step_ms is None else config.max_step_ms / 1e3,
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


def attention_shape(
    spec: ModelSpec,
    sparse: SparseConfig | None,
    geometry: PageGeometry,
    groups: tuple[LayerGroup, ...],
    dtype: torch.dtype,
    device: torch.device,
) -> AttentionShape:
    """The shape for all backends. Heads, head size and scale are those of the sparse layers if
    there are any, else of the first layer."""
    kinds = {replace(layer, window=None, cache=None) for layer in spec.layers}
    layer = spec.layers[0 if sparse is None else sparse.layers[0]]
    return AttentionShape(
        num_heads=layer.num_heads,
        num_kv_heads=layer.num_kv_heads,
        head_dim=layer.head_dim,
        value_dim=layer.value_dim,
        scale=layer.scale,
        scales=tuple(layer.scale for layer in spec.layers) if len(kinds) > 1 else (),
        page_size=geometry.page_size,
        dtype=dtype,
        device=device,
        groups=groups,
        hides_landmark_rows=spec.sparsity is not None and spec.sparsity.hides_landmark_rows,
    )
