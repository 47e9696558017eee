"""A client's connection: uvicorn's protocol, with limits on what a client may hold.

uvicorn limits neither the size of headers nor the time in which headers and bodies must come.
"""

from __future__ import annotations

import asyncio
import resource
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

from uvicorn.protocols.http.httptools_impl import STATUS_LINE, HttpToolsProtocol

from cairn.server.api_error import ApiError

_MOST_HEADER_BYTES = 64 * 1024
_MOST_FRAMING_BYTES = 16 * 2**20  # of a body that comes in small chunks
_MOST_FILES = 65536
_RESERVED_FILES = 64  # descriptors for everything but connections


@dataclass
class ConnectionLimits:
    seconds: float
    """That a client may take to send its headers, and then again its body."""
    most: int
    """Connections at once."""
    waiting: dict[Connection, None] = field(default_factory=dict)
    """Connections whose client has something to send, oldest first. If there are too many
    connections, these are closed."""


def raise_file_limit() -> int:
    """Raise the limit on descriptors as far as allowed. Returns how many connections fit."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = _MOST_FILES if hard == resource.RLIM_INFINITY else min(hard, _MOST_FILES)
    if wanted > soft:
        with suppress(ValueError, OSError):  # macOS may refuse
            resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
            soft = wanted
    return max(soft - _RESERVED_FILES, soft // 2)


class Connection(HttpToolsProtocol):
    def __init__(self, limits: ConnectionLimits, **given: Any) -> None:
        super().__init__(**given)
        self._limits = limits
        self._header_bytes = 0  # of the request, as far as they are complete
        self._body_bytes = 0
        self._received = 0  # bytes of the request, with headers that are not complete
        self._refusal: ApiError | None = None
        self._deadline: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        if len(self.connections) > self._limits.most:
            oldest = next(iter(self._limits.waiting), self)
            oldest._wait_for(None)
            oldest.transport.abort()
        if not transport.is_closing():
            self._wait_for("its headers")

    def connection_lost(self, exc: Exception | None) -> None:
        self._wait_for(None)
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        if self._deadline is None and (self.cycle is None or self.cycle.response_complete):
            self._wait_for("its headers")
        self._received += len(data)
        super().data_received(data)
        framing = min(8 * self._body_bytes, _MOST_FRAMING_BYTES)
        if self._received - self._body_bytes > _MOST_HEADER_BYTES + framing:
            self._refuse_headers()
            self.send_400_response("")

    # -- called by the parser -----------------------------------------------------------------

    def on_message_begin(self) -> None:
        self._header_bytes = 0
        super().on_message_begin()

    def on_url(self, url: bytes) -> None:
        self._count(len(url))
        super().on_url(url)

    def on_header(self, name: bytes, value: bytes) -> None:
        self._count(len(name) + len(value))
        super().on_header(name, value)

    def on_headers_complete(self) -> None:
        self._wait_for("its body")
        super().on_headers_complete()

    def on_body(self, body: bytes) -> None:
        self._body_bytes += len(body)
        super().on_body(body)

    def on_message_complete(self) -> None:
        self._wait_for(None)
        self._received = self._body_bytes = 0
        super().on_message_complete()

    def on_response_complete(self) -> None:
        super().on_response_complete()
        if self.timeout_keep_alive_task is not None:
            self._limits.waiting[self] = None

    # -- limits -------------------------------------------------------------------------------

    def _count(self, size: int) -> None:
        """Stop the parser if the headers are too large. Then uvicorn sends a response."""
        self._header_bytes += size
        if self._header_bytes > _MOST_HEADER_BYTES:
            raise self._refuse_headers()

    def _refuse_headers(self) -> ApiError:
        most = _MOST_HEADER_BYTES // 1024
        self._refusal = ApiError(431, f"the headers are larger than {most} KiB; send less")
        return self._refusal

    def _wait_for(self, what: str | None) -> None:
        """Begin to wait for something that the client has to send, or for nothing."""
        if self._deadline is not None:
            self._deadline.cancel()
            self._deadline = None
        self._limits.waiting.pop(self, None)
        if what is not None:
            self._limits.waiting[self] = None
            self._deadline = self.loop.call_later(self._limits.seconds, self._give_up, what)

    def _give_up(self, what: str) -> None:
        seconds = f"{self._limits.seconds:g} s, the server's client_timeout"
        self._refusal = ApiError(408, f"the client did not send {what} within {seconds}")
        self.send_400_response("")

    def send_400_response(self, msg: str) -> None:
        """Send an error, unless a response has begun, and close. uvicorn calls it too."""
        error = self._refusal or ApiError(400, msg)
        body = error.encoded()
        headers = {**error.headers(), "content-length": str(len(body)), "connection": "close"}
        lines = [f"{name}: {value}\r\n".encode() for name, value in headers.items()]
        if self.cycle is None or self.cycle.response_complete or not self.cycle.response_started:
            self.transport.write(b"".join([STATUS_LINE[error.status], *lines, b"\r\n", body]))
        self.transport.close()
