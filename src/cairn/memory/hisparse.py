"""Makes selected pages readable on the device, between selection and attention.

A selected slice is in one of three places: in a frame, if the page is resident; in the layer's hot
cache; or only in host memory, from where it is copied into the hot cache. Hot slots follow the
frames in the same tensor, so that one page number names either.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch

from cairn.memory.copies import CopyEdits, Transfer
from cairn.memory.device_swap import DeviceSwap, SwapShape
from cairn.memory.hot_cache import HotCache
from cairn.memory.kv_pool import HostPool, KVPool
from cairn.memory.layout import CachePart
from cairn.memory.movers import HostMover, StreamMover
from cairn.memory.prompt_stage import PromptStage


@dataclass(slots=True)
class TierStats:
    """Totals since the engine started. Reads count slices, one per (layer, kv head, page)."""

    resident: int = 0  # reads of pages that were in a frame
    hits: int = 0  # reads of slices that were in the hot cache
    misses: int = 0  # slices that had to be copied in
    bytes_in: int = 0  # host to device: misses, pages of prompts and fetched pages
    bytes_out: int = 0  # device to host: backups
    stall_seconds: float = 0.0  # time that the engine waited for copies


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
    ) -> None:
        """`pool` has a null page, then `num_frames` frames, then `hot_slots` hot slots.

        Tables of layer group `page_group` name pages of `host`. `longest` is the number of pages of
        the longest request if prompts are read densely, else None.
        """
        self._pool = pool
        self.page_group = page_group
        self._host = host
        self._first_hot = num_frames + 1
        self._device = device = pool.device
        self.num_pages = host.num_pages
        heads = host.layout.heads
        self._slice_bytes = host.page_bytes // (len(host.layers) * heads)
        self._frame_of = torch.zeros(self.num_pages + 1, dtype=torch.int32, device=device)
        self.frames = np.zeros(self.num_pages + 1, dtype=np.int32)
        """Frame of each page [pages] on the host, for the step that is being launched; 0 for none.
        """
        self._hot = {layer: HotCache(heads, hot_slots, device) for layer in host.layers}
        self.swap: DeviceSwap | None = None
        """Replaces `swap_in_selected_pages` if attention runs by kernels."""
        if kernels is not None:
            self.swap = DeviceSwap(
                pool,
                host,
                self._frame_of,
                first_hot=self._first_hot,
                hot_slots=hot_slots,
                shape=kernels,
            )
        self.stage: PromptStage | None = None
        """The stage for prompts that are read densely; None if there are none."""
        if longest is not None:
            buffers = () if self.swap is None else self.swap.stages
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
            if self.swap is not None:
                self.swap.fetch(pages, frames)
            else:
                for layer in self._host.layers:
                    for _, host, device in self._tensors(layer):
                        device[frames] = host[pages.cpu()].to(device.device)
            self._stats.bytes_in += len(pages) * self._host.page_bytes
            self._stats.stall_seconds += time.perf_counter() - begin

    # -- between selection and attention ------------------------------------------------------

    def parts(
        self, layer: int, pages: torch.Tensor, generations: torch.Tensor, most_rows: int
    ) -> Iterator[slice]:
        """Split rows into runs whose selected pages [rows, kv_heads, k] fit into the hot cache."""
        wanted = self._wanted(pages)
        hot = self._hot[layer]
        begin = 0
        while begin < len(pages):
            count = min(most_rows, len(pages) - begin)
            part = slice(begin, begin + count)
            while (
                count * pages.shape[2] > hot.slots
                and count > 1
                and hot.distinct(pages[part], generations[part], wanted[part]) > hot.slots
            ):
                count = (count + 1) // 2
                part = slice(begin, begin + count)
            yield part
            begin += count

    def swap_in_selected_pages(
        self, layer: int, pages: torch.Tensor, generations: torch.Tensor
    ) -> torch.Tensor:
        """The page of the pool that holds each selected page, [rows, kv_heads, k].

        The result is valid until the next call. It is the null page where `pages` is -1.
        """
        frames = self._frame_of[pages.clamp(min=0)].long()
        wanted = self._wanted(pages)
        if not wanted.any():
            self._stats.resident += int((pages >= 0).sum())
            return frames.masked_fill(pages < 0, 0)
        try:
            plan = self._hot[layer].plan(pages, generations, wanted)
            begin = time.perf_counter()
            if len(plan.pages):
                self._copy_in(layer, plan.heads, plan.pages, plan.into)
            self._stats.stall_seconds += time.perf_counter() - begin
        except BaseException:  # Ctrl-C too: tags must not name pages that were not copied
            self._hot[layer].forget()
            raise
        finally:
            if self.swap is not None:  # a traced row in torch overwrote the kernels' slots
                self._hot[layer].forget()
                self.swap.forget(layer)
        self._stats.resident += int(((pages >= 0) & ~wanted).sum())
        self._stats.hits += plan.hits
        self._stats.misses += len(plan.pages)
        found = torch.where(wanted, plan.slots + self._first_hot, frames)
        return found.masked_fill(pages < 0, 0)

    def _wanted(self, pages: torch.Tensor) -> torch.Tensor:
        """Which of the pages are not in a frame, as a mask."""
        return (pages >= 0) & (self._frame_of[pages.clamp(min=0)] == 0)

    def _copy_in(
        self, layer: int, heads: torch.Tensor, pages: torch.Tensor, slots: torch.Tensor
    ) -> None:
        for part, host, device in self._tensors(layer):
            slices = part.by_head(host)[pages.cpu(), :, heads.cpu()]
            part.by_head(device)[slots + self._first_hot, :, heads] = slices.to(device.device)
        self._stats.bytes_in += len(pages) * self._slice_bytes

    def _tensors(self, layer: int) -> Iterator[tuple[CachePart, torch.Tensor, torch.Tensor]]:
        """The parts of a layer that may leave the device, with their host and device tensors."""
        for part in self._host.layout.parts:
            yield part, self._host.part(layer, part.name), self._pool.part(layer, part.name)

    def rehearse(self) -> None:
        """Copy the null page out and in, so that warm-up compiles the copy kernels."""
        if self.swap is not None:
            null, _ = self._index([Transfer(0, 0)])
            self.swap.back_up(null, null)
            self.swap.fetch(null, null)
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
        if self.swap is not None:
            self.swap.back_up(pages, frames)
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
