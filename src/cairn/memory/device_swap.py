"""Swap-in by kernels: the plan of `hot_cache` on the device, and a stage for prompts.

Decode steps go through the hot cache and can be recorded. A chunk of a prompt reads so many pages
that a layer's are staged whole: all that its rows selected and that are in no frame are copied,
once each, into memory that all layers share.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import torch

from cairn.memory.host_pool import HostPool
from cairn.memory.kv_pool import KVPool

if TYPE_CHECKING:
    from cairn.kernels.swap_in import HotTables

_BACKUP_PROGRAMS = 16  # enough for the link, and attention keeps the rest of the device


class SwapShape(NamedTuple):
    max_seqs: int
    """Rows of a decode step, at most."""
    topk: int
    stage_pages: int
    """Pages of the longest request."""


class DeviceSwap:
    def __init__(
        self,
        pool: KVPool,
        host: HostPool,
        frame_of: torch.Tensor,  # [pages] int32, 0 for none
        *,
        first_hot: int,
        hot_slots: int,
        shape: SwapShape,
    ) -> None:
        from cairn.kernels.swap_in import HotTables, Misses, SwapScratch

        self._pool = pool
        self._host = host
        self._frame_of = frame_of
        self._first_hot = first_hot
        device, num_pages = frame_of.device, len(frame_of)
        heads = pool.kv_heads
        self._hot: dict[int, HotTables] = {
            layer: HotTables.empty(heads, hot_slots, num_pages, device) for layer in host.layers
        }
        self._scratch = SwapScratch.empty(shape.max_seqs, heads, shape.topk, num_pages, device)
        like = pool.layers[next(iter(host.layers))]
        size = (shape.stage_pages, *like.shape[1:])
        self.stage = torch.zeros(size, dtype=like.dtype, device=device)
        # One entry more: where pages that are not staged are put.
        self._staged = Misses.empty(heads, shape.stage_pages + 1, device)
        self._staged.entries[:, 2] = torch.arange(shape.stage_pages + 1, device=device)
        self._page_ids = torch.arange(num_pages, dtype=torch.int32, device=device)
        self._num_staged = torch.zeros(1, dtype=torch.int64, device=device)
        self._totals = torch.zeros(4, dtype=torch.int64, pin_memory=device.type == "cuda")

    def tell_totals(self) -> None:
        """Have the device say what it has done so far, without waiting for it."""
        self._totals[:3].copy_(self._scratch.totals, non_blocking=True)
        self._totals[3:].copy_(self._num_staged, non_blocking=True)

    @property
    def totals(self) -> list[int]:
        """Of decode steps reads of resident pages, of hot ones and misses, and slices staged for
        prompts, as last told."""
        return [int(total) for total in self._totals.tolist()]

    def locate(
        self,
        layer: int,
        selected: torch.Tensor,  # [seqs, kv_heads, k] int32 place in the sequence, -1 for none
        page_table: torch.Tensor,  # [seqs, pages] int32
        generations: torch.Tensor,  # [seqs, pages] int32
    ) -> torch.Tensor:
        """Pages of the pool that hold them, [seqs, kv_heads, k], in memory of its own."""
        from cairn.kernels.swap_in import copy_missed, plan_swap

        hot, scratch = self._hot[layer], self._scratch
        plan_swap(hot, scratch, selected, page_table, generations, self._frame_of, self._first_hot)
        copy_missed(
            scratch.misses, self._host.layers[layer], self._pool.layers[layer], self._first_hot
        )
        return scratch.located

    def forget(self, layer: int) -> None:
        """Somebody else has used the layer's hot slots."""
        self._hot[layer].pages.fill_(-1)

    def fetch(self, pages: torch.Tensor, frames: torch.Tensor) -> None:
        """Whole pages from the host into frames."""
        from cairn.kernels.swap_in import copy_pages

        for layer, host in self._host.layers.items():
            copy_pages(host, self._pool.layers[layer], pages, frames)

    def back_up(self, pages: torch.Tensor, frames: torch.Tensor) -> None:
        """Whole pages from frames to the host."""
        from cairn.kernels.swap_in import copy_pages

        for layer, host in self._host.layers.items():
            copy_pages(self._pool.layers[layer], host, frames, pages, programs=_BACKUP_PROGRAMS)

    def fill_stage(
        self,
        layer: int,
        pages: torch.Tensor,  # [blocks, kv_heads, n] page ids
        counts: torch.Tensor,  # [blocks, kv_heads] how many of them there are
    ) -> torch.Tensor:
        """Where they are, [blocks, kv_heads, n]: a page of the pool, or -1 - a page of the stage.

        The stage must have room for all different pages of the neediest kv head.
        """
        from cairn.kernels.swap_in import copy_missed

        there = torch.arange(pages.shape[2], device=pages.device) < counts[..., None]
        ids = torch.where(there, pages, 0).long().transpose(0, 1).flatten(1)  # [kv_heads, entries]
        frames = self._frame_of[ids]
        missing = torch.where(frames == 0, ids, 0)
        marked = torch.zeros(len(ids), len(self._page_ids), dtype=torch.int32, device=ids.device)
        marked.scatter_(1, missing, 1)
        marked[:, 0] = 0
        slot = marked.cumsum(1, dtype=torch.int32) - 1  # [kv_heads, pages]
        staged = self._staged
        place = torch.where(marked > 0, slot, len(self.stage)).long()
        staged.entries[:, 0].scatter_(1, place, self._page_ids.expand_as(slot))
        staged.counts.copy_(marked.sum(1))
        self._num_staged += staged.counts.sum()
        copy_missed(staged, self._host.layers[layer], self.stage, 0)
        found = torch.where(frames > 0, frames, -1 - slot.gather(1, ids))
        return found.view(len(ids), len(pages), -1).transpose(0, 1).contiguous()
