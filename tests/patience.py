"""How tests wait: until something is so, however slow the machine is."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path

PATIENCE = 600.0  # seconds after which something is taken for stuck; no machine is that slow


def tries() -> Iterator[None]:
    """Turns of a loop that asks until something is so; they end when it is taken for stuck."""
    deadline = time.monotonic() + PATIENCE
    while time.monotonic() < deadline:
        yield
        time.sleep(0.02)


def wait_for_end(pid: int) -> None:
    """Until there is no such process, or one that only waits to be counted."""
    for _ in tries():
        try:
            state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
        except (FileNotFoundError, ProcessLookupError):
            return
        if state == "Z":
            return
    raise AssertionError(f"process {pid} is still there")
