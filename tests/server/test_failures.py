"""Engines that die or hang, clients that leave, servers that are stopped."""

from __future__ import annotations

import asyncio
import json
import os
import random
import signal
from collections.abc import Iterator
from contextlib import closing, suppress
from http.client import HTTPConnection
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.patience import PATIENCE, tries, wait_for_end
from tests.server.process import ServerProcess, connect

LONG = {"prompt": "once", "max_tokens": 3000, "ignore_eos": True, "temperature": 0}


@pytest.fixture
def fragile(model_folder: Path, tmp_path: Path) -> Iterator[ServerProcess]:
    flags = (
        "--engine-timeout=4",
        "--max-restarts=2",
    )
    with ServerProcess(model_folder, tmp_path / "requests.jsonl", *flags) as running:
        yield running


async def read_stream(client: httpx.AsyncClient, began: asyncio.Event, **fields: Any) -> str:
    """The stream's last event."""
    last = ""
    body = {**LONG, "stream": True, **fields}
    async with client.stream("POST", "/v1/completions", json=body) as stream:
        assert stream.status_code == 200
        async for line in stream.aiter_lines():
            last = line or last
            began.set()
    return last


async def next_engine(server: ServerProcess, last: int) -> int:
    """The process of the engine that is started after another one."""
    while True:
        with suppress(RuntimeError, FileNotFoundError):
            if (found := server.engine_pid()) != last:
                return found
        await asyncio.sleep(0.001)


def test_a_killed_engine_is_told_to_all_and_replaced(fragile: ServerProcess) -> None:
    async def main() -> None:
        async with httpx.AsyncClient(base_url=fragile.url, timeout=PATIENCE) as client:
            events = [asyncio.Event() for _ in range(4)]
            streams = [asyncio.create_task(read_stream(client, event)) for event in events]
            waiting = asyncio.create_task(client.post("/v1/completions", json=LONG))
            for event in events:
                await event.wait()
            first = fragile.engine_pid()
            os.kill(first, signal.SIGKILL)
            # The next one must not be ready before the answers are looked at.
            second = await next_engine(fragile, first)
            os.kill(second, signal.SIGSTOP)
            for last in await asyncio.gather(*streams):
                assert "engine_lost" in last
            answer = await waiting
            assert answer.status_code == 503 and answer.headers["retry-after"]
            health = await client.get("/health")
            assert health.status_code == 503 and health.json()["status"] == "restarting"
            assert "exit code -9" in health.json()["reason"]
            refused = await client.post("/v1/completions", json=LONG)
            assert refused.status_code == 503
            os.kill(second, signal.SIGCONT)

    asyncio.run(main())
    fragile.wait_for_health("ok")
    again = fragile.post("/v1/completions", json={**LONG, "max_tokens": 4})
    assert again.status_code == 200
    assert "cairn_engine_lost_total 1.0" in fragile.get("/metrics").text
    # A stopped process says nothing: it is taken for stuck and replaced too.
    with closing(HTTPConnection(fragile.url.removeprefix("http://"), timeout=PATIENCE)) as idle:
        idle.request("GET", "/v1/models")
        assert idle.getresponse().read()
        os.kill(fragile.engine_pid(), signal.SIGSTOP)
        fragile.wait_to_hear("the engine is lost: it said nothing for 4 s and was killed")
        fragile.wait_for_health("ok")
        idle.request("GET", "/v1/models")  # the connection is still there
        assert idle.getresponse().read()
    # The third loss within ten minutes is one too many.
    os.kill(fragile.engine_pid(), signal.SIGKILL)
    dead = fragile.wait_for_health("dead")
    assert "max_restarts" in dead["reason"]
    refused = fragile.post("/v1/completions", json=LONG)
    assert refused.status_code == 503


