"""sglang-router or smg as a process, in front of servers."""

from __future__ import annotations

import socket
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Self

import httpx

_START_SECONDS = 60
MODULES = {
    "sglang_router": ("sglang_router.launch_router",),
    "smg": ("smg", "launch"),
}


class RouterProcess:
    def __init__(
        self, kind: str, workers: Sequence[str], log: Path, *flags: str, key: str = ""
    ) -> None:
        port, metrics = free_port(), free_port()
        self.url = f"http://127.0.0.1:{port}"
        self._log = log
        self.headers = {"authorization": f"Bearer {key}"} if key else {}
        if key:
            flags = (*flags, f"--api-key={key}")  # asked of clients, and told to the workers
        with log.open("w") as output:
            self._process = subprocess.Popen(
                [
                    *(sys.executable, "-m", *MODULES[kind], "--worker-urls", *workers),
                    *("--host=127.0.0.1", f"--port={port}", f"--prometheus-port={metrics}"),
                    *flags,
                ],
                stdout=output,
                stderr=output,
            )
        try:
            self._wait_for(len(workers))
        except BaseException:
            self.stop()
            raise

    def _wait_for(self, workers: int) -> None:
        deadline = time.monotonic() + _START_SECONDS
        while time.monotonic() < deadline:
            if self._process.poll() is not None:
                break
            try:
                answer = httpx.get(f"{self.url}/workers", headers=self.headers, timeout=5)
                found = answer.json()["workers"]
            except httpx.TransportError:
                found = []
            if sum(worker["is_healthy"] for worker in found) == workers:
                self.workers = found
                return
            time.sleep(0.2)
        raise RuntimeError(f"the router did not start:\n{self._log.read_text()[-3000:]}")

    def stop(self) -> None:
        self._process.kill()
        self._process.wait()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()


def free_port() -> int:
    with socket.socket() as listening:
        listening.bind(("127.0.0.1", 0))
        port: int = listening.getsockname()[1]
        return port
