"""Sends a stream's events to its connection without a task for each stream."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine, Generator
from types import coroutine
from typing import Any

from starlette.types import Message, Send


class Outlet:
    """Sends events at once, as long as the ASGI server does not have to wait.

    The coroutine that sends is run here until it would wait. For a client that reads, that is its
    end. For a client that does not read, a task waits; events that come meanwhile are sent together
    after it. So a step of many streams does not wake many tasks.
    """

    def __init__(self) -> None:
        self._send: Send | None = None
        self._waiting: list[bytes] = []
        self._task: asyncio.Task[None] | None = None

    def open(self, send: Send) -> None:
        """Send what has been written so far; from now on events are sent at once."""
        self._send = send
        if self._waiting:
            data = b"".join(self._waiting)
            self._waiting.clear()
            self.write(data)

    def write(self, events: bytes) -> None:
        if self._send is None or self._task is not None:
            self._waiting.append(events)
            return
        sending: Coroutine[Any, Any, None] = self._send(_body(events))  # type: ignore[assignment]
        try:
            awaited = sending.send(None)
        except StopIteration:
            return
        self._task = asyncio.create_task(self._catch_up(_resume(sending, awaited), self._send))

    async def drained(self) -> None:
        """Returns when everything written is sent."""
        if self._task is not None:
            await self._task

    def close(self) -> None:
        """Drop what is not sent yet. Nothing is left to wait for."""
        if self._task is not None:
            self._task.cancel()
        self._task = self._send = None
        self._waiting.clear()

    async def _catch_up(self, sending: Coroutine[Any, Any, None], send: Send) -> None:
        await sending
        while self._waiting:
            data = b"".join(self._waiting)
            self._waiting.clear()
            await send(_body(data))
        self._task = None


def _body(data: bytes) -> Message:
    return {"type": "http.response.body", "body": data, "more_body": True}


@coroutine
def _resume(started: Coroutine[Any, Any, None], awaited: Any) -> Generator[Any, Any, None]:
    """Continue, in a task, a coroutine that waits for a future."""
    try:
        yield awaited
    except BaseException:
        started.close()
        raise
    yield from started
