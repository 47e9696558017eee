"""The response to a completion or chat request: streams or collects what the engine generates.

The client is watched all the time, so that its leaving ends the work within a step. The time limit
covers sending too, so that a client that stops reading does not keep its place.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Callable
from contextlib import AbstractAsyncContextManager

import msgspec
from starlette.responses import Response
from starlette.types import Message, Receive, Scope, Send

from cairn.server.answer import Answer
from cairn.server.api_error import ApiError
from cairn.server.formats import Format
from cairn.server.middleware import Record, record_of

_log = logging.getLogger("cairn.server")

_EVENT_STREAM: Message = {
    "type": "http.response.start",
    "status": 200,
    "headers": [
        (b"content-type", b"text/event-stream; charset=utf-8"),
        (b"cache-control", b"no-cache"),
    ],
}

Open = Callable[[Record], AbstractAsyncContextManager[Answer]]
"""Tokenises, checks and submits a request. On exit nothing of it is left in the engine."""


class GeneratedResponse(Response):
    def __init__(self, open_answer: Open, timeout: float) -> None:
        super().__init__()
        self._open = open_answer
        self._timeout = timeout
        self._form: Format | None = None  # of a stream that has begun

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        record = record_of(scope)
        work = asyncio.create_task(self._run(scope, receive, send))
        left = asyncio.create_task(_left(receive))
        try:
            await asyncio.wait({work, left}, return_when=asyncio.FIRST_COMPLETED)
            if not work.done():
                record.client_left()
        finally:
            for task in (work, left):
                task.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await work

    async def _run(self, scope: Scope, receive: Receive, send: Send) -> None:
        record = record_of(scope)

        async def fail(error: ApiError) -> None:
            record.error = str(error)
            if self._form is not None:
                await _send(send, self._form.failure(error))
            else:
                await error.response(scope["path"])(scope, receive, send)

        try:
            async with asyncio.timeout(self._timeout), self._open(record) as answer:
                await answer.accepted()
                if answer.form.streams:
                    self._form = answer.form
                    await send(_EVENT_STREAM)
                    if first := answer.form.first():
                        await _send(send, first, more=True)
                    answer.outlet.open(record.send)
                    await answer.complete()
                    await _send(send, answer.form.last())
                else:
                    await answer.complete()
                    body = msgspec.json.encode(answer.form.whole())
                    await Response(body, media_type="application/json")(scope, receive, send)
        except ApiError as error:
            await fail(error)
        except TimeoutError:
            message = (
                f"the answer was not complete after {self._timeout:g} s, the server's "
                "request_timeout; ask for fewer tokens"
            )
            with contextlib.suppress(TimeoutError):  # a client that does not read is not told
                async with asyncio.timeout(1):
                    await fail(ApiError(504, message, code="timeout"))
        except Exception as error:  # a stream must not end as if it were complete
            _log.error("an answer failed", exc_info=error)
            await fail(ApiError(500, f"the server failed on this answer: {type(error).__name__}"))


async def _send(send: Send, events: bytes, *, more: bool = False) -> None:
    await send({"type": "http.response.body", "body": events, "more_body": more})


async def _left(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
