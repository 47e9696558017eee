"""Copies complete pages to host memory: on the host, or on a CUDA stream."""

from __future__ import annotations

import concurrent.futures
import logging
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor

import torch

from cairn.memory.copies import Transfer

_log = logging.getLogger("cairn.memory")

Copy = Callable[[Sequence[Transfer]], None]


class HostMover:
    """Copies on the host: synchronously, or in a separate thread.

    The thread need not wait for anything: frames are not written again before their copy is done,
    and on a CPU a launched step has already run.
    """

    def __init__(self, copy: Copy, *, asynchronous: bool) -> None:
        self._copy = copy
        self._thread: ThreadPoolExecutor | None = None
        if asynchronous:
            self._thread = ThreadPoolExecutor(1, thread_name_prefix="cairn-backup")
        self._moving: dict[Future[None], Sequence[Transfer]] = {}
        self._done: list[Transfer] = []

    def back_up(self, transfers: Sequence[Transfer]) -> None:
        if self._thread is not None:
            self._moving[self._thread.submit(self._copy, transfers)] = transfers
            return
        self._copy(transfers)
        self._done += transfers

    def poll(self) -> list[Transfer]:
        """Completed copies. Copies that failed in the thread are logged and tried again."""
        done, self._done = self._done, []
        for future in [future for future in self._moving if future.done()]:
            transfers = self._moving.pop(future)
            error = future.exception()
            if error is None:
                done += transfers
            else:
                _log.error("pages could not be copied to host memory: %r", error)
                self.back_up(transfers)
        return done

    def wait(self) -> list[Transfer]:
        concurrent.futures.wait(self._moving, return_when=concurrent.futures.FIRST_COMPLETED)
        return self.poll()

    def close(self) -> None:
        if self._thread is not None:
            self._thread.shutdown(wait=True)


class StreamMover:
    """Copies on the device, on a separate stream or between steps on their stream.

    A copy runs after every step launched before it. No step waits for it: its frames and pages are
    held until its event is complete, and steps that reuse them are launched later.
    """

    def __init__(self, copy: Copy, device: torch.device, *, own_stream: bool) -> None:
        self._copy = copy
        self._device = device
        self._own: torch.cuda.Stream | None = None
        if own_stream:
            self._own = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        # One stream, so copies end in order.
        self._moving: deque[tuple[Sequence[Transfer], torch.cuda.Event]] = deque()

    def back_up(self, transfers: Sequence[Transfer]) -> None:
        steps = torch.cuda.current_stream(self._device)
        stream = steps if self._own is None else self._own
        if stream is not steps:
            stream.wait_stream(steps)
        # Temporary tensors of the copy belong to this stream, so they are reused only after it.
        with torch.cuda.stream(stream):
            self._copy(transfers)
            done = torch.cuda.Event()  # type: ignore[no-untyped-call]
            done.record(stream)
        self._moving.append((transfers, done))

    def poll(self) -> list[Transfer]:
        done: list[Transfer] = []
        while self._moving and self._moving[0][1].query():  # type: ignore[no-untyped-call]
            done += self._moving.popleft()[0]
        return done

    def wait(self) -> list[Transfer]:
        if self._moving:
            self._moving[0][1].synchronize()
        return self.poll()

    def close(self) -> None:
        torch.cuda.synchronize(self._device)
