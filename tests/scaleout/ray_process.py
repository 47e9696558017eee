"""The Ray Serve application as a process of its own, with two replicas of a tiny model."""

from __future__ import annotations

import os
import secrets
import subprocess
import sys
import time
from pathlib import Path
from typing import Self

import httpx

from tests.scaleout.router_process import free_port

HOST = """
import sys, ray
from ray import serve
from cairn.ray.app import build
model, port, log = sys.argv[1:]
ray.init(num_cpus=4, include_dashboard=False)
serve.start(http_options={"host": "127.0.0.1", "port": int(port)})
options = {"model": model, "replicas": 2, "device": "cpu", "page_size": 16, "kv_cache_gib": 0.25,
           "health_period": 1, "max_restarts": 0, "max_body_mib": 1, "request_log": log}
serve.run(build(options), name="cairn", route_prefix="/")
print("ready", flush=True)
sys.stdin.read()
serve.shutdown()
ray.shutdown()
"""


class RayProcess:
    def __init__(self, model: Path, folder: Path) -> None:
        self.model = model.name
        self.log = folder / "requests.jsonl"
        port = free_port()
        self.url = f"http://127.0.0.1:{port}"
        environment = {
            **os.environ,
            "OMP_NUM_THREADS": "1",
            "RAY_USAGE_STATS_ENABLED": "0",
            "RAY_AUTH_TOKEN": secrets.token_hex(32),  # else Ray writes one to the home folder
        }
        errors = folder / "ray.log"
        with errors.open("w") as output:
            self._process = subprocess.Popen(
                [sys.executable, "-c", HOST, str(model), str(port), str(self.log)],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=output,
                text=True,
                env=environment,
            )
        assert self._process.stdout is not None
        if not any(line == "ready\n" for line in self._process.stdout):
            self.stop()
            raise RuntimeError(f"Ray did not start:\n{errors.read_text()[-4000:]}")

    def replicas(self) -> set[str]:
        """Names of those that answer: idle ones take turns."""
        asked = [httpx.get(f"{self.url}/health", timeout=30) for _ in range(4)]
        return {answer.headers["x-cairn-replica"] for answer in asked if answer.status_code == 200}

    def wait_for_new_replicas(self, gone: str, seconds: float = 90) -> set[str]:
        """Until there are two again, without `gone`."""
        deadline = time.monotonic() + seconds
        while time.monotonic() < deadline:
            found = self.replicas()
            if len(found) == 2 and gone not in found:
                return found
            time.sleep(0.5)
        raise AssertionError(f"{gone} was not replaced: {found}")

    def replica_pids(self) -> list[int]:
        return [pid for pid in self._descendants() if "ServeReplica:cairn:Replica" in command(pid)]

    def engine_pid(self, replica: int) -> int:
        (engine,) = (pid for pid in children(replica) if "spawn_main" in command(pid))
        return engine

    def _descendants(self) -> list[int]:
        found, waiting = [], [self._process.pid]
        while waiting:
            below = children(waiting.pop())
            found += below
            waiting += below
        return found

    def stop(self) -> None:
        assert self._process.stdin is not None and self._process.stdout is not None
        self._process.stdin.close()
        try:
            self._process.wait(60)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._process.stdout.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()


def children(pid: int) -> list[int]:
    """Of any of its threads."""
    found: list[int] = []
    for tasks in Path(f"/proc/{pid}/task").glob("*/children"):
        found += map(int, tasks.read_text().split())
    return found


def command(pid: int) -> str:
    return Path(f"/proc/{pid}/cmdline").read_bytes().decode(errors="replace")
