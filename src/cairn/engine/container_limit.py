"""What control groups leave a process of memory: its own, and those around it."""

from __future__ import annotations

from pathlib import Path

_UNLIMITED = 2**60  # version 1 says so with a number


def memory_left(root: Path = Path("/")) -> int | None:
    """Bytes until the tightest limit is reached; None if there is none."""
    groups = root / "sys/fs/cgroup"
    left: list[int] = []
    for line in _read(root / "proc/self/cgroup").splitlines():
        _, controllers, path = line.split(":", 2)
        own = Path(path.lstrip("/"))
        for place in (own, *own.parents):
            if not controllers:
                left += _left(groups / place, "memory.max", "memory.current", "inactive_file")
            elif "memory" in controllers.split(","):
                names = ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")
                left += _left(groups / "memory" / place, *names)
    return min(left, default=None)


def _left(group: Path, limit: str, used: str, reclaimable: str) -> list[int]:
    most = _read(group / limit).strip()
    if not most.isdecimal() or int(most) >= _UNLIMITED:
        return []
    stat = dict(line.split() for line in _read(group / "memory.stat").splitlines())
    # File cache is given back when it is needed.
    taken = int(_read(group / used) or 0) - int(stat.get(reclaimable, 0))
    return [max(0, int(most) - taken)]


def _read(path: Path) -> str:
    """Empty if it is not there: inside a container parents are out of sight."""
    return path.read_text() if path.is_file() else ""
