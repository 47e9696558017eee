"""Requests that come back with the same prefix, and streams that are open when a replica dies."""

from __future__ import annotations

import asyncio
import json
import random
from collections.abc import Callable
from dataclasses import dataclass, field

import httpx

PREFIXES, ROUNDS, PARALLEL = 8, 6, 8
STREAMS, STREAM_TOKENS = 8, 700
_PREFIX_CHARACTERS = 1200
_WORDS = "stone path cloud river birch lantern harbour meadow signal winter copper morning".split()


@dataclass(frozen=True)
class Sent:
    """A request that was answered."""

    id: str
    prefix: int
    replica: str  # X-Cairn-Replica, where there is one
    cached: int  # prompt tokens that were found in the prefix cache


def prefix_text(number: int) -> str:
    """Long enough for pages of the cache, and different from the first word on."""
    rng = random.Random(number)
    text = f"document {number}:"
    while len(text) < _PREFIX_CHARACTERS:
        text += " " + rng.choice(_WORDS)
    return text


def send_prefixes(url: str, model: str) -> list[Sent]:
    """Every prefix in every round, `PARALLEL` at a time, the order within a round shuffled."""
    order = [(turn, prefix) for turn in range(ROUNDS) for prefix in range(PREFIXES)]
    rng = random.Random(0)
    order.sort(key=lambda entry: (entry[0], rng.random()))
    waiting = iter(order)
    answered: list[Sent] = []

    async def work(client: httpx.AsyncClient) -> None:
        for turn, prefix in waiting:
            body = {
                "model": model,
                "prompt": f"{prefix_text(prefix)} question {turn}",
                "max_tokens": 16,
                "ignore_eos": True,
            }
            name = f"prefix-{prefix}-{turn}"
            answer = await client.post("/v1/completions", json=body, headers={"x-request-id": name})
            assert answer.status_code == 200, answer.text
            cached = answer.json()["usage"]["prompt_tokens_details"]["cached_tokens"]
            replica = answer.headers.get("x-cairn-replica", "")
            answered.append(Sent(name, prefix, replica, cached))

    async def main() -> None:
        async with httpx.AsyncClient(base_url=url, timeout=120) as client:
            await asyncio.gather(*(work(client) for _ in range(PARALLEL)))

    asyncio.run(main())
    return answered


@dataclass(frozen=True)
class Returns:
    returned: int
    of: int
    spread: dict[str, int]  # prefixes by the replica that saw them first
    cached: int  # requests that found most of their prompt cached

    @property
    def share(self) -> float:
        return self.returned / self.of

    def __str__(self) -> str:
        return (
            f"{self.returned}/{self.of} returned ({self.share:.0%}), first replicas "
            f"{sorted(self.spread.values())}, {self.cached}/{self.of} found their prefix cached"
        )


def returns(answered: list[Sent], replica_of: Callable[[Sent], str]) -> Returns:
    """How many requests went where the first with their prefix had gone."""
    by_prefix: dict[int, list[Sent]] = {}
    for sent in sorted(answered, key=lambda sent: int(sent.id.rpartition("-")[2])):
        by_prefix.setdefault(sent.prefix, []).append(sent)
    returned = of = cached = 0
    spread: dict[str, int] = {}
    for first, *later in by_prefix.values():
        home = replica_of(first)
        spread[home] = spread.get(home, 0) + 1
        of += len(later)
        returned += sum(replica_of(sent) == home for sent in later)
        cached += sum(sent.cached > _PREFIX_CHARACTERS // 2 for sent in later)
    return Returns(returned, of, spread, cached)


@dataclass
class Stream:
    """One stream, as its client saw it."""

    id: str
    replica: str = ""
    status: int = 0
    events: int = 0
    tokens: int = 0  # by the usage at its end
    done: bool = False  # [DONE] came
    error: str = ""  # an event with an error, or a broken connection
    began: asyncio.Event = field(default_factory=asyncio.Event)

    @property
    def complete(self) -> bool:
        return self.done and not self.error  # smg says [DONE] after an error too

    async def read(self, client: httpx.AsyncClient, model: str) -> None:
        body = {
            "model": model,
            "prompt": prefix_text(100 + int(self.id.rpartition("-")[2])),
            "max_tokens": STREAM_TOKENS,
            "ignore_eos": True,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        headers = {"x-request-id": self.id}
        try:
            async with client.stream(
                "POST", "/v1/completions", json=body, headers=headers
            ) as stream:
                self.status = stream.status_code
                self.replica = stream.headers.get("x-cairn-replica", "")
                async for line in stream.aiter_lines():
                    self._take(line)
        except httpx.TransportError as error:
            self.error = f"{type(error).__name__}: {error}"
        finally:
            self.began.set()

    def _take(self, line: str) -> None:
        if not line.startswith("data: "):
            return
        data = line.removeprefix("data: ")
        if data == "[DONE]":
            self.done = True
            return
        event = json.loads(data)
        if "error" in event:
            self.error = str(event["error"]["message"])
        if event.get("usage"):
            self.tokens = event["usage"]["completion_tokens"]
        self.events += 1
        if self.events > 2:
            self.began.set()


def streams_through_a_loss(url: str, model: str, kill: Callable[[], None]) -> list[Stream]:
    """Open streams, call `kill` when tokens of all have come, and see how each ends."""
    streams: list[Stream] = []

    async def main() -> None:
        async with httpx.AsyncClient(base_url=url, timeout=120) as client:
            streams.extend(Stream(f"stream-{number}") for number in range(STREAMS))
            reading = [asyncio.create_task(stream.read(client, model)) for stream in streams]
            for stream in streams:
                await stream.began.wait()
            assert not any(stream.done or stream.error for stream in streams), streams
            kill()
            await asyncio.gather(*reading)

    asyncio.run(main())
    return streams
