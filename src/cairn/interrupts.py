"""Ctrl-C at moments when the work under way can be left."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType


@contextmanager
def interrupts_held_back() -> Iterator[None]:
    """Ctrl-C takes effect at the end; a second one at once."""
    handler = None
    if threading.current_thread() is threading.main_thread():
        handler = signal.getsignal(signal.SIGINT)
    if not callable(handler):
        yield
        return
    came: list[FrameType | None] = []

    def hold_back(number: int, frame: FrameType | None) -> None:
        came.append(frame)
        if len(came) > 1:
            handler(number, frame)

    signal.signal(signal.SIGINT, hold_back)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, handler)
        if len(came) == 1:
            handler(signal.SIGINT, came[0])
