"""What a streamed token costs the server: CPU time per event in each process, without a model.

python benchmarks/serving.py [--streams 256] [--tokens 512] [--step-ms 10] [--profile FOLDER]

The real server and the real engine run, scheduler included, but the engine's runner makes up its
tokens: a step takes --step-ms and no CPU time. Clients are raw sockets in this process.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import select
import signal
import socket
import subprocess
import sys
import time
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch

_TEXT = "A cairn is a heap of stones, raised by walkers to mark a path over bare hills. "


class MadeUpRunner:
    """Stands before an engine's runner: every request says the same text again and again."""

    def __init__(self, engine: Any, text: list[int], step_seconds: float) -> None:
        self._real = engine.runner
        self._text = text
        self._step_seconds = step_seconds
        self._ready = 0.0
        engine.runner = self
        engine.overlap = True

    def __getattr__(self, name: str) -> Any:
        return getattr(self._real, name)

    def launch(self, plan: Any) -> Any:
        from cairn.engine.step_result import InFlight, StepResult

        sampling = tuple(advance for advance in plan.advances if advance.samples)
        tokens = [self._text[advance.stop % len(self._text)] for advance in sampling]
        return InFlight(plan, sampling, torch.tensor(tokens), None, StepResult())

    def finish(self, step: Any) -> Any:
        wait = self._ready - time.perf_counter()
        if wait > 0:
            time.sleep(wait)
        self._ready = time.perf_counter() + self._step_seconds
        step.result.sampled.update(
            zip((a.request_id for a in step.sampling), step.tokens.tolist(), strict=True)
        )
        return step.result


def run_made_up_engine(options: argparse.Namespace, config: Any, endpoint: str) -> None:
    """The engine process's main, with the runner replaced."""
    from cairn import frontend
    from cairn.engine.build import build_engine
    from cairn.server.engine_process import run_engine
    from cairn.text.load import load_tokenizer

    def build_made_up(config: Any, source: Any, *bars: Any) -> Any:
        engine = build_engine(config, source, *bars)
        tokenizer = load_tokenizer(source)
        assert tokenizer is not None
        MadeUpRunner(engine, tokenizer.encode(_TEXT), options.step_ms / 1000)
        return engine

    with (
        patch.object(frontend, "build_engine", build_made_up),
        _profiled(options.profile, "engine"),
    ):
        run_engine(config, endpoint)


class _profiled:  # noqa: N801
    def __init__(self, folder: Path | None, name: str) -> None:
        self._target = None if folder is None else folder / f"{name}.prof"

    def __enter__(self) -> None:
        if self._target is not None:
            import cProfile

            self._profile = cProfile.Profile(time.thread_time)
            self._profile.enable()

    def __exit__(self, *_: object) -> None:
        if self._target is not None:
            self._profile.disable()
            self._profile.dump_stats(self._target)


def run_api(options: argparse.Namespace) -> None:
    from cairn.config import EngineConfig
    from cairn.server import engine_client
    from cairn.server.options import ServeConfig
    from cairn.server.run import run_server

    made_up = partial(run_made_up_engine, options)
    engine = EngineConfig(
        model="cairn-nano",
        device="cpu",
        max_running_requests=options.streams,
        max_queued_requests=options.streams,
        context_length=4096,
        kv_cache_gib=1.25,
    )
    with patch.object(engine_client, "run_engine", made_up), _profiled(options.profile, "api"):
        run_server(
            engine,
            ServeConfig(port=0, request_log="off", max_concurrent_requests=options.streams),
        )


def cpu_seconds(pid: int) -> tuple[float, float]:
    """In the process itself, and in the kernel."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    tick = os.sysconf("SC_CLK_TCK")
    return int(fields[11]) / tick, int(fields[12]) / tick


def engine_pid(pid: int) -> int:
    for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split():
        if b"spawn_main" in Path(f"/proc/{child}/cmdline").read_bytes():
            return int(child)
    raise RuntimeError("the server has no engine")


def run_clients(address: tuple[str, int], options: argparse.Namespace) -> int:
    """Open all streams, read them to their ends; the number of events."""
    body = {"prompt": [5] * 16, "max_tokens": options.tokens, "ignore_eos": True, "stream": True}
    text = json.dumps(body).encode()
    head = "POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
    request = f"{head}Content-Length: {len(text)}\r\n\r\n".encode() + text
    poll = select.epoll()
    streams: dict[int, tuple[socket.socket, bytes]] = {}
    for _ in range(options.streams):
        connection = socket.create_connection(address)
        connection.sendall(request)
        streams[connection.fileno()] = connection, b""
        poll.register(connection.fileno(), select.EPOLLIN)
    events = 0
    while streams:
        for number, _ in poll.poll():
            connection, before = streams[number]
            data = before + connection.recv(1 << 18)
            events += data.count(b"data: {")
            ended = b"data: [DONE]" in data
            if ended or not data:
                poll.unregister(number)
                connection.close()
                del streams[number]
            else:
                # What may be the beginning of the next event's name.
                streams[number] = connection, data[data.rfind(b"\n") + 1 :][-6:]
        time.sleep(0.002)  # many events to a wake-up: a client should cost little
    return events


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--streams", type=int, default=256)
    parser.add_argument("--tokens", type=int, default=512)
    parser.add_argument("--step-ms", type=float, default=10.0)
    parser.add_argument("--profile", type=Path, help="Folder for cProfile's files.")
    parser.add_argument("--api", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.api:
        run_api(options)
        return
    server = subprocess.Popen(
        [sys.executable, __file__, "--api", *sys.argv[1:]], stdout=subprocess.PIPE, text=True
    )
    try:
        assert server.stdout is not None
        found = re.search(r"http://([\d.]+):(\d+)", server.stdout.readline())
        assert found is not None, "the server did not start"
        address = found[1], int(found[2])
        warm = argparse.Namespace(**{**vars(options), "tokens": 32})
        run_clients(address, warm)
        pids = {"API process": server.pid, "engine process": engine_pid(server.pid)}
        before = {name: cpu_seconds(pid) for name, pid in pids.items()}
        begin = time.perf_counter()
        events = run_clients(address, options)
        seconds = time.perf_counter() - begin
        print(f"{events} events in {seconds:.1f} s: {events / seconds:,.0f} a second")
        for name, pid in pids.items():
            own, kernel = (
                1e6 * (now - then) / events
                for now, then in zip(cpu_seconds(pid), before[name], strict=True)
            )
            print(f"{name}: {own:.1f} us of CPU time per event, and {kernel:.1f} in the kernel")
    finally:
        server.send_signal(signal.SIGTERM)
        server.wait(60)


if __name__ == "__main__":
    main()
