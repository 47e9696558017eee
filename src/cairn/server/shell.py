"""Around every HTTP request: its id, the key, the size of its body, a line in the log.

Plain ASGI, so that a client's leaving is seen by whoever answers it.
"""

from __future__ import annotations

import asyncio
import contextlib
import hmac
import json
import re
import secrets
import sys
import time
from typing import TextIO

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from cairn.errors import ConfigError
from cairn.server.api_error import ApiError
from cairn.server.metrics import Metrics
from cairn.server.options import ServeConfig
from cairn.server.record import Record

_OPEN_PATHS = ("/", "/health", "/docs", "/openapi.json")
_OPEN_FOLDER = "/web/"
_ROUTES = {
    "/",
    "/v1/models",
    "/v1/completions",
    "/v1/chat/completions",
    "/tokenize",
    "/detokenize",
    "/health",
    "/metrics",
    "/stats",
    "/get_model_info",
    "/model_info",
    "/get_server_info",
    "/server_info",
    "/docs",
    "/openapi.json",
}
_POLLED = ("/health", "/metrics", "/stats")  # by machines, all the time: not for the log
_DISCARDED, _DISCARD_SECONDS = 8, 5.0  # of a body that is too large: times the limit, for so long
_REQUEST_ID = re.compile(rb"[\x21-\x7e]{1,128}")


class RequestLog:
    """One line of JSON per request."""

    def __init__(self, target: str) -> None:
        self._file: TextIO | None = None
        if target == "-":
            self._file = sys.stderr
        elif target != "off":
            try:
                self._file = open(target, "a", encoding="utf-8", buffering=1)  # noqa: SIM115
            except OSError as error:
                raise ConfigError(
                    f"request_log {target} cannot be written: {error.strerror}; name another file, "
                    "- or off"
                ) from error

    def write(self, record: Record, seconds: float) -> None:
        if self._file is None:
            return
        line = {
            "time": round(time.time(), 3),
            "id": record.id,
            "method": record.method,
            "path": record.path,
            "status": record.status,
            "seconds": round(seconds, 4),
            "ttft": None if record.ttft is None else round(record.ttft, 4),
            "prompt_tokens": record.prompt_tokens,
            "completion_tokens": record.completion_tokens,
            "cached_tokens": record.cached_tokens,
            "finish": record.finish,
            "error": record.error,
            **record.told,
        }
        told = {key: value for key, value in line.items() if value is not None}
        self._file.write(json.dumps(told) + "\n")

    def close(self) -> None:
        if self._file is not None and self._file is not sys.stderr:
            self._file.close()


class Shell:
    def __init__(self, app: ASGIApp, serve: ServeConfig, metrics: Metrics, log: RequestLog) -> None:
        self._app = app
        self._key = None if serve.api_key is None else serve.api_key.encode()
        self._max_body = serve.max_body_bytes
        self._metrics = metrics
        self._log = log

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        begin = time.perf_counter()
        headers = dict(scope["headers"])
        given = headers.get(b"x-request-id")
        valid = given is not None and _REQUEST_ID.fullmatch(given) is not None
        name = given.decode() if given is not None and valid else f"req-{secrets.token_hex(12)}"
        record = Record(name, scope["method"], scope["path"][:200], begin, send)
        record.attach(scope)
        body = _Body(receive, self._max_body)
        started = False

        async def sending(message: Message) -> None:
            nonlocal started
            if message["type"] == "http.response.start":
                started = True
                record.status = message["status"]
                message = {
                    **message,
                    "headers": [*message["headers"], (b"x-request-id", name.encode())],
                }
            await send(message)

        try:
            try:
                if given is not None and not valid:
                    raise ApiError(400, "X-Request-ID must be 1 to 128 printable ASCII characters")
                self._check_key(scope["path"], headers)
                body.check_length(headers)
                await self._app(scope, body.receive, sending)
            except ApiError as error:
                if started:
                    raise
                record.error = str(error)
                if error.status == 413:
                    await body.discard()
                await _refuse(error, sending)
        finally:
            path = record.path if record.path in _ROUTES else "other"
            self._metrics.http.labels(path, str(record.status)).inc()
            if record.error is not None or not self._is_noise(record.path):
                self._log.write(record, time.perf_counter() - begin)

    def _is_noise(self, path: str) -> bool:
        return path in _POLLED or path.startswith(_OPEN_FOLDER)

    def _check_key(self, path: str, headers: dict[bytes, bytes]) -> None:
        if self._key is None or path in _OPEN_PATHS or path.startswith(_OPEN_FOLDER):
            return
        kind, _, key = headers.get(b"authorization", b"").partition(b" ")
        if kind.lower() != b"bearer" or not hmac.compare_digest(key.strip(), self._key):
            raise ApiError(
                401, "this server needs an API key: Authorization: Bearer KEY", code="invalid_key"
            )


class _Body:
    """Counts what comes in, whatever its headers say."""

    def __init__(self, receive: Receive, limit: int) -> None:
        self._receive = receive
        self._limit = limit
        self._size = 0

    def check_length(self, headers: dict[bytes, bytes]) -> None:
        length = headers.get(b"content-length", b"0")
        if length.isdigit() and int(length) > self._limit:
            raise self._too_large()

    async def receive(self) -> Message:
        message = await self._receive()
        if message["type"] == "http.request":
            self._size += len(message.get("body", b""))
            if self._size > self._limit:
                raise self._too_large()
        return message

    async def discard(self) -> None:
        """Read on for a while: a client that is cut off while it sends does not see why."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(_DISCARD_SECONDS):
                while self._size < _DISCARDED * self._limit:
                    message = await self._receive()
                    self._size += len(message.get("body", b""))
                    if message["type"] != "http.request" or not message.get("more_body"):
                        return

    def _too_large(self) -> ApiError:
        return ApiError(
            413,
            f"the body is larger than max_body_mib, {self._limit / 2**20:g} MiB; send less, or "
            "start the server with a larger --max-body-mib",
            code="body_too_large",
        )


async def _refuse(error: ApiError, send: Send) -> None:
    body = error.encoded()
    headers = {**error.headers(), "content-length": str(len(body))}
    if error.status == 413:
        headers["connection"] = "close"  # there may be more of the body
    raw = [(key.encode(), value.encode()) for key, value in headers.items()]
    await send({"type": "http.response.start", "status": error.status, "headers": raw})
    await send({"type": "http.response.body", "body": body})
