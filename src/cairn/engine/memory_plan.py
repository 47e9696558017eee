"""Decides how many pages each layer group gets, from the memory of each rank.

Rank 0 decides for all ranks, so that they agree.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from cairn.engine.limits import Limits
from cairn.engine.memory_budget import default_budget, kv_budget, told_beside
from cairn.engine.resolve import EngineChoices
from cairn.engine.tier_sizes import size_tier, slots_per_page
from cairn.errors import ConfigError
from cairn.memory.groups import max_tokens, split_budget

_CACHE_HEADROOM = 2
"""Without an explicit budget, the cache holds this many times what running requests can need."""


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
        _CACHE_HEADROOM * group.pages_of_all(limits.max_running_requests, context, chunk, geometry)
        for group in groups
    ]
    budget = kv_budget(choices)
    if budget is None:
        needed = sum(pages * size for pages, size in zip(wanted, page_bytes, strict=True))
        budget = min(default_budget(config, device), needed)
    pages = split_budget(budget, groups, page_bytes, wanted, told_beside(choices))
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
