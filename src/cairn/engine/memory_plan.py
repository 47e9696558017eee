"""Decides how many pages each layer group gets, from the memory of each rank.

Rank 0 decides for all ranks, so that they agree.

With a host tier, the device budget is spent in this order:

1. for every host page: landmarks or index keys, dense layers and tables;
2. the stage for prompts (two stages if prompts are read densely);
3. window layers;
4. what running requests need: frames for their windows and tails, a share of the hot cache, and
   one prefill chunk;
5. the rest becomes frames, in which pages stay resident.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import NamedTuple

import torch

from cairn.config import EngineConfig
from cairn.engine.container_limit import memory_left
from cairn.engine.hisparse_options import HiSparseOptions, prompt_stages
from cairn.engine.limits import Limits
from cairn.engine.resolve import EngineChoices
from cairn.errors import ConfigError
from cairn.kernels.interface import MOST_HOT_SLOTS
from cairn.memory.device_swap import SwapBytes
from cairn.memory.geometry import PageGeometry
from cairn.memory.groups import LayerGroup, max_tokens, split_budget
from cairn.memory.hot_cache import MOST_SLICES
from cairn.memory.layout import INDEX
from cairn.sparsity.config import SparseConfig

_DEFAULT_MEM_FRACTION = 0.85
_DEFAULT_FREE_SHARE = 0.25
_FALLBACK_MEMORY = 8 * 2**30  # if the system does not report free memory
_CACHE_HEADROOM = 2
"""Without an explicit budget, the cache holds this many times what running requests can need."""
_GIB = 2**30
_RATIO = 2.0  # default ratio of host to device memory
_MOST_OF_FREE = 0.8
"""Largest share of free memory that host pages take by default."""


@dataclass(frozen=True, slots=True)
class MemoryPlan:
    limits: Limits
    """The limits, with max_running_requests lowered to what memory has room for."""
    num_pages: tuple[int, ...]  # by group
    max_pages: int
    """Length of a request's page table."""
    hot_slots: int = 0
    """With a host tier: slots of the hot cache, per layer and kv head. A slot holds a page, or a
    row if queries select rows."""
    hot_pages: int = 0
    """Pages of the pool that hold these slots."""
    notes: tuple[str, ...] = ()


class TierSizes(NamedTuple):
    num_pages: list[int]  # by group; the last group has the frames
    hot_slots: int
    max_running_requests: int
    note: str


