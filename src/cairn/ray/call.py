"""An HTTP request as a value, and a server's answer to it as a stream of values."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from dataclasses import dataclass

from starlette.types import ASGIApp, Message, Scope

Headers = list[tuple[bytes, bytes]]


@dataclass(frozen=True, slots=True)
class Call:
    method: str
    path: str
    query: bytes
    headers: Headers
    body: bytes
    blocks: tuple[bytes, ...]
    """Hashes of the prompt's blocks, for routing."""


@dataclass(frozen=True, slots=True)
class Head:
    status: int
    headers: Headers


async def answer(app: ASGIApp, call: Call) -> AsyncIterator[Head | bytes]:
    """The head, then the body as it comes. Closing the iterator early disconnects the client."""
    messages: asyncio.Queue[Message | None] = asyncio.Queue()
    left = asyncio.Event()
    asked = False

    async def receive() -> Message:
        nonlocal asked
        if asked:
            await left.wait()
            return {"type": "http.disconnect"}
        asked = True
        return {"type": "http.request", "body": call.body, "more_body": False}

    async def send(message: Message) -> None:
        messages.put_nowait(message)

    working = asyncio.ensure_future(app(_scope(call), receive, send))
    working.add_done_callback(lambda _: messages.put_nowait(None))
    try:
        while (message := await messages.get()) is not None:
            if message["type"] == "http.response.start":
                yield Head(message["status"], list(message["headers"]))
                continue
            body = [message.get("body", b"")]
            while not messages.empty():  # send together what has come meanwhile
                more = messages.get_nowait()
                if more is None:
                    messages.put_nowait(None)
                    break
                body.append(more.get("body", b""))
            if any(body):
                yield b"".join(body)
    finally:
        left.set()  # the app stops generating, and ends soon
        await working


def _scope(call: Call) -> Scope:
    fixed = {"type": "http", "asgi": {"version": "3.0"}, "http_version": "1.1", "scheme": "http"}
    empty: Scope = {"root_path": "", "client": None, "server": None, "state": {}}
    path = {"path": call.path, "raw_path": call.path.encode(), "query_string": call.query}
    return {**fixed, **empty, **path, "method": call.method, "headers": call.headers}
