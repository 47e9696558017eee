"""Writes log lines in a thread, so that nobody waits for a full disk or an unread pipe.

Lines that find the queue full are dropped. A message that is repeated is written once a second.
"""

from __future__ import annotations

import logging
import queue
import sys
import threading
import time
from collections.abc import Callable
from typing import TextIO

_QUEUED = 10_000  # lines
_CLOSE_SECONDS = 2.0
_REPEAT_SECONDS = 1.0
_REMEMBERED = 1000  # messages
_LONGEST = 20_000  # characters of a line, enough for a traceback


class LineWriter:
    def __init__(self, file: TextIO) -> None:
        self._file = file
        self._lines: queue.Queue[str | None] = queue.Queue(_QUEUED)
        self._dropped = 0
        self._thread = threading.Thread(target=self._run, name="cairn-log", daemon=True)
        self._thread.start()

    def write(self, line: str) -> None:
        try:
            self._lines.put_nowait(line[:_LONGEST] + "\n")
        except queue.Full:
            self._dropped += 1

    def close(self) -> None:
        """Write what is queued, unless that takes long."""
        try:
            self._lines.put(None, timeout=_CLOSE_SECONDS)
        except queue.Full:
            return
        self._thread.join(_CLOSE_SECONDS)

    def _run(self) -> None:
        while (line := self._lines.get()) is not None:
            try:
                if self._dropped:
                    dropped, self._dropped = self._dropped, 0
                    self._file.write(f"cairn: {dropped} lines of the log are lost\n")
                self._file.write(line)
                if self._lines.empty():
                    self._file.flush()
            except OSError:  # a full disk: there is no place to say so
                self._dropped += 1


class LogHandler(logging.Handler):
    """For the logging module: messages go to a LineWriter."""

    def __init__(self, write: Callable[[str], None]) -> None:
        super().__init__()
        self.setFormatter(logging.Formatter("cairn: %(message)s"))
        self._write = write
        self._written: dict[str, tuple[float, int]] = {}  # when, and times it was left out since

    def emit(self, record: logging.LogRecord) -> None:
        message, now = record.getMessage()[:200], time.monotonic()
        when, left_out = self._written.get(message, (-_REPEAT_SECONDS, 0))
        if now - when < _REPEAT_SECONDS:
            self._written[message] = when, left_out + 1
            return
        if len(self._written) >= _REMEMBERED:
            self._written.clear()
        self._written[message] = now, 0
        self._write(self.format(record) + (f" ({left_out} times more)" if left_out else ""))


def start_logging() -> LineWriter:
    """Log to standard error, in a thread. The caller closes the result."""
    writer = LineWriter(sys.stderr)
    logging.basicConfig(level=logging.INFO, handlers=[LogHandler(writer.write)], force=True)
    return writer