def plan_memory(choices: EngineChoices) -> MemoryPlan:
    limits, hot_slots, hot_pages, notes = choices.limits, 0, 0, []
    if choices.hisparse is None:
        num_pages = size_pools(choices)
    else:
        num_pages, hot_slots, running, note = size_tier(choices)
        limits = replace(limits, max_running_requests=running)
        hot_pages = -(-hot_slots // slots_per_page(choices))
        notes.append(note)
    longest = min(choices.context, max_tokens(choices.groups, num_pages, choices.geometry))
    max_pages = choices.geometry.pages(longest)
    return MemoryPlan(limits, tuple(num_pages), max_pages, hot_slots, hot_pages, tuple(notes))


def slots_per_page(choices: EngineChoices) -> int:
    """Hot slots that a page of the pool has room for."""
    by_row = choices.sparse is not None and choices.sparse.by_row
    return choices.geometry.page_size if by_row else 1


def size_pools(choices: EngineChoices) -> list[int]:
    """Pages per layer group, for an engine without a host tier."""
    config, device, context = choices.config, choices.device, choices.context
    groups, geometry, limits = choices.groups, choices.geometry, choices.limits
    landmarks = choices.landmarks
    page_bytes = [
        group.page_bytes(geometry.page_size)
        + (landmarks.page_bytes if landmarks and landmarks.layers[0] in group.layers else 0)
        for group in groups
    ]
    chunk = min(limits.chunked_prefill_size, context)
    wanted = [  # with headroom for cached prefixes
        _CACHE_HEADROOM * needed_pages(group, limits.max_running_requests, context, chunk, geometry)
        for group in groups
    ]
    budget = kv_budget(choices)
    if budget is None:
        needed = sum(pages * size for pages, size in zip(wanted, page_bytes, strict=True))
        budget = min(default_budget(config, device), needed)
    pages = split_budget(budget, groups, page_bytes, wanted, _beside(choices))
    longest = min(context, max_tokens(groups, pages, geometry))
    for group, count in zip(groups, pages, strict=True):
        # A single request must be able to advance one page at a time.
        least = group.peak_pages(longest, 1, geometry)
        if group.window is not None and count < least:
            raise ConfigError(
                f"the KV cache gives group {group.name} {count} pages, its window needs {least}; "
                "raise kv_cache_gib or mem_fraction_static"
            )
    return pages


def needed_pages(
    group: LayerGroup, running: int, context: int, chunk: int, geometry: PageGeometry
) -> int:
    """Most pages that all running requests hold at once, if one of them prefills a chunk."""
    return running * group.peak_pages(context, 1, geometry) + geometry.pages(chunk)


def default_budget(config: EngineConfig, device: torch.device) -> int:
    """Bytes that the KV cache of a rank may take by default."""
    return int(free_memory(device) / config.tp * _DEFAULT_FREE_SHARE)


def kv_budget(choices: EngineChoices) -> int | None:
    """Bytes for the KV cache of a rank; None to size it by what requests need. Buffers of kernels
    are beside it."""
    config, device, buffers = choices.config, choices.device, choices.buffer_bytes
    if config.kv_cache_gib is not None:
        wanted = int(config.kv_cache_gib * _GIB)
        on_gpu = device.type == "cuda"
        free = torch.cuda.mem_get_info(device)[0] if on_gpu else free_memory(device) // config.tp
        if wanted + buffers > free:
            where = "on the device" if on_gpu else "for it, a container's limit included"
            raise ConfigError(
                f"kv_cache_gib is {config.kv_cache_gib:g} and {free / _GIB:.1f} GiB of memory are "
                f"free {where}{_beside(choices)}; lower it"
            )
        return wanted
    if device.type != "cuda":
        if config.mem_fraction_static is not None:
            raise ConfigError(
                f"mem_fraction_static is for CUDA and the device is {device.type}; use kv_cache_gib"
            )
        return None
    free, total = torch.cuda.mem_get_info(device)
    share = config.mem_fraction_static or _DEFAULT_MEM_FRACTION
    return max(0, int(free - total * (1 - share)) - buffers)


def _beside(choices: EngineChoices) -> str:
    """What errors about memory say of buffers of kernels."""
    if not choices.buffer_bytes:
        return ""
    size = f"{choices.buffer_bytes / _GIB:.3f} GiB"
    return f", and buffers of kernels take {size} beside the KV cache"


def free_memory(device: torch.device) -> int:
    """Bytes that this process may still allocate, including a container's limit."""
    if device.type == "mps":
        return torch.mps.recommended_max_memory() - torch.mps.current_allocated_memory()
    free = _FALLBACK_MEMORY
    meminfo = Path("/proc/meminfo")
    if meminfo.exists():
        fields = dict(line.split(":", 1) for line in meminfo.read_text().splitlines())
        free = int(fields["MemAvailable"].split()[0]) * 1024
    left = memory_left()
    return free if left is None else min(free, left)


def size_tier(choices: EngineChoices) -> TierSizes:
    """Page counts, hot slots and running requests of an engine with a host tier.

    Raises ConfigError if one request does not fit.
    """
    config, options, sparse = choices.config, choices.hisparse, choices.sparse
    groups, geometry, device = choices.groups, choices.geometry, choices.device
    context, max_running = choices.context, choices.limits.max_running_requests
    frames, page_group = len(groups) - 1, groups[-1].copy_of
    assert options is not None and sparse is not None and page_group is not None
    page_bytes = [group.page_bytes(geometry.page_size) for group in groups]
    frame_bytes, num_layers = page_bytes[frames], len(groups[frames].layers)
    budget = kv_budget(choices)
    if budget is None:
        budget = default_budget(config, device)
    per_page = slots_per_page(choices)
    hot = min(_hot_slots(options, sparse, geometry.page_size), geometry.pages(context) * per_page)
    by_kernels = choices.kernel_refusal is None
    most_running, swap = max_running, SwapBytes(0, 0)
    if by_kernels:
        swap = _swap_bytes(groups[frames], sparse, geometry.page_size)
        if not sparse.by_row:
            most_running = min(max_running, _most_with_slots(options, hot))
    # Ranks share the machine's memory. On a CPU the KV cache is taken from the same memory.
    free = free_memory(device) // config.tp - (budget if device.type == "cpu" else 0)
    host_bytes = _host_bytes(options, config.tp, budget, free)
    numbers = 2**31 if by_kernels else MOST_SLICES  # that slices can have
    host_pages = min(host_bytes // frame_bytes, 2**31 - 1, numbers // per_page - 2)
    own, size = groups[frames], geometry.page_size
    for_each_page = {  # of the host
        "landmarks": 0 if choices.landmarks is None else choices.landmarks.page_bytes,
        **{
            f"{part.name} keys": len(own.layers_with(part)) * part.page_bytes(size)
            for part in own.layout.staying.parts
        },
        "dense layers": page_bytes[page_group],
        "tables": swap.per_page,
    }
    kept = {name: host_pages * taken for name, taken in for_each_page.items()}
    staged, stages = 0, prompt_stages(sparse)
    if by_kernels:  # a stage holds one layer of the longest request
        layer_bytes = frame_bytes // num_layers
        staged = stages * min(geometry.pages(context), host_pages) * layer_bytes

    def needed(running: int, chunk_tokens: int) -> list[int]:
        """Pages of each group."""
        counts = [needed_pages(group, running, context, chunk_tokens, geometry) for group in groups]
        counts[frames], counts[page_group] = min(counts[frames], host_pages), host_pages
        return counts

    def spent(running: int, chunk_tokens: int) -> dict[str, int]:
        """Bytes of each kind of memory, beside those that are kept for every page of the host."""
        counts, slots = needed(running, chunk_tokens), running * hot
        sizes = [count * taken for count, taken in zip(counts, page_bytes, strict=True)]
        return {
            "stages of prompts": staged,
            "window layers": sum(sizes) - sizes[frames] - sizes[page_group],
            "windows and tails": sizes[frames],
            "hot cache": -(-slots // per_page) * frame_bytes + slots * swap.per_slot,
        }

    left = budget - sum(kept.values())
    # If a whole chunk does not fit, plan with the smallest one: prefill then takes smaller steps.
    for chunk_tokens in (min(choices.limits.chunked_prefill_size, context), 1):
        running = most_running
        while running and sum(spent(running, chunk_tokens).values()) > left:
            running -= 1
        if running:
            break
    if not host_pages:
        raise ConfigError(
            f"enable_hisparse: {host_bytes / _GIB:.6f} GiB of host memory hold no page, which "
            f"takes {frame_bytes / _GIB:.6f}; raise host_gib, or free memory that the KV cache "
            f"({budget / _GIB:.3f} GiB) and others take"
        )
    if not running:
        one_stage = ""
        if staged and stages == 2:
            one, both = staged / 2 / _GIB, staged / _GIB
            one_stage = (
                f", or use hsa_prefill=sparse, whose stage takes {one:.3f} GiB, not {both:.3f}"
            )
        least = spent(1, 1)
        needs = sum(kept.values()) + sum(least.values())
        raise ConfigError(
            f"enable_hisparse: the KV cache has {budget / _GIB:.3f} GiB and one request needs "
            f"{needs / _GIB:.3f}: {_told(kept)} for {host_pages} pages in host memory, and "
            f"{_told(least)}{_beside(choices)}; raise kv_cache_gib, or lower host_gib or "
            f"host_to_device_ratio, device_buffer_size, or context_length{one_stage}"
        )
    left -= sum(spent(running, chunk_tokens).values())
    pages = needed(running, chunk_tokens)
    pages[frames] = min(host_pages, pages[frames] + left // frame_bytes)
    note = (
        f"hisparse: {host_pages} pages in host memory ({host_pages * frame_bytes / _GIB:.2f} GiB), "
        f"{pages[frames]} resident and {running * hot} hot{' rows' if sparse.by_row else ''} on "
        "the device"
    )
    if by_row := kept.get(f"{INDEX} keys"):
        note += f", beside {by_row / _GIB:.2f} GiB of index keys"
    if running < max_running:
        why = "the device has no room for more of them"
        if running == most_running:
            why = f"the swap-in kernel plans with at most {MOST_HOT_SLOTS} hot pages"
        note += f"; max_running_requests is {running}: {why}"
    return TierSizes(pages, running * hot, running, note)


def _swap_bytes(frames: LayerGroup, sparse: SparseConfig, page_size: int) -> SwapBytes:
    """What the tables of swap-in kernels take."""
    if not sparse.by_row:
        return SwapBytes.of(len(frames.layers), frames.layout.heads)
    selecting = len(frames.layers_with(frames.layout.part(INDEX)))
    return SwapBytes.of_rows(selecting, page_size)


def _told(sizes: dict[str, int]) -> str:
    told = [f"{size / _GIB:.3f} of {name}" for name, size in sizes.items() if size]
    return ", ".join(told) or "nothing"


def _hot_slots(options: HiSparseOptions, sparse: SparseConfig, page_size: int) -> int:
    """Slots of the hot cache for each running request."""
    if options.device_buffer_size is None:
        return 2 * sparse.topk
    if sparse.by_row:
        if options.device_buffer_size < sparse.topk:
            raise ConfigError(
                f"hisparse_config: device_buffer_size is {options.device_buffer_size} tokens, a "
                f"query reads {sparse.topk} rows; it must be at least {sparse.topk}, better twice "
                "that"
            )
        return options.device_buffer_size
    pages = options.device_buffer_size // page_size
    # A token and the landmark row after it are computed in one step, and each selects pages.
    least = 2 * sparse.topk if sparse.landmark_rows else sparse.topk
    if pages < least:
        reads = f"a query reads {sparse.topk} pages of {page_size}"
        if sparse.landmark_rows:
            reads += " and landmark rows come beside tokens"
        raise ConfigError(
            f"hisparse_config: device_buffer_size is {options.device_buffer_size} tokens, {reads}; "
            f"it must be at least {least * page_size}"
            f"{'' if sparse.landmark_rows else ', better twice that'}"
        )
    return pages


def _most_with_slots(options: HiSparseOptions, hot: int) -> int:
    """Most requests whose hot pages one program of the swap-in kernel can plan with."""
    if hot > MOST_HOT_SLOTS:
        raise ConfigError(
            f"hisparse_config: device_buffer_size is {options.device_buffer_size} tokens, {hot} "
            f"pages for each request, and the swap-in kernel plans with at most {MOST_HOT_SLOTS}; "
            "lower device_buffer_size"
        )
    return MOST_HOT_SLOTS // hot


def _host_bytes(options: HiSparseOptions, ranks: int, budget: int, free: int) -> int:
    """Bytes of host memory for the pages of each rank."""
    if options.host_gib is None:
        ratio = _RATIO if options.host_to_device_ratio is None else options.host_to_device_ratio
        return min(int(ratio * budget), int(_MOST_OF_FREE * max(0, free)))
    wanted = int(options.host_gib * _GIB / ranks)
    if wanted > free:
        raise ConfigError(
            f"hisparse_config: host_gib is {options.host_gib} and {free * ranks / _GIB:.1f} GiB of "
            "memory are free beside the KV cache, a container's limit included; lower it"
        )
    return wanted
