from __future__ import annotations

from pathlib import Path

from cairn.engine.container_limit import memory_left


def write(root: Path, files: dict[str, str]) -> None:
    for name, text in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)


def test_no_limit(tmp_path: Path) -> None:
    assert memory_left(tmp_path) is None
    write(tmp_path, {"proc/self/cgroup": "0::/\n", "sys/fs/cgroup/memory.max": "max\n"})
    assert memory_left(tmp_path) is None


def test_version_two_the_tightest_group_around_counts(tmp_path: Path) -> None:
    group = "sys/fs/cgroup/outer/inner"
    write(
        tmp_path,
        {
            "proc/self/cgroup": "0::/outer/inner\n",
            f"{group}/memory.max": "max\n",
            "sys/fs/cgroup/outer/memory.max": "1000\n",
            "sys/fs/cgroup/outer/memory.current": "700\n",
            "sys/fs/cgroup/outer/memory.stat": "anon 5\ninactive_file 100\n",
        },
    )
    assert memory_left(tmp_path) == 400
    write(tmp_path, {f"{group}/memory.max": "300\n", f"{group}/memory.current": "50\n"})
    assert memory_left(tmp_path) == 250


def test_version_one(tmp_path: Path) -> None:
    group = "sys/fs/cgroup/memory/docker/x"
    write(
        tmp_path,
        {
            "proc/self/cgroup": "5:cpu,cpuacct:/docker/x\n4:memory:/docker/x\n",
            f"{group}/memory.limit_in_bytes": "9223372036854771712\n",
            "sys/fs/cgroup/memory/memory.limit_in_bytes": "2000\n",
            "sys/fs/cgroup/memory/memory.usage_in_bytes": "2500\n",
            "sys/fs/cgroup/memory/memory.stat": "total_inactive_file 200\n",
        },
    )
    assert memory_left(tmp_path) == 0
    write(tmp_path, {"sys/fs/cgroup/memory/memory.usage_in_bytes": "1500\n"})
    assert memory_left(tmp_path) == 700
