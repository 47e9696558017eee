"""A cheap HTTP client, so that a load generator measures the server and not itself.

HTTP/1.1, one connection per request. While answers arrive, the client only stores their bytes and
arrival times; they are parsed when all have ended.
"""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import urlsplit

from cairn.errors import CairnError, ConfigError, install

try:
    import httptools
except ImportError as missing:
    raise ConfigError(f"bench serve needs httptools; {install('server')}") from missing


class HttpError(CairnError):
    """The server's answer is an error, not HTTP, or incomplete."""


class _Parsed:
    """What httptools calls while it parses an answer."""

    def __init__(self) -> None:
        self.begun = self.complete = self.has_end = False
        self.body: list[bytes] = []

    def on_header(self, name: bytes, value: bytes) -> None:
        """Without one of these headers the end of the connection is that of the answer."""
        self.has_end |= name.lower() in (b"content-length", b"transfer-encoding")

    def on_headers_complete(self) -> None:
        self.begun = True

    def on_body(self, body: bytes) -> None:
        self.body.append(body)

    def on_message_complete(self) -> None:
        self.complete = True


@dataclass(slots=True)
class Reply:
    """An answer before it is parsed: its pieces as they arrived, and when each arrived."""

    pieces: list[bytes] = field(default_factory=list)
    moments: list[float] = field(default_factory=list)
    failure: str | None = None
    """Why the connection ended before the answer did."""

    def body(self) -> bytes:
        """The whole body. Raises HttpError unless it is complete and the status is 200."""
        return b"".join(data for _, data in self._content())

    def events(self) -> Iterator[tuple[float, dict[str, Any]]]:
        """The JSON objects of an event stream, each with the time at which its line was complete.

        Raises HttpError at the end of an incomplete answer."""
        held = b""
        for moment, data in self._content():
            *lines, held = (held + data).split(b"\n")
            for line in lines:
                if line.startswith(b"data: {"):
                    yield moment, json.loads(line[6:])

    def _content(self) -> Iterator[tuple[float, bytes]]:
        """Parts of the body, each with its time of arrival."""
        parsed = _Parsed()
        parser = httptools.HttpResponseParser(parsed)
        refused = b""
        for moment, piece in zip(self.moments, self.pieces, strict=True):
            try:
                parser.feed_data(piece)
            except httptools.HttpParserError as error:
                raise HttpError(f"the answer is not HTTP: {error}") from error
            data = b"".join(parsed.body)
            parsed.body.clear()
            if parsed.begun and parser.get_status_code() != 200:
                refused += data
            elif data:
                yield moment, data
        if not parsed.begun:
            raise HttpError(self.failure or "the server closed the connection without an answer")
        if parser.get_status_code() != 200:
            text = refused[:300].decode(errors="replace")
            raise HttpError(f"{parser.get_status_code()} {text}")
        if not parsed.complete and (parsed.has_end or self.failure):
            raise HttpError(self.failure or "the answer ends too early")


class Target:
    """A server: its address, and the headers of every request."""

    def __init__(self, url: str, api_key: str | None, timeout: float) -> None:
        parts = urlsplit(url)
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise ConfigError(f"--url is {url!r}; it must be like http://127.0.0.1:8000/v1")
        self.host = parts.hostname
        self._ssl = parts.scheme == "https"
        self.port = parts.port or (443 if self._ssl else 80)
        self._path = parts.path.rstrip("/")
        self._timeout = timeout
        self._head = f"Host: {parts.netloc}\r\nConnection: close\r\nAccept-Encoding: identity\r\n"
        if api_key is not None:
            self._head += f"Authorization: Bearer {api_key}\r\n"

    async def read(self, path: str) -> bytes:
        """GET a path of the server, such as /metrics, or one below the API: ./models."""
        path = self._path + path[1:] if path.startswith("./") else path
        reply = await self.exchange(f"GET {path} HTTP/1.1\r\n{self._head}\r\n".encode())
        return reply.body()

    def post(self, path: str, body: dict[str, Any]) -> bytes:
        """The bytes of a POST request, to be made before the clock starts."""
        data = json.dumps(body, separators=(",", ":")).encode()
        own = f"Content-Type: application/json\r\nContent-Length: {len(data)}\r\n"
        return f"POST {self._path}{path} HTTP/1.1\r\n{self._head}{own}\r\n".encode() + data

    async def exchange(self, request: bytes) -> Reply:
        """Send a request and store the answer until the server closes the connection."""
        reply = Reply()
        loop = asyncio.get_running_loop()
        ended: asyncio.Future[None] = loop.create_future()
        try:
            async with asyncio.timeout(self._timeout):
                transport, _ = await loop.create_connection(
                    lambda: _Keeper(reply, ended), self.host, self.port, ssl=self._ssl or None
                )
                try:
                    transport.write(request)
                    await ended
                finally:
                    transport.abort()
        except TimeoutError:
            reply.failure = f"no complete answer within {self._timeout:g} s; raise --timeout"
        except OSError as error:
            reply.failure = f"the connection failed: {error}"
        return reply


class _Keeper(asyncio.Protocol):
    """Stores what arrives."""

    def __init__(self, reply: Reply, ended: asyncio.Future[None]) -> None:
        self._reply = reply
        self._ended = ended

    def data_received(self, data: bytes) -> None:
        self._reply.moments.append(time.perf_counter())
        self._reply.pieces.append(data)

    def connection_lost(self, exc: Exception | None) -> None:
        if not self._ended.done():
            if exc is None:
                self._ended.set_result(None)
            else:
                self._ended.set_exception(exc)
