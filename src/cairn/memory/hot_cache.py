"""The hot cache of a layer: slices, kept on the device, of pages that are only in host memory.

A slice is what one kv head reads of a page, or of one row if queries select rows. Each kv head has
its own slots, since each selects for itself. The number of a slice is its page id, or
page id * page_size + offset for a row. Slots are tagged with this number and the page's generation,
so that requests with a common prefix share them and a recycled page id does not match an old slice.
Nothing has to be purged when pages are freed.

This is the planner in plain torch: exact, on any device, the reference for every kernel.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from cairn.errors import PageError
from cairn.kernels.interface import HOT_AGES

_EMPTY = -1
_NUMBER_BITS = 32
MOST_SLICES = 2**_NUMBER_BITS
"""Slices that numbers can tell apart."""


@dataclass(frozen=True, slots=True)
class SwapPlan:
    slots: torch.Tensor  # [rows, kv_heads, k] slot of each wanted slice, -1 for the others
    heads: torch.Tensor  # [misses] kv head
    slices: torch.Tensor  # [misses] slice to copy
    into: torch.Tensor  # [misses] slot to copy it to
    hits: int  # reads of slices that were there or that another row copies in


class HotCache:
    def __init__(self, kv_heads: int, slots: int, device: torch.device) -> None:
        self.slots = slots
        self.tags = torch.full((kv_heads, slots), _EMPTY, dtype=torch.int64, device=device)
        """[kv_heads, slots] generation << 32 | number of the slice, -1 for none."""
        # The least recently used slot is evicted first. Within a step, misses count as used before
        # hits. Slots that were not used for HOT_AGES / 2 steps are equally old.
        self.used = torch.zeros(kv_heads, slots, dtype=torch.int64, device=device)
        """[kv_heads, slots] time of the last use."""
        self._clock = 0

    def distinct(
        self, slices: torch.Tensor, generations: torch.Tensor, wanted: torch.Tensor
    ) -> int:
        """Slots that these slices take for the kv head that needs the most. All arguments are
        [rows, kv_heads, k]."""
        tags = _tags(slices, generations)
        return max(
            int(torch.unique(tags[:, head][wanted[:, head]]).numel())
            for head in range(slices.shape[1])
        )

    def plan(
        self, slices: torch.Tensor, generations: torch.Tensor, wanted: torch.Tensor
    ) -> SwapPlan:
        """Find slices in the cache, or make room for them. Tags change immediately.

        All arguments are [rows, kv_heads, k]; slices and generations are int32 or int64. `wanted`
        is False if there is no slice or it is read from elsewhere.
        """
        self._clock += 2
        tags = _tags(slices, generations)
        slots = torch.full_like(tags, -1)
        heads, missed, into = [], [], []
        hits = 0
        for head in range(slices.shape[1]):
            own, mask = self.tags[head], wanted[:, head]
            asked, place = torch.unique(tags[:, head][mask], return_inverse=True)  # ascending
            if not len(asked):
                continue
            where = torch.searchsorted(asked, own).clamp(max=len(asked) - 1)
            held = asked[where] == own  # [slots]
            found = torch.full_like(asked, -1)
            found[where[held]] = held.nonzero().squeeze(1)
            missing = (found < 0).nonzero().squeeze(1)
            # Missing slices go into slots in ascending order, in the order of the rows' reads.
            reads = torch.arange(len(place), device=place.device)
            first = torch.full_like(asked, len(place)).scatter_reduce(0, place, reads, "amin")
            missing = missing[first[missing].argsort()]
            oldest = self._clock + 2 - HOT_AGES
            order = self.used[head].clamp(min=oldest).argsort(stable=True)
            victims = order[~held[order]][: len(missing)].sort().values
            if len(victims) < len(missing):
                raise PageError(
                    f"{len(asked)} slices of one kv head are asked for at once and the hot cache "
                    f"has {self.slots}"
                )
            found[missing] = victims
            own[victims] = asked[missing]
            self.used[head][held] = self._clock + 1
            self.used[head][victims] = self._clock
            slots[:, head][mask] = found[place]
            hits += len(place) - len(missing)
            heads.append(torch.full_like(missing, head))
            missed.append(asked[missing] & (2**_NUMBER_BITS - 1))
            into.append(victims)
        none = tags.new_empty(0)
        return SwapPlan(
            slots,
            torch.cat([none, *heads]),
            torch.cat([none, *missed]),
            torch.cat([none, *into]),
            hits,
        )

    def forget(self) -> None:
        """Empty the cache, because a plan was not carried out completely."""
        self.tags.fill_(_EMPTY)


def _tags(slices: torch.Tensor, generations: torch.Tensor) -> torch.Tensor:
    return (generations.long() << _NUMBER_BITS) | slices.long()
