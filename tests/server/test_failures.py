"""Engines that die or hang, clients that leave, servers that are stopped."""

from __future__ import annotations

import asyncio
import os
import random
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.server.process import ServerProcess

LONG = {"prompt": "once", "max_tokens": 3000, "ignore_eos": True, "temperature": 0}


@pytest.fixture
def fragile(model_folder: Path, tmp_path: Path) -> Iterator[ServerProcess]:
    flags = (
        "--engine-timeout=2",
        "--max-restarts=2",
        "--drain-timeout=1",
        "--max-queued-requests=6",
    )
    with ServerProcess(model_folder, tmp_path / "requests.jsonl", *flags) as running:
        yield running


async def read_stream(client: httpx.AsyncClient, began: asyncio.Event) -> tuple[str, float]:
    """The stream's last event, and when it came."""
    last = ""
    async with client.stream("POST", "/v1/completions", json={**LONG, "stream": True}) as stream:
        assert stream.status_code == 200
        async for line in stream.aiter_lines():
            last = line or last
            began.set()
    return last, time.monotonic()


def test_a_killed_engine_is_told_to_all_and_replaced(fragile: ServerProcess) -> None:
    async def main() -> None:
        async with httpx.AsyncClient(base_url=fragile.url, timeout=60) as client:
            events = [asyncio.Event() for _ in range(4)]
            streams = [asyncio.create_task(read_stream(client, event)) for event in events]
            waiting = asyncio.create_task(client.post("/v1/completions", json=LONG))
            for event in events:
                await event.wait()
            first = fragile.engine_pid()
            killed = time.monotonic()
            os.kill(first, signal.SIGKILL)
            for last, when in await asyncio.gather(*streams):
                assert "engine_lost" in last
                assert when - killed < 10
            answer = await waiting
            assert answer.status_code == 503 and answer.headers["retry-after"]
            health = await client.get("/health")
            assert health.status_code == 503 and health.json()["status"] == "restarting"
            assert "exit code -9" in health.json()["reason"]
            refused = await client.post("/v1/completions", json=LONG)
            assert refused.status_code == 503

    asyncio.run(main())
    fragile.wait_for_health("ok")
    again = httpx.post(f"{fragile.url}/v1/completions", json={**LONG, "max_tokens": 4}, timeout=30)
    assert again.status_code == 200
    assert "cairn_engine_lost_total 1.0" in fragile.get("/metrics").text
    # A stopped process says nothing: it is taken for stuck and replaced too.
    os.kill(fragile.engine_pid(), signal.SIGSTOP)
    assert "said nothing" in fragile.wait_for_health("restarting")["reason"]
    fragile.wait_for_health("ok")
    # The third loss within ten minutes is one too many.
    os.kill(fragile.engine_pid(), signal.SIGKILL)
    dead = fragile.wait_for_health("dead")
    assert "max_restarts" in dead["reason"]
    refused = httpx.post(f"{fragile.url}/v1/completions", json=LONG)
    assert refused.status_code == 503


def test_a_stopped_server_drains_then_tells(fragile: ServerProcess) -> None:
    async def main() -> None:
        async with httpx.AsyncClient(base_url=fragile.url, timeout=60) as client:
            short = {**LONG, "max_tokens": 150, "stream": True}
            events = [asyncio.Event(), asyncio.Event()]
            long = asyncio.create_task(read_stream(client, events[0]))

            async def read_short() -> str:
                last = ""
                async with client.stream("POST", "/v1/completions", json=short) as stream:
                    async for line in stream.aiter_lines():
                        last = line or last
                        events[1].set()
                return last

            brief = asyncio.create_task(read_short())
            for event in events:
                await event.wait()
            fragile.signal(signal.SIGTERM)
            assert await brief == "data: [DONE]"
            last, _ = await long
            assert "the server is stopping" in last

    engine = fragile.engine_pid()
    full = httpx.post(f"{fragile.url}/v1/completions", json={**LONG, "n": 7}, timeout=30)
    assert full.status_code == 429 and full.headers["retry-after"]
    assert "max_queued_requests" in full.json()["error"]["message"]
    asyncio.run(main())
    assert fragile.wait(20) == 0
    assert not Path(f"/proc/{engine}").exists()


def test_an_engine_does_not_outlive_a_killed_server(model_folder: Path, tmp_path: Path) -> None:
    with ServerProcess(model_folder, tmp_path / "requests.jsonl") as running:
        engine = running.engine_pid()
        running.signal(signal.SIGKILL)
        running.wait(10)
        deadline = time.monotonic() + 10
        while Path(f"/proc/{engine}/fd").exists() and time.monotonic() < deadline:
            if Path(f"/proc/{engine}/status").read_text().find("State:\tZ") >= 0:
                break
            time.sleep(0.02)
        else:
            assert not Path(f"/proc/{engine}").exists()


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
        patience = 120 if stays else rng.random() * 0.2
        timeout = httpx.Timeout(120, read=patience)
        try:
            answer = await client.post("/v1/completions", json=body, timeout=timeout)
        except httpx.ReadTimeout:
            counts["left"] += 1
            return
        assert answer.status_code == 200, answer.text
        counts["answered"] += 1
        return
    reads = rng.randrange(20)
    async with client.stream("POST", "/v1/completions", json=body, timeout=120) as stream:
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
    aborted = server.wait_until_idle()["aborted"]
    patience = httpx.Timeout(60, read=0.3)
    for body in ({**LONG, "stream": True}, {**LONG, "prompt": "y" * 1000}):
        with (
            pytest.raises(httpx.ReadTimeout),
            httpx.stream("POST", f"{server.url}/v1/completions", json=body, timeout=patience),
        ):
            raise httpx.ReadTimeout("enough")  # the stream has begun; the other one has not
    deadline = time.monotonic() + 30
    while server.stats()["stats"]["aborted"] - aborted < 2 and time.monotonic() < deadline:
        time.sleep(0.05)
    stats = server.wait_until_idle()
    assert stats["aborted"] - aborted == 2
    assert stats["generated_tokens"] > 0
