"""How many pages each layer group gets, and the memory they are paid from."""

from __future__ import annotations

from pathlib import Path

import torch

from cairn.attention.backend import AttentionShape
from cairn.config import EngineConfig
from cairn.engine.container_limit import memory_left
from cairn.engine.scheduler import Limits
from cairn.errors import ConfigError
from cairn.memory.geometry import PageGeometry
from cairn.memory.groups import LayerGroup, split_budget
from cairn.memory.kv_pool import KVPool
from cairn.memory.landmarks import LandmarkShape
from cairn.models.spec import ModelSpec

_DEFAULT_MEM_FRACTION = 0.85
_DEFAULT_FREE_SHARE = 0.25
_FALLBACK_MEMORY = 8 * 2**30  # where the system does not tell what is free
_CACHE_HEADROOM = 2
"""Without an explicit budget, room for this many times what running requests can need."""


def size_pools(
    config: EngineConfig,
    spec: ModelSpec,
    limits: Limits,
    shape: AttentionShape,
    landmarks: LandmarkShape | None,
    context: int,
) -> list[int]:
    """Pages per layer group."""
    groups, device, size = shape.groups, shape.device, shape.page_size
    geometry = PageGeometry(size, spec.tokens_per_page(size))
    page_bytes = [
        KVPool.page_bytes(group, size, spec.num_kv_heads, spec.head_dim, shape.dtype)
        + (landmarks.page_bytes if landmarks and landmarks.layers[0] in group.layers else 0)
        for group in groups
    ]
    chunk = min(limits.chunked_prefill_size, context)
    wanted = [  # twice over for reuse
        _CACHE_HEADROOM * needed_pages(group, limits.max_running_requests, context, chunk, geometry)
        for group in groups
    ]
    budget = kv_budget(config, device)
    if budget is None:
        needed = sum(pages * size for pages, size in zip(wanted, page_bytes, strict=True))
        budget = min(default_budget(config, device), needed)
    pages = split_budget(budget, groups, page_bytes, wanted)
    for group, count in zip(groups, pages, strict=True):
        # One request must be able to move on by itself, a page at a time.
        least = group.peak_pages(min(context, geometry.tokens(max(pages))), 1, geometry)
        if group.window is not None and count < least:
            raise ConfigError(
                f"the KV cache gives group {group.name} {count} pages, its window needs {least}; "
                "raise kv_cache_gib or mem_fraction_static"
            )
    return pages


def needed_pages(
    group: LayerGroup, running: int, context: int, chunk: int, geometry: PageGeometry
) -> int:
    """Pages that all running requests can hold at once, prefill counted once."""
    return running * group.peak_pages(context, 1, geometry) + geometry.pages(chunk)


def default_budget(config: EngineConfig, device: torch.device) -> int:
    """What the KV cache of a rank may take unasked."""
    return int(free_memory(device) / config.tp * _DEFAULT_FREE_SHARE)


def kv_budget(config: EngineConfig, device: torch.device) -> int | None:
    """Bytes for the KV cache of a rank, or None to size it by need."""
    if config.kv_cache_gib is not None:
        return int(config.kv_cache_gib * 2**30)
    if device.type != "cuda":
        if config.mem_fraction_static is not None:
            raise ConfigError(
                f"mem_fraction_static is for CUDA and the device is {device.type}; use kv_cache_gib"
            )
        return None
    free, total = torch.cuda.mem_get_info(device)
    share = config.mem_fraction_static or _DEFAULT_MEM_FRACTION
    return max(0, int(free - total * (1 - share)))


def free_memory(device: torch.device) -> int:
    """Bytes this process may still take, a container's limit included."""
    if device.type == "mps":
        return torch.mps.recommended_max_memory() - torch.mps.current_allocated_memory()
    free = _FALLBACK_MEMORY
    meminfo = Path("/proc/meminfo")
    if meminfo.exists():
        fields = dict(line.split(":", 1) for line in meminfo.read_text().splitlines())
        free = int(fields["MemAvailable"].split()[0]) * 1024
    left = memory_left()
    return free if left is None else min(free, left)
