"""The stage for prompts with a host tier: holds all pages of one layer.

A prompt chunk reads every page of its sequence, and most of them may be only in host memory. Layer
by layer they are gathered in a stage with room for the longest request, and a backend attends to
the stage as if it were the pool. CUDA may have two stages: while attention reads one, a separate
stream copies pages of the next layer into the other. With one stage, that stream copies while the
next layer does its other work. Pages that are on the device are copied just before attention, since
the step writes to some of them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
import torch

from cairn.kernels.layer_memory import LayerMemory
from cairn.memory.kv_pool import HostPool, KVPool
from cairn.memory.layout import KV

_MOST_RUNS = 256
"""Up to this many runs of consecutive pages are copied one by one by the copy engine, which does
not slow attention down. Each takes the host a few microseconds, so more runs go to one kernel."""
_PROGRAMS, _THREADS = 8, 1024
"""Size of that kernel: enough to saturate the link; attention keeps the other SMs."""


class _Run(NamedTuple):
    place: int  # of the first page in the stage
    first: int  # id of the first page
    pages: int


@dataclass(frozen=True, slots=True)
class StagedPages:
    """Pages that are staged together. Those that are only in host memory come first."""

    away: np.ndarray  # [n] int64, pages only in host memory, ascending
    runs: tuple[_Run, ...]
    """The same pages as runs of consecutive ids."""
    listed: tuple[torch.Tensor, torch.Tensor] | None
    """Their ids and places as device tensors, if there are too many runs."""
    frames: torch.Tensor  # [m] int32, frames of the other pages

    def __len__(self) -> int:
        return len(self.away) + len(self.frames)


@dataclass(slots=True)
class StagedStep:
    """What a step copies into the stage, in the order of its reads."""

    fills: Sequence[tuple[int, StagedPages]]
    """Layers and their pages."""
    ahead: bool
    """Copy pages on a separate stream, as soon as there is a free buffer."""
    read: int = 0
    ready: list[torch.cuda.Event] = field(default_factory=list)
    """Events after the copies of each fill that was started."""


class PromptStage(KVPool):
    """Replaces the pool of a dense backend. A layer can be read between `fill` and `release`."""

    def __init__(
        self,
        pool: KVPool,
        host: HostPool,
        frames: np.ndarray,  # [pages] current frame of each page, 0 for none
        room: int,
        buffers: Sequence[torch.Tensor] = (),
    ) -> None:
        """One or two `buffers` of `room` pages; without them each fill allocates its own tensor."""
        self.page_size = pool.page_size
        self.device = device = pool.device
        self.group_of = pool.group_of
        self.scales = pool.scales
        self._staged: dict[int, torch.Tensor] = {}
        self.room = room
        self.bytes_in = 0
        """Bytes copied from host memory so far."""
        (kept,) = host.layout.parts
        self._name = kept.name
        self._pool = pool
        self._host = host
        self._frames = frames
        self._buffers = buffers
        if buffers:  # kernels copy into them
            self._sources = {
                layer: LayerMemory.of([host.part(layer, self._name)], device)
                for layer in host.layers
            }
            self._targets = [LayerMemory.of([own], device) for own in buffers]
        self._stream: torch.cuda.Stream | None = None
        if self.device.type == "cuda":
            self._stream = torch.cuda.Stream(self.device)  # type: ignore[no-untyped-call]

    def part(self, layer: int, name: str = KV) -> torch.Tensor:
        assert name == self._name, f"{self._name} is staged, and nothing else"
        return self._staged[layer]

    def clear(self, group: int, pages: torch.Tensor) -> None:
        """Does nothing: staged pages are copies, and their originals were cleared if necessary."""

    # -- once per step ------------------------------------------------------------------------

    def arrange(self, pages: np.ndarray) -> tuple[StagedPages, np.ndarray]:
        """How to stage pages [n], whose ids may repeat, and the place of each in the stage [n]."""
        distinct, which = np.unique(pages.astype(np.int64), return_inverse=True)
        frames = self._frames[distinct]
        is_away = frames == 0
        away = distinct[is_away]
        places = np.where(is_away, np.cumsum(is_away), len(away) + np.cumsum(~is_away)) - 1
        runs, listed = consecutive(away), None
        if self._buffers and len(runs) > _MOST_RUNS:
            into = torch.arange(len(away), dtype=torch.int32, device=self.device)
            listed = self._send(away), into
        return StagedPages(away, runs, listed, self._send(frames[~is_away])), places[which]

    def step(self, fills: Sequence[tuple[int, StagedPages]], *, ahead: bool) -> StagedStep:
        return StagedStep(fills, ahead and self._stream is not None)

    def rehearse(self) -> None:
        """Copy the null page by kernel, so that warm-up compiles the kernel."""
        if self._buffers:
            null = self._send(np.zeros(1, dtype=np.int64))
            self._copy_listed(self._host.layers[0], 0, null, null)

    def begin(self, step: StagedStep) -> None:
        if step.ahead:
            for index in range(min(len(self._buffers), len(step.fills))):
                self._start(step, index)

    def abandon(self) -> None:
        """After a failed step, free the layer that it was reading, and make later work wait for the
        copies that it started."""
        self._staged.clear()
        if self._stream is not None:
            torch.cuda.current_stream(self.device).wait_stream(self._stream)

    # -- once per fill ------------------------------------------------------------------------

    def fill(self, step: StagedStep) -> None:
        """Make the pages of the next fill readable. The step's new keys and values of that layer
        must be in the pool already."""
        layer, staged = step.fills[step.read]
        buffer = self._buffer(step.read, staged)
        if step.ahead:
            torch.cuda.current_stream(self.device).wait_event(step.ready[step.read])
        else:
            self._copy_in(step, step.read, buffer)
        rest = buffer[len(staged.away) : len(staged)]
        torch.index_select(
            _wide(self._pool.part(layer, self._name)), 0, staged.frames, out=_wide(rest)
        )
        self._staged[layer] = buffer

    def release(self, step: StagedStep) -> None:
        """Free the buffer for a later fill; attention over this fill was launched."""
        layer, _ = step.fills[step.read]
        del self._staged[layer]
        following = step.read + len(self._buffers)
        step.read += 1
        if step.ahead and following < len(step.fills):
            self._start(step, following)

    def _start(self, step: StagedStep, index: int) -> None:
        """Copy a fill's pages on the side stream, after the work that still reads its buffer."""
        assert self._stream is not None
        _, staged = step.fills[index]
        self._stream.wait_stream(torch.cuda.current_stream(self.device))
        with torch.cuda.stream(self._stream):
            self._copy_in(step, index, self._buffer(index, staged))
            ready = torch.cuda.Event()  # type: ignore[no-untyped-call]
            ready.record(self._stream)
        step.ready.append(ready)

    def _copy_in(self, step: StagedStep, index: int, buffer: torch.Tensor) -> None:
        """Copy the pages that are only in host memory."""
        layer, staged = step.fills[index]
        host = self._host.part(layer, self._name)
        self.bytes_in += len(staged.away) * host[0].nbytes
        if staged.listed is not None:
            self._copy_listed(layer, index, *staged.listed)
            return
        for place, first, pages in staged.runs:
            into = buffer[place : place + pages]
            into.copy_(host[first : first + pages], non_blocking=True)

    def _copy_listed(
        self, layer: int, index: int, pages: torch.Tensor, places: torch.Tensor
    ) -> None:
        from cairn.kernels.swap_in import copy_pages

        source, target = self._sources[layer], self._targets[index % len(self._targets)]
        copy_pages(source, target, pages, places, programs=_PROGRAMS, threads=_THREADS)

    def _buffer(self, index: int, staged: StagedPages) -> torch.Tensor:
        if self._buffers:
            return self._buffers[index % len(self._buffers)]
        like = self._pool.part(self._host.layers[0], self._name)
        size = (len(staged), *like.shape[1:])
        return torch.empty(size, dtype=like.dtype, device=like.device)

    def _send(self, numbers: np.ndarray) -> torch.Tensor:
        return torch.from_numpy(numbers.astype(np.int32)).to(self.device, non_blocking=True)


def consecutive(pages: np.ndarray) -> tuple[_Run, ...]:
    """Split ascending ids into runs of consecutive ones."""
    if not len(pages):
        return ()
    starts = np.flatnonzero(np.diff(pages, prepend=pages[0] - 2) != 1)
    counts = np.diff(starts, append=len(pages))
    rows = zip(starts.tolist(), pages[starts].tolist(), counts.tolist(), strict=True)
    return tuple(_Run(*row) for row in rows)


def _wide(tensor: torch.Tensor) -> torch.Tensor:
    """The same bytes as int64 if possible, which copy kernels move faster."""
    whole = tensor.shape[-1] * tensor.element_size() % 8 == 0
    return tensor.view(torch.int64) if tensor.is_cuda and whole else tensor
