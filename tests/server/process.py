"""`cairn serve` as a process, and the tiny model it serves."""

from __future__ import annotations

import json
import os
import re
import resource
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any, Self

import httpx

from tests.helpers import TINY_LLAMA, byte_tokenizer, write_model
from tests.patience import PATIENCE, tries

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


def connect(server: ServerProcess) -> socket.socket:
    """A connection to the server that has sent nothing yet."""
    host, _, port = server.url.removeprefix("http://").partition(":")
    return socket.create_connection((host, int(port)), timeout=PATIENCE)


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
        # No connection is kept: the server might close it just when it is used again.
        alone = httpx.Limits(max_keepalive_connections=0)
        self._client = httpx.Client(base_url=self.url, timeout=PATIENCE, limits=alone)

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
            self._process.wait(PATIENCE)
            self._reader.join()
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

    def wait(self) -> int:
        """The exit code."""
        return self._process.wait(PATIENCE)

    def get(self, path: str, **options: Any) -> httpx.Response:
        return self._client.get(path, **options)

    def post(self, path: str, json: Any = None, **options: Any) -> httpx.Response:
        return self._client.post(path, json=json, **options)

    def token(self, text: str) -> str:
        """The id of a one-token text, as logit_bias wants it."""
        (token,) = self.post("/tokenize", {"prompt": text}).json()["tokens"]
        return str(token)

    def stats(self) -> dict[str, Any]:
        body: dict[str, Any] = self.get("/stats").json()
        return body

    def wait_for_health(self, status: str) -> dict[str, Any]:
        """Ask until the server says so. It must not be a state that passes: see `wait_to_hear`."""
        for _ in tries():
            body: dict[str, Any] = self.get("/health").json()
            if body["status"] == status:
                return body
        raise AssertionError(f"health did not become {status}: {body}")

    def wait_to_hear(self, words: str) -> str:
        """The line of standard error that has these words, as soon as there is one."""
        for _ in tries():
            for line in self.errors:
                if words in line:
                    return line
        raise AssertionError(f"nothing was said of {words!r}: {self.errors}")

    def wait_until_idle(self) -> dict[str, Any]:
        """Ask until nothing is open, runs, waits or is owned; returns the engine's numbers.

        The engine reports several times a second. Two reports must say so that are newer than the
        call. Each report has another time that messages have taken.
        """
        reports: list[float] = []
        for _ in tries():
            summary = self.stats()
            stats = summary["stats"]
            if stats is None or stats["message_seconds"] in reports[-1:]:
                continue
            busy = stats["running"] or stats["waiting"] or summary["open_requests"]
            if reports and (busy or any(group[4] for group in stats["pages"])):
                reports.clear()
            reports.append(stats["message_seconds"])
            if len(reports) == 3:
                return dict(stats)
        raise AssertionError(f"the engine is not idle: {stats}")

    def log_lines(self) -> list[dict[str, Any]]:
        whole = self.log.read_text().rpartition("\n")[0]
        return [json.loads(line) for line in whole.splitlines()]

    def logged(self, request_id: str) -> dict[str, Any]:
        """The line about a request, which is written once its answer is on the way."""
        for _ in tries():
            for line in self.log_lines():
                if line["id"] == request_id:
                    return line
        raise AssertionError(f"nothing was logged about {request_id}")

    def stop(self) -> None:
        if self._process.poll() is None:
            self.signal(signal.SIGTERM)
            try:
                self._process.wait(PATIENCE)
            except subprocess.TimeoutExpired:
                self._process.kill()
                self._process.wait()
        self._client.close()
        self._reader.join()
        for pipe in (self._process.stdout, self._process.stderr):
            assert pipe is not None
            pipe.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()
