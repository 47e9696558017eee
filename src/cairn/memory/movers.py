"""Who carries complete pages to host memory: at once, or a thread beside the engine."""

from __future__ import annotations

import concurrent.futures
import logging
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor

from cairn.memory.copies import Transfer

_log = logging.getLogger("cairn.memory")

Copy = Callable[[Sequence[Transfer]], None]


class InlineMover:
    """Copies while the engine waits."""

    def __init__(self, copy: Copy) -> None:
        self._copy = copy
        self._done: list[Transfer] = []

    def back_up(self, transfers: Sequence[Transfer]) -> None:
        self._copy(transfers)
        self._done += transfers

    def poll(self) -> list[Transfer]:
        done, self._done = self._done, []
        return done

    def wait(self) -> list[Transfer]:
        return self.poll()

    def close(self) -> None:
        pass


class ThreadMover:
    """Copies in a thread of its own. Frames are not written again before it is done with them,
    and on a CPU a launched step has run, so that there is nothing else to wait for."""

    def __init__(self, copy: Copy) -> None:
        self._copy = copy
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="cairn-backup")
        self._moving: dict[Future[None], Sequence[Transfer]] = {}

    def back_up(self, transfers: Sequence[Transfer]) -> None:
        self._moving[self._thread.submit(self._copy, transfers)] = transfers

    def poll(self) -> list[Transfer]:
        """Copies that failed are tried again, and the log says why."""
        done: list[Transfer] = []
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
        self._thread.shutdown(wait=True)
