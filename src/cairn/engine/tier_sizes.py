"""Sizes of an engine with a host tier: pages in host memory, frames, hot slots, running requests.

The device budget is spent in this order:

1. for every host page: landmarks or index keys, dense layers and tables;
2. the stage for prompts (two stages if prompts are read densely);
3. window layers;
4. what running requests need: frames for their windows and tails, a share of the hot cache, and
   one prefill chunk;
5. the rest becomes frames, in which pages stay resident.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import NamedTuple

from cairn.engine.hisparse_options import HiSparseOptions, prompt_stages
from cairn.engine.memory_budget import (
    GIB,
    default_budget,
    free_memory,
    kv_budget,
    told_beside,
)
from cairn.engine.resolve import EngineChoices
from cairn.errors import ConfigError
from cairn.kernels.interface import MOST_HOT_SLOTS
from cairn.memory.device_swap import SwapBytes
from cairn.memory.groups import LayerGroup
from cairn.memory.hot_cache import MOST_SLICES
from cairn.memory.layout import INDEX
from cairn.sparsity.config import SparseConfig

_RATIO = 2.0  # default ratio of host to device memory
_MOST_OF_FREE = 0.8
"""Largest share of free memory that host pages take by default."""


class TierSizes(NamedTuple):
    num_pages: list[int]  # by group; the last group has the frames
    hot_slots: int
    max_running_requests: int
    note: str


def slots_per_page(choices: EngineChoices) -> int:
    """Hot slots that a page of the pool has room for."""
    by_row = choices.sparse is not None and choices.sparse.by_row
    return choices.geometry.page_size if by_row else 1


def size_tier(choices: EngineChoices) -> TierSizes:
    """Page counts, hot slots and running requests of an engine with a host tier.

    Raises ConfigError if one request does not fit.
    """
    tier = _Tier.of(choices).fitting()
    if not tier.host_pages:
        raise ConfigError(
            f"enable_hisparse: {tier.host_bytes / GIB:.6f} GiB of host memory hold no page, which "
            f"takes {tier.frame_bytes / GIB:.6f}; raise host_gib, or free memory that the KV cache "
            f"({tier.budget / GIB:.3f} GiB) and others take"
        )
    left = tier.budget - sum(tier.kept().values())
    # If a whole chunk does not fit, plan with the smallest one: prefill then takes smaller steps.
    for chunk in (min(choices.limits.chunked_prefill_size, choices.context), 1):
        running = tier.most_running
        while running and sum(tier.spent(running, chunk).values()) > left:
            running -= 1
        if running:
            break
    else:
        raise tier.refusal()
    left -= sum(tier.spent(running, chunk).values())
    pages = tier.pages(running, chunk)
    pages[-1] = min(tier.host_pages, pages[-1] + left // tier.frame_bytes)
    return TierSizes(pages, running * tier.hot, running, tier.note(pages[-1], running))


@dataclass(frozen=True, slots=True)
class _Tier:
    """What is known before the number of running requests is. Sizes are in bytes."""

    choices: EngineChoices
    budget: int
    """For the KV cache on the device."""
    host_bytes: int
    host_pages: int
    hot: int
    """Hot slots of each running request."""
    most_running: int
    swap: SwapBytes
    """Tables of the swap-in kernels."""

    @classmethod
    def of(cls, choices: EngineChoices) -> _Tier:
        config, options, sparse = choices.config, choices.hisparse, choices.sparse
        geometry, device, frames = choices.geometry, choices.device, choices.groups[-1]
        assert options is not None and sparse is not None
        budget = kv_budget(choices)
        if budget is None:
            budget = default_budget(config, device)
        per_page = slots_per_page(choices)
        hot = _hot_slots(options, sparse, geometry.page_size)
        hot = min(hot, geometry.pages(choices.context) * per_page)
        by_kernels = choices.kernel_refusal is None
        most_running, swap = choices.limits.max_running_requests, SwapBytes(0, 0)
        if by_kernels:
            swap = _swap_bytes(frames, sparse, geometry.page_size)
            if not sparse.by_row:
                most_running = min(most_running, _most_with_slots(options, hot))
        # Ranks share the machine's memory. On a CPU the KV cache is taken from the same memory.
        free = free_memory(device) // config.tp - (budget if device.type == "cpu" else 0)
        host_bytes = _host_bytes(options, config.tp, budget, free)
        numbers = 2**31 if by_kernels else MOST_SLICES  # that slices can have
        host_pages = min(
            host_bytes // frames.page_bytes(geometry.page_size),
            2**31 - 1,
            numbers // per_page - 2,
        )
        return cls(choices, budget, host_bytes, host_pages, hot, most_running, swap)

    def fitting(self) -> _Tier:
        """The same with fewer host pages, if what the device keeps of each of them would leave less
        than half of the budget to requests. A size that the user asked for stays."""
        options = self.choices.hisparse
        assert options is not None
        if options.host_gib is not None or options.host_to_device_ratio is not None:
            return self
        per_page = sum(replace(self, host_pages=1).kept().values())
        room = self.budget - max(self.budget // 2, sum(self.spent(1, 1).values()))
        if not 0 < room < per_page * self.host_pages:
            return self
        return replace(self, host_pages=room // per_page)

    @property
    def frame_bytes(self) -> int:
        return self.choices.groups[-1].page_bytes(self.choices.geometry.page_size)

    @property
    def stages(self) -> int:
        """Number of stages for prompts."""
        assert self.choices.sparse is not None
        return prompt_stages(self.choices.sparse)

    def kept(self) -> dict[str, int]:
        """What every page of the host takes on the device, for all of them."""
        choices, own, size = self.choices, self.choices.groups[-1], self.choices.geometry.page_size
        for_each_page = {
            "landmarks": 0 if choices.landmarks is None else choices.landmarks.page_bytes,
            **{
                f"{part.name} keys": len(own.layers_with(part)) * part.page_bytes(size)
                for part in own.layout.staying.parts
            },
            "dense layers": choices.groups[choices.page_group].page_bytes(size),
            "tables": self.swap.per_page,
        }
        return {name: self.host_pages * taken for name, taken in for_each_page.items()}

    def pages(self, running: int, chunk_tokens: int) -> list[int]:
        """Pages of each group for `running` requests, one of which prefills a chunk."""
        choices = self.choices
        *others, frames = (
            group.pages_of_all(running, choices.context, chunk_tokens, choices.geometry)
            for group in choices.groups
        )
        counts = [*others, min(frames, self.host_pages)]
        counts[choices.page_group] = self.host_pages
        return counts

    def staged(self) -> int:
        """The stages of prompts; each holds one layer of the longest request."""
        choices = self.choices
        if choices.kernel_refusal is not None:
            return 0
        layer_bytes = self.frame_bytes // len(choices.groups[-1].layers)
        longest = min(choices.geometry.pages(choices.context), self.host_pages)
        return self.stages * longest * layer_bytes

    def spent(self, running: int, chunk_tokens: int) -> dict[str, int]:
        """What is taken beside `kept`, by kind."""
        choices, slots = self.choices, running * self.hot
        *others, frames = self.pages(running, chunk_tokens)
        sizes = [
            count * group.page_bytes(choices.geometry.page_size)
            for group, count in zip(choices.groups[:-1], others, strict=True)
        ]
        del sizes[choices.page_group]  # in `kept`
        hot_pages = -(-slots // slots_per_page(choices))
        return {
            "stages of prompts": self.staged(),
            "window layers": sum(sizes),
            "windows and tails": frames * self.frame_bytes,
            "hot cache": hot_pages * self.frame_bytes + slots * self.swap.per_slot,
        }

    def refusal(self) -> ConfigError:
        """Says what one request needs."""
        one_stage, staged = "", self.staged()
        if staged and self.stages == 2:
            one, both = staged / 2 / GIB, staged / GIB
            one_stage = (
                f", or use hsa_prefill=sparse, whose stage takes {one:.3f} GiB, not {both:.3f}"
            )
        kept, least = self.kept(), self.spent(1, 1)
        needs = sum(kept.values()) + sum(least.values())
        return ConfigError(
            f"enable_hisparse: the KV cache has {self.budget / GIB:.3f} GiB and one request needs "
            f"{needs / GIB:.3f}: {_told(kept)} for {self.host_pages} pages in host memory, and "
            f"{_told(least)}{told_beside(self.choices)}; raise kv_cache_gib, or lower host_gib or "
            f"host_to_device_ratio, device_buffer_size, or context_length{one_stage}"
        )

    def note(self, frames: int, running: int) -> str:
        """What the user is told about frames and running requests."""
        sparse, host_gib = self.choices.sparse, self.host_pages * self.frame_bytes / GIB
        rows = " rows" if sparse is not None and sparse.by_row else ""
        note = (
            f"hisparse: {self.host_pages} pages in host memory ({host_gib:.2f} GiB), {frames} "
            f"resident and {running * self.hot} hot{rows} on the device"
        )
        if by_row := self.kept().get(f"{INDEX} keys"):
            note += f", beside {by_row / GIB:.2f} GiB of index keys"
        if running < self.choices.limits.max_running_requests:
            why = "the device has no room for more of them"
            if running == self.most_running:
                why = f"the swap-in kernel plans with at most {MOST_HOT_SLOTS} hot pages"
            note += f"; max_running_requests is {running}: {why}"
        return note


def _swap_bytes(frames: LayerGroup, sparse: SparseConfig, page_size: int) -> SwapBytes:
    """What the tables of swap-in kernels take."""
    if not sparse.by_row:
        return SwapBytes.of(len(frames.layers), frames.layout.heads)
    selecting = len(frames.layers_with(frames.layout.part(INDEX)))
    return SwapBytes.of_rows(selecting, page_size)


def _told(sizes: dict[str, int]) -> str:
    told = [f"{size / GIB:.3f} of {name}" for name, size in sizes.items() if size]
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
    wanted = int(options.host_gib * GIB / ranks)
    if wanted > free:
        raise ConfigError(
            f"hisparse_config: host_gib is {options.host_gib} and {free * ranks / GIB:.1f} GiB of "
            "memory are free beside the KV cache, a container's limit included; lower it"
        )
    return wanted
