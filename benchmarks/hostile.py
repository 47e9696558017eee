"""How much hostile requests delay another client's stream, and what they leave behind.

Starts a server, reads a stream from it, and sends each attack from a process of its own while the
stream goes on. Prints, for each attack, the gaps between the stream's tokens, the longest time that
/health took, the statuses of the attack's requests, and the memory of the server's processes
afterwards. At last it stops the server in the middle of an attack, and prints how long that took.

    python benchmarks/hostile.py --serve '--model=cairn-nano --threads=1'
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import shlex
import socket
import string
import threading
import time
from collections import Counter
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import numpy as np

from cairn.bench.spawned import Spawned, spawn

DRAIN = 2  # seconds
ENDLESS = {"allOf": [{"type": "string", "pattern": f"(.*{c}.*)"} for c in string.ascii_lowercase]}
OPTIONAL = {"type": "object", "properties": {f"p{i}": {"type": "null"} for i in range(4500)}}
WORDS = "|".join(f"{a}{b}[a-z ]{{1,30}}{c}" for a in "abcdef" for b in "ghijkl" for c in "mnopqr")


class Client:
    """Sends requests of an attack, and counts the statuses."""

    def __init__(self, url: str) -> None:
        self.url = url
        self.statuses: Counter[str] = Counter()

    def post(self, path: str, body: dict[str, Any]) -> None:
        try:
            answer = httpx.post(self.url + path, json=body, timeout=120)
            self.statuses[str(answer.status_code)] += 1
        except httpx.HTTPError as error:
            self.statuses[type(error).__name__] += 1

    def chat(self, **fields: Any) -> None:
        messages = [{"role": "user", "content": "x"}]
        self.post("/chat/completions", {"messages": messages, "max_tokens": 50, **fields})

    def schema(self, schema: dict[str, Any]) -> None:
        form = {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}}
        self.chat(response_format=form)

    def at_once(self, count: int, call: Callable[[], None]) -> None:
        with ThreadPoolExecutor(count) as threads:
            for each in [threads.submit(call) for _ in range(count)]:
                each.result()

    def connect(self) -> socket.socket:
        host, _, port = self.url.removeprefix("http://").partition("/")[0].rpartition(":")
        return socket.create_connection((host, int(port)), timeout=60)


def tokenize(client: Client) -> None:
    root = Client(client.url.removesuffix("/v1"))
    client.at_once(4, lambda: root.post("/tokenize", {"prompt": "cairn " * 1_390_000}))
    client.statuses = root.statuses


def idle(client: Client) -> None:
    held = [client.connect() for _ in range(1100)]
    time.sleep(2)
    for connection in held:
        connection.close()


def headers(client: Client) -> None:
    with client.connect() as connection:
        try:
            for _ in range(2000):
                connection.sendall(b"GET / HTTP/1.1\r\nX: " + b"y" * 2**16)
        except OSError:
            client.statuses["closed"] += 1


def bodies(client: Client) -> None:
    head = b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\ncontent-type: application/json\r\n"
    held = []
    for _ in range(100):
        connection = client.connect()
        held.append(connection)
        try:
            connection.sendall(head + b"content-length: 8000000\r\n\r\n" + b" " * 7_000_000)
        except OSError:
            client.statuses["closed"] += 1
    for connection in held:
        connection.close()


def stops(client: Client) -> None:
    body = {"prompt": ["x"] * 32, "max_tokens": 50, "stop": ["a" * 1023 + "b"] * 16}
    client.post("/completions", body)
    client.post("/completions", {**body, "stop": ["a" * 10_000] * 16})


ATTACKS: dict[str, Callable[[Client], None]] = {
    "two grammars without end": lambda c: c.at_once(2, lambda: c.schema(ENDLESS)),
    "8 costly patterns": lambda c: c.at_once(
        8, lambda: c.schema({"type": "string", "pattern": f"^(({WORDS}){{1,9}}){{1,9}}$"})
    ),
    "4,500 optional properties": lambda c: c.schema(OPTIONAL),
    "four /tokenize of 8 MiB": tokenize,
    "16 long stop strings": stops,
    "n=128": lambda c: c.chat(n=128, max_tokens=1),
    "1,100 idle connections": idle,
    "128 MiB of headers": headers,
    "100 unfinished bodies": bodies,
    "a model name of 7 MB": lambda c: c.chat(model="m" * 7_000_000),
}


def attack(name: str, url: str, results: Any) -> None:
    client = Client(url)
    ATTACKS[name](client)
    results.put(dict(client.statuses))


class Background:
    """Reads streams, one after the other, and notes when tokens come."""

    def __init__(self, url: str) -> None:
        self._url = url
        self._stop = threading.Event()
        self.moments: list[float] = []
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def _run(self) -> None:
        body = {"prompt": "tick", "max_tokens": 1500, "ignore_eos": True, "stream": True}
        with httpx.Client(timeout=120) as client:
            while not self._stop.is_set():
                self.moments.append(float("nan"))  # no gap between two streams
                with client.stream("POST", self._url + "/completions", json=body) as stream:
                    for line in stream.iter_lines():
                        if line:
                            self.moments.append(time.perf_counter())
                        if self._stop.is_set():
                            break

    def gaps(self, begin: float) -> np.ndarray:
        """Milliseconds between tokens that came since then."""
        moments = np.array(self.moments)
        first = int(np.searchsorted(np.nan_to_num(moments, nan=0.0) >= begin, True))
        found: np.ndarray = np.diff(moments[max(first - 1, 0) :]) * 1000
        return np.asarray(found[~np.isnan(found)])

    def stop(self) -> None:
        self._stop.set()
        self._thread.join()


def processes(pid: int) -> list[int]:
    """A process and all that it has started."""
    found = [pid]
    for task in Path(f"/proc/{pid}/task").glob("*/children"):
        for child in task.read_text().split():
            found += processes(int(child))
    return found


def memory_mib(pid: int) -> float:
    total = 0
    for each in processes(pid):
        for line in Path(f"/proc/{each}/status").read_text().splitlines():
            if line.startswith("RssAnon:"):
                total += int(line.split()[1])
    return total / 1024


def measure(name: str, url: str, pid: int, seconds: float) -> list[str]:
    background = Background(url)
    time.sleep(1)
    before, begin = memory_mib(pid), time.perf_counter()
    context = multiprocessing.get_context("spawn")
    results = context.Queue()
    process = None
    if name:
        process = context.Process(target=attack, args=(name, url, results))
        process.start()
    health = 0.0
    statuses: dict[str, int] = {}
    while time.perf_counter() - begin < seconds or (process is not None and process.is_alive()):
        asked = time.perf_counter()
        httpx.get(url.removesuffix("v1") + "health", timeout=120).raise_for_status()
        health = max(health, time.perf_counter() - asked)
        if process is not None and not results.empty():
            statuses = results.get()
        time.sleep(0.1)
    took = time.perf_counter() - begin
    gaps = background.gaps(begin)
    background.stop()
    time.sleep(2)
    after = memory_mib(pid)
    p50, p99 = np.percentile(gaps, [50, 99])
    return [
        name or "none",
        f"{took:.1f}",
        f"{p50:.1f}",
        f"{p99:.1f}",
        f"{gaps.max():.0f}",
        f"{health * 1000:.0f}",
        json.dumps(statuses).replace('"', ""),
        f"{before:.0f} to {after:.0f}",
    ]


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--serve", default="--model=cairn-nano", help="flags of cairn serve")
    parser.add_argument("--seconds", type=float, default=4.0, help="at least, for each attack")
    parser.add_argument("--only", action="append", choices=list(ATTACKS), help="may be repeated")
    arguments = parser.parse_args()
    flags = [*shlex.split(arguments.serve), f"--drain-timeout={DRAIN}"]
    with spawn(flags) as server:
        run(server, arguments)


def run(server: Spawned, arguments: argparse.Namespace) -> None:
    url, pid = server.wait_until_ready(), server.pid
    # The first requests of each kind load what later ones share.
    first = Client(url)
    first.chat()
    first.chat(response_format={"type": "json_object"})
    print("| attack | s | P50 ms | P99 ms | longest ms | /health ms | statuses | RSS MiB |")
    print("|---|---|---|---|---|---|---|---|")
    for name in ("", *(arguments.only or ATTACKS)):
        print("|", " | ".join(measure(name, url, pid, arguments.seconds)), "|", flush=True)
    work = [
        threading.Thread(target=first.schema, args=(ENDLESS,)),
        threading.Thread(target=tokenize, args=(first,)),
    ]
    for each in work:
        each.start()
    time.sleep(1)
    begin = time.perf_counter()
    server.stop()
    took = time.perf_counter() - begin
    for each in work:
        each.join()
    print(f"\nSIGTERM during a grammar and long texts: {took:.1f} s, drain_timeout is {DRAIN} s")


if __name__ == "__main__":
    main()
