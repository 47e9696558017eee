"""A client that costs little, so that a load generator measures the server and not itself.

HTTP/1.1, one connection per request; answers are read line by line as they come.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from typing import Any
from urllib.parse import urlsplit

from cairn.errors import CairnError, ConfigError

_PIECE = 1 << 16
_HEAD = 1 << 16


class HttpError(CairnError):
    """The server answers with an error, or not in HTTP."""


class Target:
    def __init__(self, url: str, api_key: str | None, timeout: float) -> None:
        parts = urlsplit(url)
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise ConfigError(f"--url is {url!r}; it must be like http://127.0.0.1:8000/v1")
        self._host = parts.hostname
        self._ssl = parts.scheme == "https"
        self._port = parts.port or (443 if self._ssl else 80)
        self._path = parts.path.rstrip("/")
        self._timeout = timeout
        self._head = f"Host: {parts.netloc}\r\nConnection: close\r\nAccept-Encoding: identity\r\n"
        if api_key is not None:
            self._head += f"Authorization: Bearer {api_key}\r\n"

    async def read(self, path: str, body: dict[str, Any] | None = None) -> bytes:
        """The whole answer."""
        return b"".join([piece async for piece in self.pieces(path, body)])

    async def lines(self, path: str, body: dict[str, Any]) -> AsyncIterator[bytes]:
        held = b""
        async for piece in self.pieces(path, body):
            *lines, held = (held + piece).split(b"\n")
            for line in lines:
                yield line.rstrip(b"\r")

    async def pieces(self, path: str, body: dict[str, Any] | None = None) -> AsyncIterator[bytes]:
        """The answer's body as it comes. Raises HttpError unless the status is 200."""
        try:
            async with asyncio.timeout(self._timeout):
                reader, writer = await asyncio.open_connection(
                    self._host, self._port, ssl=self._ssl or None, limit=_HEAD
                )
                try:
                    writer.write(self._request(path, body))
                    status, headers = await _read_head(reader)
                    body_pieces = _body(reader, headers)
                    if status != 200:
                        text = b"".join([piece async for piece in body_pieces])
                        raise HttpError(f"{status} {text[:300].decode(errors='replace')}")
                    async for piece in body_pieces:
                        yield piece
                finally:
                    writer.close()
        except TimeoutError as error:
            raise HttpError(f"no complete answer within {self._timeout:g} s") from error
        except (OSError, asyncio.IncompleteReadError, asyncio.LimitOverrunError) as error:
            raise HttpError(f"the connection failed: {error}") from error

    def _request(self, path: str, body: dict[str, Any] | None) -> bytes:
        method, data = ("GET", b"") if body is None else ("POST", json.dumps(body).encode())
        head = f"{method} {self._path}{path} HTTP/1.1\r\n{self._head}"
        if body is not None:
            head += f"Content-Type: application/json\r\nContent-Length: {len(data)}\r\n"
        return head.encode() + b"\r\n" + data


async def _read_head(reader: asyncio.StreamReader) -> tuple[int, dict[str, str]]:
    first, *lines = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1").split("\r\n")
    words = first.split(" ", 2)
    if len(words) < 2 or not words[0].startswith("HTTP/1.") or not words[1].isdigit():
        raise HttpError(f"the answer is not HTTP: {first[:80]!r}")
    pairs = (line.partition(":") for line in lines if line)
    return int(words[1]), {name.lower(): value.strip() for name, _, value in pairs}


async def _body(reader: asyncio.StreamReader, headers: dict[str, str]) -> AsyncIterator[bytes]:
    if headers.get("transfer-encoding", "").lower() == "chunked":
        while size := int((await reader.readuntil(b"\r\n")).partition(b";")[0], 16):
            yield (await reader.readexactly(size + 2))[:-2]
        return
    left = int(headers["content-length"]) if "content-length" in headers else None
    while left is None or left > 0:
        piece = await reader.read(_PIECE if left is None else min(left, _PIECE))
        if not piece:
            if left is not None:
                raise HttpError("the answer ends too early")
            return
        left = None if left is None else left - len(piece)
        yield piece
