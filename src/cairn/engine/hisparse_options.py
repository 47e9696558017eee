"""The options of `--enable-hisparse` and `--hisparse-config`, and checks against other options."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch

from cairn.attention.backend import AUTO_SPARSE, sparse_class
from cairn.config import EngineConfig, check_options, from_names, option
from cairn.engine.attention_options import AttentionPlan
from cairn.engine.training_free import default_page_size
from cairn.errors import ConfigError
from cairn.memory.groups import LayerGroup
from cairn.memory.layout import INDEX, CacheLayout
from cairn.models.spec import ModelSpec
from cairn.sparsity.config import SparseConfig

_THREADS = tuple(32 << i for i in range(6))  # per block: a power of two of whole warps


@dataclass(frozen=True, slots=True, kw_only=True)
class HiSparseOptions:
    top_k: int | None = option(None, low=1)
    """Tokens that a query reads outside its window: hsa_topk * page_size. Models with an index have
    their own number."""
    device_buffer_size: int | None = option(None, low=1)
    """Tokens of the hot cache for each running request; twice the selection by default."""
    host_to_device_ratio: float | None = option(None, low=0, high=1e6)
    """Host memory for pages, as a multiple of the device's KV cache; 2 by default."""
    swap_in_block_size: int | None = option(None, "", *_THREADS)
    """Threads per block of the CUDA kernel that copies missing pages; 128 by default."""
    host_gib: float | None = option(None, low=0, high=2**31 - 1)
    """Host memory for pages in GiB, instead of the ratio."""
    async_backup: bool | None = option(None)
    """Copy pages to the host in the background instead of between steps; the default on CUDA."""

    def __post_init__(self) -> None:
        check_options(self, ConfigError, "hisparse_config: ")
        if self.host_to_device_ratio is not None and self.host_gib is not None:
            raise ConfigError(
                "hisparse_config: host_gib and host_to_device_ratio size the same memory; give one"
            )


def hisparse_options(config: EngineConfig) -> HiSparseOptions | None:
    """The parsed options of the host tier; None if the tier is off."""
    if not config.enable_hisparse:
        if config.hisparse_config is not None:
            raise ConfigError(
                "hisparse_config is given but enable_hisparse is not; set it, or leave both out"
            )
        return None
    if config.hisparse_config is None:
        return HiSparseOptions()
    try:
        values = json.loads(config.hisparse_config)
    except json.JSONDecodeError as error:
        raise ConfigError(
            f"hisparse_config is not JSON: {error}; write an object such as '{{\"host_gib\": 64}}'"
        ) from error
    if not isinstance(values, dict):
        raise ConfigError(f"hisparse_config is {values!r}; it must be an object with fields")
    return from_names(HiSparseOptions, values, ConfigError, "hisparse_config has unknown keys")


def imply(config: EngineConfig, options: HiSparseOptions, spec: ModelSpec) -> EngineConfig:
    """The config with the attention options that the tier implies: `top_k` sets hsa_topk."""
    names = (config.attention_backend or "").split(",")
    if spec.index_topk is not None:
        if config.disable_dsa:
            raise ConfigError(
                "enable_hisparse needs sparse attention, and disable_dsa makes every layer read "
                "all rows; leave one of them out"
            )
        if options.top_k not in (None, spec.index_topk):
            raise ConfigError(
                f"hisparse_config: top_k is {options.top_k}, and the index of {spec.architecture} "
                f"selects {spec.index_topk} rows; leave top_k out"
            )
        return config
    if options.top_k is None or sparse_class(name.strip() for name in names) is None:
        return config
    native = None if spec.sparsity is None else spec.sparsity.chunk_size
    page_size = config.page_size or native or default_page_size(config)
    pages, rest = divmod(options.top_k, page_size)
    if rest:
        possible = [count * page_size for count in (pages, pages + 1) if count]
        raise ConfigError(
            f"hisparse_config: top_k is {options.top_k} tokens and page_size {page_size}; whole "
            f"pages are selected: use {' or '.join(map(str, possible))}"
        )
    if config.hsa_topk not in (None, pages):
        raise ConfigError(
            f"hisparse_config: top_k is {options.top_k} tokens, {pages} pages, but hsa_topk is "
            f"{config.hsa_topk}; they are the same thing, give one"
        )
    return replace(config, hsa_topk=pages)


def check_together(
    config: EngineConfig,
    options: HiSparseOptions,
    attention: AttentionPlan,
    device: torch.device,
    refused: str | None,
) -> SparseConfig:
    """Raise ConfigError for combinations that the tier cannot serve; return the sparse config.

    `refused` says why the sparse kernels cannot run; None if they can.
    """
    if attention.sparse is None:
        raise ConfigError(
            "enable_hisparse needs sparse attention and attention_backend is "
            f"{config.attention_backend!r}; use attention_backend=hsa, or leave enable_hisparse out"
        )
    assert attention.backend is not None
    if not attention.backend.serves_tier:
        raise ConfigError(
            f"enable_hisparse keeps pages in host memory, which {attention.backend.name} cannot "
            f"read; use attention_backend={AUTO_SPARSE}, or leave enable_hisparse out"
        )
    if device.type not in ("cpu", "cuda"):
        raise ConfigError(
            f"enable_hisparse runs on CUDA and on a CPU and the device is {device.type}; use one "
            "of these, or leave enable_hisparse out"
        )
    if device.type == "cuda" and refused is not None:
        raise ConfigError(
            f"enable_hisparse on CUDA is for the kernels of {attention.backend.name}, and they "
            f"cannot serve this model: {refused}; change that, or leave enable_hisparse out"
        )
    if device.type == "cpu" and options.swap_in_block_size is not None:
        raise ConfigError(
            "hisparse_config: swap_in_block_size is for CUDA and the device is cpu; leave it out"
        )
    return attention.sparse


def split_group(groups: Sequence[LayerGroup], sparse: SparseConfig) -> tuple[LayerGroup, ...]:
    """Move the sparse layers from their groups into a new last group, whose pages are frames.

    The first of their groups keeps the page ids. Layers may differ in parts that never leave the
    device: some layers have an index, and others read what it selected.
    """
    old = [group for group in groups if set(group.layers) & set(sparse.layers)]
    kept = []
    for group in groups:
        dense = tuple(layer for layer in group.layers if layer not in sparse.layers)
        if dense or group not in old[1:]:
            kept.append(replace(group, layers=dense))
    parts = tuple(dict.fromkeys(part for group in old for part in group.layout.parts))
    lacking = frozenset(
        (layer, part.name)
        for group in old
        for layer in set(group.layers) & set(sparse.layers)
        for part in parts
        if part not in group.layout.parts
    )
    # Rows below `dense_below` read everything before them, so that must be on the device. Rows that
    # are selected one by one are found wherever they are.
    window = sparse.window if sparse.by_row else max(sparse.window, sparse.dense_below)
    ids = [group.name for group in kept].index(old[0].name)
    frames = LayerGroup("resident", sparse.layers, window, ids, CacheLayout(parts), lacking)
    return (*kept, frames)


def selectors(frames: LayerGroup) -> dict[int, int]:
    """The layer whose selection each layer reads: its own, or that of the last layer with an index
    before it."""
    (index,) = (part for part in frames.layout.parts if part.name == INDEX)
    found: dict[int, int] = {}
    for layer in frames.layers:
        own = layer in frames.layers_with(index)
        found[layer] = layer if own else found[layer - 1]
    return found


def prompt_stages(sparse: SparseConfig) -> int:
    """Number of stage buffers for prompt pages: two if prompts are read densely, else one."""
    return 2 if sparse.dense_prompt_below else 1
