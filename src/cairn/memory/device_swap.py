"""Swap-in by kernels: plans like `hot_cache`, but on the device, and has a stage for prompts.

It serves layers in which keys and values of heads are the only part that may leave the device.
Decode steps use the hot cache and can be recorded. A prompt chunk reads so many pages that they go
to a stage instead: all pages that its rows selected and that are not in frames are copied, once
each, into memory that all layers share.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import torch

from cairn.kernels.interface import COPY_THREADS, Located
from cairn.memory.kv_pool import HostPool, KVPool

if TYPE_CHECKING:
    from cairn.kernels.swap_in import HotTables, Misses

_BACKUP_PROGRAMS = 32  # enough to saturate the link; attention keeps the rest of the device
_THREADS_BESIDE_ATTENTION = 8192
"""Threads that copy missing slices. The loads of an SM return in order, so attention's loads wait
for those of the copies. Therefore there are only enough threads to keep the link busy."""


class SwapShape(NamedTuple):
    max_seqs: int
    """Most rows of a decode step."""
    topk: int
    stage_pages: int
    """Pages of the longest request."""
    copy_threads: int = COPY_THREADS
    """Threads per block of the kernel that copies missing slices."""
    stages: int = 1
    """Number of stages; two if prompts are read densely."""


class SwapBytes(NamedTuple):
    """Device memory of the tables, in addition to frames and hot slots."""

    per_page: int
    """For each page id: its hot slot by layer and kv head, its claims by kv head for the hot cache
    and for the stage, and its frame. Slots and claims are for each row if queries select rows."""
    per_slot: int
    """For each hot slot: tags, ages and arrivals, including those of the torch planner."""

    @classmethod
    def of(cls, layers: int, kv_heads: int) -> SwapBytes:
        return cls(4 * kv_heads * (layers + 2) + 4, layers * kv_heads * (4 * 4 + 2 * 8))

    @classmethod
    def of_rows(cls, selectors: int, page_size: int) -> SwapBytes:
        """For rows, where so many layers select for themselves."""
        return cls(4 * page_size * (selectors + 1) + 4, selectors * 2 * 8)


class PageCopier:
    """Copies whole pages by kernels, and has the stages for prompts."""

    def __init__(
        self, pool: KVPool, host: HostPool, frame_of: torch.Tensor, shape: SwapShape
    ) -> None:
        from cairn.kernels.layer_memory import LayerMemory

        (kept,) = host.layout.parts
        self._name = kept.name
        self._pool = pool
        self._host = host
        self.frame_of = frame_of
        self._threads = shape.copy_threads
        device = frame_of.device
        here, there = (
            [memory.part(layer, kept.name) for layer in host.layers] for memory in (pool, host)
        )
        size = (shape.stage_pages, *here[0].shape[1:])
        self.stages = [
            torch.zeros(size, dtype=here[0].dtype, device=device) for _ in range(shape.stages)
        ]
        self._on_device, self._on_host = (LayerMemory.of(own, device) for own in (here, there))

    def fetch(self, pages: torch.Tensor, frames: torch.Tensor) -> None:
        """Copy whole pages from the host into frames."""
        from cairn.kernels.swap_in import copy_pages

        copy_pages(self._on_host, self._on_device, pages, frames, threads=self._threads)

    def back_up(self, pages: torch.Tensor, frames: torch.Tensor) -> None:
        """Copy whole pages from frames to the host."""
        from cairn.kernels.swap_in import copy_pages

        copy_pages(self._on_device, self._on_host, frames, pages, programs=_BACKUP_PROGRAMS)


class DeviceSwap(PageCopier):
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
        from cairn.kernels.stage import StageTables
        from cairn.kernels.swap_in import HotTables, SwapScratch

        super().__init__(pool, host, frame_of, shape)
        self._first_hot = first_hot
        device, num_pages = frame_of.device, len(frame_of)
        heads = host.layout.heads
        self._hot: dict[int, HotTables] = {
            layer: HotTables.empty(heads, hot_slots, num_pages, device) for layer in host.layers
        }
        self._scratch = SwapScratch.empty(shape.max_seqs, heads, shape.topk, num_pages, device)
        self._tables = StageTables.empty(heads, shape.stage_pages, num_pages, device)

    @property
    def stage(self) -> torch.Tensor:
        """The buffer that `fill_stage` fills. Prompts that are read densely use it too."""
        return self.stages[0]

    @property
    def totals(self) -> list[int]:
        """Totals: reads of resident pages, hot-cache hits and misses of decode steps, and slices
        staged for prompts. Waits for the device."""
        return [int(total) for total in self._scratch.totals.tolist()]

    @property
    def resident_reads(self) -> torch.Tensor:
        """Counter [1] int64 of reads of resident pages, for steps that do not use `locate`."""
        return self._scratch.totals[:1]

    def locate(
        self,
        layer: int,
        selected: torch.Tensor,  # [seqs, kv_heads, k] int32 place in the sequence, -1 for none
        page_table: torch.Tensor,  # [seqs, pages] int32
        generations: torch.Tensor,  # [seqs, pages] int32
    ) -> Located:
        """Find the selected pages in the pool. Missing ones are there once the launched copies are
        done."""
        from cairn.kernels.swap_in import plan_swap

        hot, scratch = self._hot[layer], self._scratch
        plan_swap(hot, scratch, selected, page_table, generations, self.frame_of, self._first_hot)
        try:
            pieces = self._copy_missed(layer, scratch.misses)
        except BaseException:  # Ctrl-C too: tags must not name pages that were not copied
            self.forget(layer)
            raise
        return Located(scratch.located, hot.arrived, pieces, self._first_hot)

    def _copy_missed(self, layer: int, misses: Misses) -> int:
        """Copy the missing slices into hot slots; returns the number of pieces per slice."""
        from cairn.kernels.swap_in import copy_missed, pieces_of

        # Launched even without misses, because attention waits for this launch before it starts.
        copy_missed(
            misses,
            self._host.part(layer),
            self._pool.part(layer),
            self._first_hot,
            arrived=self._hot[layer].arrived,
            programs=_THREADS_BESIDE_ATTENTION // self._threads,
            threads=self._threads,
        )
        return pieces_of(self._pool.part(layer), self._threads)

    def forget(self, layer: int) -> None:
        """Empty the layer's hot cache, because its slots were overwritten."""
        self._hot[layer].pages.fill_(-1)

    def in_frames(self, pages: torch.Tensor, counts: torch.Tensor) -> torch.Tensor:
        """What `fill_stage` would return if every page is in a frame."""
        return self._places(pages, counts, staged=False)

    def fill_stage(
        self,
        layer: int,
        pages: torch.Tensor,  # [blocks, kv_heads, n] int32 page ids
        counts: torch.Tensor,  # [blocks, kv_heads] int32, number of pages
    ) -> torch.Tensor:
        """Copy pages that are not in frames into the stage. Returns the place of each page,
        [blocks, kv_heads, n]: page p of the pool as p, page s of the stage as -1 - s.

        The stage must have room for all distinct pages of the kv head that reads the most.
        """
        from cairn.kernels.stage import claim_missing
        from cairn.kernels.swap_in import copy_missed

        claim_missing(self._tables, pages, counts, self.frame_of)
        host, staged = self._host.part(layer), self._tables.staged
        copy_missed(staged, host, self.stage, 0, threads=self._threads)
        return self._places(pages, counts, staged=True)

    def _places(self, pages: torch.Tensor, counts: torch.Tensor, *, staged: bool) -> torch.Tensor:
        from cairn.kernels.stage import tell_places

        total = self._scratch.totals[3:]
        return tell_places(self._tables, pages, counts, self.frame_of, total, staged=staged)