@pytest.mark.parametrize(("seconds", "told"), [(600, "data: [DONE]"), (0.01, "is stopping")])
def test_a_stopped_server_drains_then_tells(
    model_folder: Path, tmp_path: Path, seconds: float, told: str
) -> None:
    """Within drain_timeout an open stream is completed, after that it is told why it ends."""

    async def main() -> None:
        async with httpx.AsyncClient(base_url=running.url, timeout=PATIENCE) as client:
            began = asyncio.Event()
            length = 3000 if seconds < 1 else 1000
            stream = asyncio.create_task(read_stream(client, began, max_tokens=length))
            await began.wait()
            running.signal(signal.SIGTERM)
            assert told in await stream

    with ServerProcess(model_folder, tmp_path / "log", f"--drain-timeout={seconds}") as running:
        engine = running.engine_pid()
        asyncio.run(main())
        assert running.wait() == 0
        assert not Path(f"/proc/{engine}").exists()


def test_an_engine_does_not_outlive_a_killed_server(model_folder: Path, tmp_path: Path) -> None:
    with ServerProcess(model_folder, tmp_path / "requests.jsonl") as running:
        engine = running.engine_pid()
        running.signal(signal.SIGKILL)
        running.wait()
        wait_for_end(engine)


async def leave_at_random(
    client: httpx.AsyncClient, number: int, rng: random.Random, counts: dict[str, int]
) -> None:
    stays = rng.random() > 0.3
    body: dict[str, Any] = {
        "prompt": f"request {number % 17} " + "page " * rng.randrange(30),
        "max_tokens": rng.randrange(1, 60),
        "n": rng.choice((1, 1, 2)),
        "stream": rng.random() < 0.7,
        "ignore_eos": True,
    }
    if stays or not body["stream"]:
        patience = PATIENCE if stays else rng.random() * 0.2
        timeout = httpx.Timeout(PATIENCE, read=patience)
        try:
            answer = await client.post("/v1/completions", json=body, timeout=timeout)
        except httpx.ReadTimeout:
            counts["left"] += 1
            return
        assert answer.status_code == 200, answer.text
        counts["answered"] += 1
        return
    reads = rng.randrange(20)
    async with client.stream("POST", "/v1/completions", json=body, timeout=PATIENCE) as stream:
        assert stream.status_code == 200
        async for _ in stream.aiter_lines():
            reads -= 1
            if reads <= 0:
                break
    counts["left"] += 1


def leave_many(server: ServerProcess, total: int) -> None:
    counts = {"answered": 0, "left": 0}
    rng = random.Random(7)

    async def main() -> None:
        limits = httpx.Limits(max_connections=48)
        async with httpx.AsyncClient(base_url=server.url, limits=limits) as client:
            turn = asyncio.Semaphore(48)

            async def one(number: int) -> None:
                async with turn:
                    await leave_at_random(client, number, rng, counts)

            await asyncio.gather(*(one(i) for i in range(total)))

    asyncio.run(main())
    assert counts["answered"] + counts["left"] == total
    assert counts["left"] > total / 10
    stats = server.wait_until_idle()
    for _, whole, free, cached, owned in stats["pages"]:
        assert owned == 0 and free + cached == whole


def test_clients_that_leave_leave_nothing_behind(server: ServerProcess) -> None:
    leave_many(server, 120)


@pytest.mark.slow
def test_a_thousand_requests_with_clients_that_leave(server: ServerProcess) -> None:
    leave_many(server, 1000)


def test_leaving_while_waiting_and_while_prefilling(server: ServerProcess) -> None:
    """Before the first token there is nothing to send: the leaving itself must be seen."""
    for body in ({**LONG, "stream": True}, {**LONG, "prompt": "y" * 1000}):
        aborted = server.wait_until_idle()["aborted"]
        content = json.dumps(body).encode()
        with connect(server) as connection:
            connection.sendall(
                b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\n"
                b"Content-Type: application/json\r\nContent-Length: %d\r\n\r\n"
                % len(content)
                + content
            )
            for _ in tries():
                if server.stats()["stats"]["running"]:
                    break
        assert server.wait_until_idle()["aborted"] == aborted + 1
