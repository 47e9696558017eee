"""`cairn serve` as a process, and the tiny model it serves."""

from __future__ import annotations

import json
import os
import re
import resource
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any, Self

import httpx

from tests.helpers import TINY_LLAMA, byte_tokenizer, write_model

_START_SECONDS = 90

COMMAND = (sys.executable, "-m", "cairn.cli.main", "serve", "--device=cpu")

TEMPLATE = (
    "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)


def write_chat_model(folder: Path, **config: Any) -> Path:
    """Bytes are tokens; random weights say random things, the same ones every time.

    A request that names no temperature is greedy: a sampled one may end early, on its own.
    """
    shape = {**TINY_LLAMA, "vocab_size": 256, "max_position_embeddings": 4096, "eos_token_id": 255}
    write_model(folder, {**shape, **config})
    byte_tokenizer().save(str(folder / "tokenizer.json"))
    (folder / "chat_template.jinja").write_text(TEMPLATE)
    (folder / "generation_config.json").write_text('{"temperature": 0}')
    return folder


def _limit(limits: Mapping[int, int]) -> None:
    for name, value in limits.items():
        resource.setrlimit(name, (value, value))


class ServerProcess:
    def __init__(
        self, model: Path, log: Path, *flags: str, limits: Mapping[int, int] | None = None
    ) -> None:
        """`limits` are those of the module `resource`."""
        self.log = log
        self.model = model.name
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1"}
        self._process = subprocess.Popen(
            [*COMMAND, f"--model={model}", "--port=0", f"--request-log={log}", *flags],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env=environment,
            preexec_fn=partial(_limit, limits) if limits else None,
        )
        self.errors: list[str] = []
        self._reader = threading.Thread(target=self._read_errors, daemon=True)
        self._reader.start()
        self.url = self._address()

    def _read_errors(self) -> None:
        assert self._process.stderr is not None
        for line in self._process.stderr:
            self.errors.append(line)

    def _address(self) -> str:
        """Printed once the model is loaded."""
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        found = re.search(r"http://[^/ ]+", line)
        if found is None:
            self._process.wait(10)
            self._reader.join(5)
            raise RuntimeError(f"the server did not start: {line}{''.join(self.errors)}")
        return found.group()

    @property
    def pid(self) -> int:
        return self._process.pid

    def engine_pid(self) -> int:
        """The child that holds the engine: the other one is multiprocessing's tracker."""
        children = Path(f"/proc/{self.pid}/task/{self.pid}/children").read_text().split()
        for child in map(int, children):
            command = Path(f"/proc/{child}/cmdline").read_bytes()
            if b"spawn_main" in command:
                return child
        raise RuntimeError("the server has no engine")

    def signal(self, number: signal.Signals) -> None:
        self._process.send_signal(number)

    def wait(self, seconds: float) -> int:
        return self._process.wait(seconds)

    def get(self, path: str) -> httpx.Response:
        return httpx.get(self.url + path, timeout=30)

    def token(self, text: str) -> str:
        """The id of a one-token text, as logit_bias wants it."""
        answer = httpx.post(f"{self.url}/tokenize", json={"prompt": text}, timeout=30).json()
        (token,) = answer["tokens"]
        return str(token)

    def stats(self) -> dict[str, Any]:
        body: dict[str, Any] = self.get("/stats").json()
        return body

    def wait_for_health(self, status: str, seconds: float = 60) -> dict[str, Any]:
        """Ask until the server says so."""
        deadline = time.monotonic() + seconds
        while time.monotonic() < deadline:
            body: dict[str, Any] = self.get("/health").json()
            if body["status"] == status:
                return body
            time.sleep(0.02)
        raise AssertionError(f"health did not become {status}: {body}")

    def wait_until_idle(self, seconds: float = 30) -> dict[str, Any]:
        """Ask until nothing is open, runs, waits or is owned; returns the engine's numbers.

        The engine reports four times a second: what it said first may be older than the call.
        """
        deadline = time.monotonic() + seconds
        seen = 0
        while time.monotonic() < deadline:
            summary = self.stats()
            stats = summary["stats"]
            idle = stats and not (stats["running"] or stats["waiting"] or summary["open_requests"])
            if idle and not any(group[4] for group in stats["pages"]):
                seen += 1
            else:
                seen = 0
            if seen > 3:
                return dict(stats)
            time.sleep(0.2)
        raise AssertionError(f"the engine is not idle: {stats}")

    def log_lines(self) -> list[dict[str, Any]]:
        whole = self.log.read_text().rpartition("\n")[0]
        return [json.loads(line) for line in whole.splitlines()]

    def logged(self, request_id: str, seconds: float = 30) -> dict[str, Any]:
        """The line about a request, which is written once its answer is on the way."""
        deadline = time.monotonic() + seconds
        while time.monotonic() < deadline:
            for line in self.log_lines():
                if line["id"] == request_id:
                    return line
            time.sleep(0.02)
        raise AssertionError(f"nothing was logged about {request_id}")

    def stop(self) -> None:
        if self._process.poll() is None:
            self.signal(signal.SIGTERM)
            try:
                self._process.wait(30)
            except subprocess.TimeoutExpired:
                self._process.kill()
                self._process.wait()
        for pipe in (self._process.stdout, self._process.stderr):
            assert pipe is not None
        self._reader.join(5)
        for pipe in (self._process.stdout, self._process.stderr):
            assert pipe is not None
            pipe.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()
