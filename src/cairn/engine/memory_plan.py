"""How many pages there are, what they are paid from, and what each rank's memory looks like.

Rank 0 decides for all ranks, so that they agree.

Where pages live in host memory, the device pays for landmarks, dense layers and tables of every
host page first, then for the stage of prompts (two where they are read densely), for window layers,
and for what running requests need: frames for their windows and tails, a share of the hot cache,
and one prefill chunk. What is left becomes frames, in which pages stay resident.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from cairn.config import EngineConfig
from cairn.engine.container_limit import memory_left
from cairn.engine.hisparse_options import HiSparseOptions, prompt_stages
from cairn.engine.resolve import EngineChoices
from cairn.engine.scheduler import Limits
from cairn.errors import ConfigError
from cairn.kernels.interface import MOST_HOT_SLOTS
from cairn.memory.device_swap import SwapBytes
from cairn.memory.geometry import PageGeometry
from cairn.memory.groups import LayerGroup, max_tokens, split_budget
from cairn.sparsity.config import SparseConfig

_DEFAULT_MEM_FRACTION = 0.85
_DEFAULT_FREE_SHARE = 0.25
_FALLBACK_MEMORY = 8 * 2**30  # where the system does not tell what is free
_CACHE_HEADROOM = 2
"""Without an explicit budget, room for this many times what running requests can need."""
_GIB = 2**30
_RATIO = 2.0  # of host to device memory, where neither is asked for
_MOST_OF_FREE = 0.8
"""Of the memory that is free, what pages in host memory may take unasked."""


@dataclass(frozen=True, slots=True)
class TierSizes:
    page_group: int
    """The group whose pages the frames hold."""
    num_pages: list[int]  # by group; the last is the group of frames
    hot_slots: int  # per layer and kv head
    max_running_requests: int
    note: str


@dataclass(frozen=True, slots=True)
class TierCosts:
    """Bytes of a page, by group, and of what the device keeps for every page id."""

    page_bytes: Sequence[int]
    kept_bytes: int
    """Landmarks, and the parts of the cache that never leave the device."""
    swap: SwapBytes | None = None
    """Of the kernels' tables, where kernels swap pages in."""


@dataclass(frozen=True, slots=True)
class MemoryPlan:
    limits: Limits
    """With as many running requests as there is room for."""
    num_pages: tuple[int, ...]  # by group
    max_pages: int
    """Of a request's page table."""
    tier: TierSizes | None


def plan_memory(choices: EngineChoices) -> MemoryPlan:
    limits, tier = choices.limits, None
    if choices.hisparse is None:
        num_pages = size_pools(choices)
    else:
        tier = _size_tier(choices)
        num_pages = tier.num_pages
        limits = replace(limits, max_running_requests=tier.max_running_requests)
    longest = min(choices.context, max_tokens(choices.groups, num_pages, choices.geometry))
    return MemoryPlan(limits, tuple(num_pages), choices.geometry.pages(longest), tier)


def _size_tier(choices: EngineChoices) -> TierSizes:
    assert choices.hisparse is not None and choices.sparse is not None
    groups, page_size = choices.groups, choices.geometry.page_size
    frames, swap = groups[-1], None
    if choices.kernel_refusal is None:
        swap = SwapBytes.of(len(frames.layers), frames.layout.heads)
    landmarks = 0 if choices.landmarks is None else choices.landmarks.page_bytes
    costs = TierCosts(
        [group.page_bytes(page_size) for group in groups],
        landmarks + frames.staying_bytes(page_size),
        swap,
    )
    return size_tier(
        choices.config,
        choices.hisparse,
        choices.sparse,
        groups,
        costs,
        choices.geometry,
        max_running=choices.limits.max_running_requests,
        chunk=choices.limits.chunked_prefill_size,
        context=choices.context,
        device=choices.device,
    )


