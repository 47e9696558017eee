"""Memory that this process may still use under the limits of its control groups (cgroups)."""

from __future__ import annotations

from pathlib import Path

_UNLIMITED = 2**60  # cgroup v1 writes a huge number for "no limit"


def memory_left(root: Path = Path("/")) -> int | None:
    """Bytes left until the tightest limit of the group and its parents; None without a limit."""
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
    # The kernel reclaims file cache when memory is needed.
    taken = int(_read(group / used) or 0) - int(stat.get(reclaimable, 0))
    return [max(0, int(most) - taken)]


def _read(path: Path) -> str:
    """The file's text, empty if there is no file: a container does not see parent groups."""
    return path.read_text() if path.is_file() else ""
