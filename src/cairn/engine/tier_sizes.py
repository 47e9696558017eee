"""How a device budget and host memory are divided where pages live in host memory.

The device pays for landmarks, dense layers and tables of every host page first, then for the stage
of prompts (two where they are read densely), for window layers, and for what running requests need:
frames for their windows and tails, a share of the hot cache, and one prefill chunk. What is left
becomes frames, in which pages stay resident.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch

from cairn.config import EngineConfig
from cairn.engine.hisparse_options import HiSparseOptions
from cairn.engine.pool_sizes import default_budget, free_memory, kv_budget, needed_pages
from cairn.errors import ConfigError
from cairn.kernels.interface import MOST_HOT_SLOTS
from cairn.memory.device_swap import SwapBytes
from cairn.memory.geometry import PageGeometry
from cairn.memory.groups import LayerGroup
from cairn.sparsity.config import SparseConfig

_GIB = 2**30
_RATIO = 2.0  # of host to device memory, where neither is asked for
_MOST_OF_FREE = 0.8
"""Of the memory that is free, what pages in host memory may take unasked."""


@dataclass(frozen=True, slots=True)
class TierSizes:
    groups: tuple[LayerGroup, ...]
    num_pages: list[int]  # by group; the last is the group of frames
    hot_slots: int  # per layer and kv head
    max_running_requests: int
    note: str

    @property
    def ids(self) -> int:
        """The group whose pages the frames hold."""
        ids = self.groups[-1].copy_of
        assert ids is not None
        return ids


def split_group(groups: Sequence[LayerGroup], sparse: SparseConfig) -> tuple[LayerGroup, ...]:
    """Take the sparse layers out of their group, which keeps the page ids, into one of frames."""
    (ids,) = (g for g, group in enumerate(groups) if sparse.layers[0] in group.layers)
    dense = tuple(layer for layer in groups[ids].layers if layer not in sparse.layers)
    kept = [replace(group, layers=dense) if g == ids else group for g, group in enumerate(groups)]
    # Rows below `dense_below` see everything before them, which must then be on the device.
    window = max(sparse.window, sparse.dense_below)
    return (*kept, LayerGroup("resident", sparse.layers, window, copy_of=ids))


def prompt_stages(sparse: SparseConfig) -> int:
    """Buffers that pages of prompts are staged in: a second one where they are read densely."""
    return 2 if sparse.dense_prompt_below else 1


@dataclass(frozen=True, slots=True)
class TierCosts:
    """Bytes of a page, by group, and of what the device keeps for every page id."""

    page_bytes: Sequence[int]
    landmark_bytes: int
    swap: SwapBytes | None = None
    """Of the kernels' tables, where kernels swap pages in."""


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
    fixed = host_pages * (costs.landmark_bytes + costs.page_bytes[ids] + swap.per_page)
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
    return TierSizes(groups, pages, running * hot, running, note)


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