def size_pools(choices: EngineChoices) -> list[int]:
    """Pages per layer group, where all of them are on the device."""
    config, device, context = choices.config, choices.device, choices.context
    groups, geometry, limits = choices.groups, choices.geometry, choices.limits
    landmarks = choices.landmarks
    page_bytes = [
        group.page_bytes(geometry.page_size)
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


def size_tier(
    config: EngineConfig,
    options: HiSparseOptions,
    sparse: SparseConfig,
    groups: tuple[LayerGroup, ...],
    costs: TierCosts,
    geometry: PageGeometry,
    *,
    max_running: int,
    chunk: int,
    context: int,
    device: torch.device,
) -> TierSizes:
    """`groups` come from `split_group`."""
    frames, ids = len(groups) - 1, groups[-1].copy_of
    assert ids is not None
    budget = kv_budget(config, device)
    if budget is None:
        budget = default_budget(config, device)
    frame_bytes = costs.page_bytes[frames]
    hot = min(_hot_pages(options, sparse, geometry.page_size), geometry.pages(context))
    swap = SwapBytes(0, 0) if costs.swap is None else costs.swap
    most_running = max_running
    if costs.swap is not None:
        most_running = min(max_running, _most_with_slots(options, hot))
    # Ranks on one machine share its memory; a CPU's KV cache comes out of the same.
    free = free_memory(device) // config.tp - (budget if device.type == "cpu" else 0)
    host_bytes = _host_bytes(options, config.tp, budget, free)
    host_pages = min(host_bytes // frame_bytes, 2**31 - 1)
    fixed = host_pages * (costs.kept_bytes + costs.page_bytes[ids] + swap.per_page)
    staged, stages = 0, prompt_stages(sparse)
    if costs.swap is not None:  # a stage holds what one layer reads of the longest request
        layer_bytes = frame_bytes // len(groups[frames].layers)
        staged = stages * min(geometry.pages(context), host_pages) * layer_bytes

    def spent(running: int, chunk_tokens: int) -> tuple[int, list[int]]:
        needed = [
            host_pages
            if g == ids
            else needed_pages(group, running, context, chunk_tokens, geometry)
            for g, group in enumerate(groups)
        ]
        needed[frames] = min(needed[frames], host_pages)
        paid = sum(
            count * size
            for g, (count, size) in enumerate(zip(needed, costs.page_bytes, strict=True))
            if g != ids
        )
        return fixed + staged + paid + running * hot * (frame_bytes + swap.per_slot), needed

    # A chunk that does not fit is cut into smaller ones, down to a page.
    for chunk_tokens in (min(chunk, context), 1):
        running = most_running
        while running and spent(running, chunk_tokens)[0] > budget:
            running -= 1
        if running:
            break
    least, _ = spent(1, 1)
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
        raise ConfigError(
            f"enable_hisparse: the KV cache has {budget / _GIB:.3f} GiB and one request needs "
            f"{least / _GIB:.3f}, of which {fixed / _GIB:.3f} are landmarks and dense layers of "
            f"{host_pages} pages in host memory and what finds them, and {staged / _GIB:.3f} stage "
            "prompts; raise kv_cache_gib, or lower host_gib or host_to_device_ratio, "
            f"device_buffer_size, or context_length{one_stage}"
        )
    cost, pages = spent(running, chunk_tokens)
    pages[frames] = min(host_pages, pages[frames] + (budget - cost) // frame_bytes)
    note = (
        f"hisparse: {host_pages} pages in host memory ({host_pages * frame_bytes / _GIB:.2f} GiB), "
        f"{pages[frames]} resident and {running * hot} hot on the device"
    )
    if running < max_running:
        why = "the device has no room for more of them"
        if running == most_running:
            why = f"the swap-in kernel plans with at most {MOST_HOT_SLOTS} hot pages"
        note += f"; max_running_requests is {running}: {why}"
    return TierSizes(ids, pages, running * hot, running, note)


def _hot_pages(options: HiSparseOptions, sparse: SparseConfig, page_size: int) -> int:
    """Pages of the hot cache for each running request."""
    if options.device_buffer_size is None:
        return 2 * sparse.topk
    pages = options.device_buffer_size // page_size
    # A token and the landmark row behind it are computed in one step, and each selects.
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
    """Requests whose hot pages one program of the kernel can plan with."""
    if hot > MOST_HOT_SLOTS:
        raise ConfigError(
            f"hisparse_config: device_buffer_size is {options.device_buffer_size} tokens, {hot} "
            f"pages for each request, and the swap-in kernel plans with at most {MOST_HOT_SLOTS}; "
            "lower device_buffer_size"
        )
    return MOST_HOT_SLOTS // hot


def _host_bytes(options: HiSparseOptions, ranks: int, budget: int, free: int) -> int:
    """For each rank."""
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
