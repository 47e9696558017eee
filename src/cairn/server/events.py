"""A response that is generated: it waits for the engine, streams or collects, and ends with it.

The client is watched all the time, so that leaving ends the work within a step; the deadline covers
sending too, so that a client that stops reading does not hold its place for ever.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable
from contextlib import AbstractAsyncContextManager

import msgspec
from starlette.types import Message, Receive, Scope, Send

from cairn.server.answer import Answer
from cairn.server.api_error import ApiError
from cairn.server.record import Record, record_of

_encode = msgspec.json.Encoder().encode
_CLIENT_LEFT = 499

Open = Callable[[Record], AbstractAsyncContextManager[Answer]]
"""Tokenises, checks and submits; on exit nothing of it is left in the engine."""


class Generated:
    """An ASGI application that answers one request."""

    def __init__(self, open_answer: Open, timeout: float) -> None:
        self._open = open_answer
        self._timeout = timeout

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        record = record_of(scope)
        reply = _Reply(send)
        work = asyncio.create_task(self._run(reply, record))
        left = asyncio.create_task(_left(receive))
        try:
            await asyncio.wait({work, left}, return_when=asyncio.FIRST_COMPLETED)
            if not work.done():
                record.status, record.error = _CLIENT_LEFT, "the client left"
        finally:
            for task in (work, left):
                task.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await work

    async def _run(self, reply: _Reply, record: Record) -> None:
        try:
            async with asyncio.timeout(self._timeout), self._open(record) as answer:
                await answer.accepted()
                if answer.form.streams:
                    await reply.begin_events(answer.form.first())
                    answer.outlet.open(record.send)
                    await answer.complete()
                    await reply.end_events(answer.form.last() + b"data: [DONE]\n\n")
                else:
                    await answer.complete()
                    await reply.whole(200, _encode(answer.form.whole()))
        except ApiError as error:
            await self._fail(reply, record, error)
        except TimeoutError:
            message = (
                f"the answer was not complete after {self._timeout:g} s, the server's "
                "request_timeout; ask for fewer tokens"
            )
            with contextlib.suppress(TimeoutError):  # a client that does not read is not told
                async with asyncio.timeout(1):
                    await self._fail(reply, record, ApiError(504, message, code="timeout"))

    async def _fail(self, reply: _Reply, record: Record, error: ApiError) -> None:
        record.error = str(error)
        if reply.started:
            await reply.end_events(b"data: " + error.encoded() + b"\n\n")
        else:
            await reply.whole(error.status, error.encoded(), error.headers())


class _Reply:
    def __init__(self, send: Send) -> None:
        self._send = send
        self.started = False

    async def whole(self, status: int, body: bytes, headers: dict[str, str] | None = None) -> None:
        named = {"content-type": "application/json", **(headers or {})}
        named["content-length"] = str(len(body))
        await self._start(status, named)
        await self._send({"type": "http.response.body", "body": body})

    async def begin_events(self, events: bytes) -> None:
        await self._start(
            200, {"content-type": "text/event-stream; charset=utf-8", "cache-control": "no-cache"}
        )
        if events:
            await self._send({"type": "http.response.body", "body": events, "more_body": True})

    async def end_events(self, events: bytes) -> None:
        await self._send({"type": "http.response.body", "body": events})

    async def _start(self, status: int, headers: dict[str, str]) -> None:
        self.started = True
        raw = [(name.encode(), value.encode("latin-1")) for name, value in headers.items()]
        start: Message = {"type": "http.response.start", "status": status, "headers": raw}
        await self._send(start)


async def _left(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
