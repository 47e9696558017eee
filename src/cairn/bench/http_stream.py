"""A client that costs little, so that a load generator measures the server and not itself.

HTTP/1.1, one connection per request. While answers come in, the client only keeps their bytes and
the moments they came; they are taken apart when all have ended.
"""

from __future__ import annotations

import asyncio
import json
import time
from bisect import bisect_right
from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import accumulate
from typing import Any
from urllib.parse import urlsplit

from cairn.errors import CairnError, ConfigError

_BUFFER = 1 << 18


class HttpError(CairnError):
    """The server answers with an error, or not in HTTP, or not at all."""


@dataclass(slots=True)
class Reply:
    """What came back, unread: pieces as they arrived, and when each of them did."""

    pieces: list[bytes] = field(default_factory=list)
    moments: list[float] = field(default_factory=list)
    failure: str | None = None
    """Why the connection ended before the answer did."""

    def body(self) -> bytes:
        """The whole body. Raises HttpError unless there is one and the status is 200."""
        return b"".join(data for data, _ in self._content())

    def events(self) -> Iterator[tuple[float, dict[str, Any]]]:
        """The JSON objects of an event stream, each with the moment at which its line was there.

        Raises HttpError at the end of what has come, if that is not the end of the answer."""
        ends = list(accumulate(map(len, self.pieces)))
        held = b""
        for data, offset in self._content():
            offset -= len(held)  # of the first byte of `held`, were it not for chunk headers
            *lines, held = (held + data).split(b"\n")
            for line in lines:
                offset += len(line) + 1
                if line.startswith(b"data: {"):
                    arrived = self.moments[bisect_right(ends, offset - 1)]
                    yield arrived, json.loads(line[6:])

    def _content(self) -> Iterator[tuple[bytes, int]]:
        """Parts of the body, each with its offset in all that came."""
        raw = b"".join(self.pieces)
        head, blank, _ = raw.partition(b"\r\n\r\n")
        if not blank:
            raise HttpError(self.failure or "the server closed the connection without an answer")
        first, *lines = head.decode("latin-1").split("\r\n")
        words = first.split(" ", 2)
        if len(words) < 2 or not words[0].startswith("HTTP/1.") or not words[1].isdigit():
            raise HttpError(f"the answer is not HTTP: {first[:80]!r}")
        headers = {
            name.strip().lower(): value.strip()
            for name, _, value in (line.partition(":") for line in lines)
        }
        content = self._unframed(raw, len(head) + 4, headers)
        if words[1] != "200":
            text = b"".join(data for data, _ in content)
            raise HttpError(f"{words[1]} {text[:300].decode(errors='replace')}")
        yield from content

    def _unframed(
        self, raw: bytes, offset: int, headers: dict[str, str]
    ) -> Iterator[tuple[bytes, int]]:
        if headers.get("transfer-encoding", "").lower() != "chunked":
            yield raw[offset:], offset
            if "content-length" not in headers:  # it ends with the connection
                if self.failure is not None:
                    raise HttpError(self.failure)
            elif len(raw) - offset < int(headers["content-length"]):
                raise HttpError(self.failure or "the answer ends too early")
            return
        while (line_end := raw.find(b"\r\n", offset)) >= 0:
            size = int(raw[offset:line_end].partition(b";")[0], 16)
            if size == 0:
                return
            offset = line_end + 2
            if offset + size > len(raw):
                break
            yield raw[offset : offset + size], offset
            offset += size + 2
        raise HttpError(self.failure or "the answer ends too early")


class Target:
    """A server: its address, and what every request to it has in its head."""

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
        self._buffer = memoryview(bytearray(_BUFFER))

    async def read(self, path: str) -> bytes:
        """The body behind a path beside the API, such as /metrics, or below it: ./models."""
        path = self._path + path[1:] if path.startswith("./") else path
        reply = await self.exchange(f"GET {path} HTTP/1.1\r\n{self._head}\r\n".encode())
        return reply.body()

    def post(self, path: str, body: dict[str, Any]) -> bytes:
        """The bytes of a request, made before the clock starts."""
        data = json.dumps(body, separators=(",", ":")).encode()
        head = (
            f"POST {self._path}{path} HTTP/1.1\r\n{self._head}"
            f"Content-Type: application/json\r\nContent-Length: {len(data)}\r\n\r\n"
        )
        return head.encode() + data

    async def exchange(self, request: bytes) -> Reply:
        """Send a request and keep what comes until the server closes the connection."""
        reply = Reply()
        loop = asyncio.get_running_loop()
        ended: asyncio.Future[None] = loop.create_future()
        try:
            async with asyncio.timeout(self._timeout):
                transport, _ = await loop.create_connection(
                    lambda: _Keeper(reply, self._buffer, ended),
                    self.host,
                    self.port,
                    ssl=self._ssl or None,
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


class _Keeper(asyncio.BufferedProtocol):
    """Puts what arrives into a reply. All connections share the buffer: each empties it at once."""

    def __init__(self, reply: Reply, buffer: memoryview, ended: asyncio.Future[None]) -> None:
        self._pieces = reply.pieces
        self._moments = reply.moments
        self._buffer = buffer
        self._ended = ended

    def get_buffer(self, sizehint: int) -> memoryview:
        return self._buffer

    def buffer_updated(self, nbytes: int) -> None:
        self._moments.append(time.perf_counter())
        self._pieces.append(bytes(self._buffer[:nbytes]))

    def connection_lost(self, exc: Exception | None) -> None:
        if self._ended.done():
            return
        if exc is None:
            self._ended.set_result(None)
        else:
            self._ended.set_exception(exc)
