"""Makes selected pages, or selected rows, readable on the device, between selection and attention.

A selected slice is in one of three places: in a frame, if the page is resident; in the layer's hot
cache; or only in host memory, from where it is copied into the hot cache. Hot slots follow the
frames in the same tensor, so that one number names either. Whole pages are owned, backed up and
freed whatever a slice is (see `hot_cache`).

Layers that read what another layer selected have that layer's slots: one plan serves all of them,
and each copies the same slices of its own.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch

from cairn.memory.copies import CopyEdits, Transfer
from cairn.memory.device_swap import DeviceSwap, PageCopier, SwapShape
from cairn.memory.hot_cache import HotCache, SwapPlan
from cairn.memory.kv_pool import HostPool, KVPool
from cairn.memory.layout import CachePart
from cairn.memory.movers import HostMover, StreamMover
from cairn.memory.prompt_stage import PromptStage
from cairn.memory.row_swap import RowSwap


@dataclass(slots=True)
class TierStats:
    """Totals since the engine started. Reads count slices: one per (layer, kv head, page), or per
    (layer, row) if queries select rows."""

    resident: int = 0  # reads of slices whose page was in a frame
    hits: int = 0  # reads of slices that were in the hot cache
    misses: int = 0  # slices that had to be copied in
    bytes_in: int = 0  # host to device: misses, pages of prompts and fetched pages
    bytes_out: int = 0  # device to host: backups
    stall_seconds: float = 0.0  # time that the engine waited for copies


@dataclass(frozen=True, slots=True)
class SwappedIn:
    """Where slices are that a layer selected."""

    places: torch.Tensor
    """[rows, kv_heads, k] slice of the pool, valid until the next slices are swapped in for this
    layer; the first slice of the null page where none was selected."""
    plan: SwapPlan | None  # of the slices that were not in frames; None if all were
    resident: int  # slices that were


class HiSparseCoordinator:
    def __init__(
        self,
        pool: KVPool,
        host: HostPool,
        *,
        num_frames: int,
        hot_slots: int,
        asynchronous: bool,
        kernels: SwapShape | None = None,
        page_group: int = 0,
        longest: int | None = None,
        rows: bool = False,
        selectors: Mapping[int, int] | None = None,
    ) -> None:
        """`pool` has a null page, then `num_frames` frames, then `hot_slots` hot slots.

        Tables of layer group `page_group` name pages of `host`. `longest` is the number of pages of
        the longest request if prompts are read from a stage, else None. Slots hold `rows`, or
        pages. `selectors` names, for layers that do not select for themselves, the layer whose
        selection they read.
        """
        self._pool = pool
        self.page_group = page_group
        self._host = host
        self._per_page = pool.page_size if rows else 1  # slices of a page, by one kv head
        self._first_hot = (num_frames + 1) * self._per_page
        self._device = device = pool.device
        self.num_pages = host.num_pages
        heads = host.layout.heads
        self._slice_bytes = host.page_bytes // (len(host.layers) * heads * self._per_page)
        self._frame_of = torch.zeros(self.num_pages + 1, dtype=torch.int32, device=device)
        self.frames = np.zeros(self.num_pages + 1, dtype=np.int32)
        """Frame of each page [pages] on the host, for the step that is being launched; 0 for none.
        """
        self._hot: dict[int, HotCache] = {}  # by layer; one for all that share a selection
        for layer in host.layers:
            selector = (selectors or {}).get(layer, layer)
            own = HotCache(heads, hot_slots, device) if selector == layer else self._hot[selector]
            self._hot[layer] = own
        self.swap: DeviceSwap | None = None
        """Replaces `swap_in` if kernels attend to selected pages."""
        self.row_swap: RowSwap | None = None
        """Replaces `swap_in` if kernels attend to selected rows."""
        if kernels is not None and rows:
            self.row_swap = RowSwap(
                pool, host, self._frame_of, self._hot, first_hot=self._first_hot, shape=kernels
            )
        elif kernels is not None:
            self.swap = DeviceSwap(
                pool,
                host,
                self._frame_of,
                first_hot=self._first_hot,
                hot_slots=hot_slots,
                shape=kernels,
            )
        self.copier: PageCopier | None = self.row_swap or self.swap
        """Copies whole pages if attention runs by kernels."""
        self.stage: PromptStage | None = None
        """The stage for prompts; None if no prompt is read from one."""
        if longest is not None:
            buffers = () if self.copier is None else self.copier.stages
            self.stage = PromptStage(pool, host, self.frames, longest, buffers)
        self._mover: HostMover | StreamMover
        if device.type == "cuda":
            self._mover = StreamMover(self._copy_out, device, own_stream=asynchronous)
        else:
            self._mover = HostMover(self._copy_out, asynchronous=asynchronous)
        self._stats = TierStats()

    @property
    def stats(self) -> TierStats:
        """Totals of all launched steps. Waits for the device if kernels count."""
        stats = replace(self._stats)
        if self.swap is not None:
            resident, hits, misses, staged = self.swap.totals
            stats.resident += resident
            stats.hits += hits
            stats.misses += misses
            stats.bytes_in += (misses + staged) * self._slice_bytes
        if self.row_swap is not None:
            resident, hits, misses = self.row_swap.totals
            stats.resident += resident
            stats.hits += hits
            stats.misses += misses
            stats.bytes_in += misses * self._slice_bytes
        if self.stage is not None:
            stats.bytes_in += self.stage.bytes_in
        return stats

    # -- at the head of a step ----------------------------------------------------------------

    def begin_step(self, edits: CopyEdits) -> None:
        """Record the new frames of pages, and fetch whole pages from the host."""
        if edits.frames:
            moved = np.array(edits.frames)
            self.frames[moved[:, 0]] = moved[:, 1]
            pages, frames = self._index(edits.frames)
            self._frame_of[pages] = frames.int()
        if edits.fetches:
            begin = time.perf_counter()
            pages, frames = self._index(edits.fetches)
            if self.copier is not None:
                self.copier.fetch(pages, frames)
            else:
                for layer in self._host.layers:
                    for _, host, device in self._tensors(layer):
                        device[frames] = host[pages.cpu()].to(device.device)
            self._stats.bytes_in += len(pages) * self._host.page_bytes
            self._stats.stall_seconds += time.perf_counter() - begin

    # -- between selection and attention ------------------------------------------------------

    def parts(
        self, layer: int, slices: torch.Tensor, generations: torch.Tensor, most_rows: int
    ) -> Iterator[slice]:
        """Split rows into runs whose selected slices [rows, kv_heads, k] fit into the hot cache."""
        wanted = self._frames(slices) < 0
        hot = self._hot[layer]
        begin = 0
        while begin < len(slices):
            count = min(most_rows, len(slices) - begin)
            part = slice(begin, begin + count)
            while (
                count * slices.shape[2] > hot.slots
                and count > 1
                and hot.distinct(slices[part], generations[part], wanted[part]) > hot.slots
            ):
                count = (count + 1) // 2
                part = slice(begin, begin + count)
            yield part
            begin += count

    def swap_in(self, layer: int, slices: torch.Tensor, generations: torch.Tensor) -> SwappedIn:
        """Make selected slices [rows, kv_heads, k] readable; -1 where none was selected.

        The number of a slice is the page id, or page id * page_size + offset for rows.
        """
        places = self._frames(slices)
        wanted = places < 0
        resident = int(((slices >= 0) & ~wanted).sum())
        swapped = SwappedIn(places, None, resident)
        try:
            if wanted.any():
                plan = self._hot[layer].plan(slices, generations, wanted)
                places = torch.where(wanted, plan.slots + self._first_hot, places)
                swapped = SwappedIn(places, plan, resident)
            self.swap_in_again(layer, swapped)
        except BaseException:  # Ctrl-C too: tags must not name slices that were not copied
            self._hot[layer].forget()
            raise
        return swapped

    def swap_in_again(self, layer: int, swapped: SwappedIn) -> None:
        """Make the same slices readable in a layer that shares the selection.

        All layers that share it must do so before the step ends; if one fails, call `forget`.
        """
        plan = swapped.plan
        self._stats.resident += swapped.resident
        if plan is None:
            return
        begin = time.perf_counter()
        try:
            if len(plan.slices):
                self._copy_in(layer, plan.heads, plan.slices, plan.into)
        finally:
            if self.swap is not None:  # a traced row in torch overwrote the kernels' slots
                self._hot[layer].forget()
                self.swap.forget(layer)
        self._stats.stall_seconds += time.perf_counter() - begin
        self._stats.hits += plan.hits
        self._stats.misses += len(plan.slices)

    def forget(self) -> None:
        """Empty the hot caches, because a step failed before all its layers had swapped in."""
        for hot in self._hot.values():
            hot.forget()
        if self.row_swap is not None:
            self.row_swap.forget()

    def read_resident(self, slices: int) -> None:
        """Count reads of slices in frames, which kernels did not look up."""
        self._stats.resident += slices

    def _frames(self, slices: torch.Tensor) -> torch.Tensor:
        """The place of each slice in a frame; -1 if its page has none, 0 if no slice is named."""
        pages = slices.clamp(min=0) // self._per_page
        frames = self._frame_of[pages].long()
        places = frames * self._per_page + slices % self._per_page
        return places.masked_fill(frames == 0, -1).masked_fill(slices < 0, 0)

    def _copy_in(
        self, layer: int, heads: torch.Tensor, slices: torch.Tensor, slots: torch.Tensor
    ) -> None:
        for part, host, device in self._tensors(layer):
            read = part.by_head(host, self._per_page)[slices.cpu(), :, heads.cpu()]
            into = part.by_head(device, self._per_page)
            into[slots + self._first_hot, :, heads] = read.to(device.device)
        self._stats.bytes_in += len(slices) * self._slice_bytes

    def _tensors(self, layer: int) -> Iterator[tuple[CachePart, torch.Tensor, torch.Tensor]]:
        """The parts of a layer that may leave the device, with their host and device tensors."""
        for part in self._host.layout.parts:
            yield part, self._host.part(layer, part.name), self._pool.part(layer, part.name)

    def rehearse(self) -> None:
        """Copy the null page out and in, so that warm-up compiles the copy kernels."""
        if self.copier is not None:
            null, _ = self._index([Transfer(0, 0)])
            self.copier.back_up(null, null)
            self.copier.fetch(null, null)
        if self.stage is not None:
            self.stage.rehearse()

    # -- to the host --------------------------------------------------------------------------

    def back_up(self, transfers: Sequence[Transfer]) -> None:
        begin = time.perf_counter()
        self._mover.back_up(transfers)
        self._stats.stall_seconds += time.perf_counter() - begin
        self._stats.bytes_out += len(transfers) * self._host.page_bytes

    def poll(self) -> list[Transfer]:
        return self._mover.poll()

    def wait(self) -> list[Transfer]:
        begin = time.perf_counter()
        done = self._mover.wait()
        self._stats.stall_seconds += time.perf_counter() - begin
        return done

    def _copy_out(self, transfers: Sequence[Transfer]) -> None:
        pages, frames = self._index(transfers)
        if self.copier is not None:
            self.copier.back_up(pages, frames)
            return
        with torch.inference_mode():
            for layer in self._host.layers:
                for _, host, device in self._tensors(layer):
                    host[pages.cpu()] = device[frames].cpu()

    def close(self) -> None:
        """Wait for copies in progress and free host memory."""
        self._mover.close()
        self._host.close()

    def _index(self, transfers: Sequence[Transfer]) -> tuple[torch.Tensor, torch.Tensor]:
        """Page and frame numbers as tensors on the device, sent without synchronizing."""
        index = torch.from_numpy(np.array(transfers, dtype=np.int64).T.copy())
        pages, frames = index.to(self._device, non_blocking=True)
        return pages, frames
