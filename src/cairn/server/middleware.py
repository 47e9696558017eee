"""Wraps every HTTP request: its id, the API key, the size of its body, a line in the log.

Plain ASGI, so that the route that answers a client sees it leave.
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
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, TextIO

from starlette.types import Message, Receive, Scope, Send

from cairn.errors import ConfigError
from cairn.server.api_error import ApiError
from cairn.server.metrics import Metrics
from cairn.server.options import ServeConfig

if TYPE_CHECKING:
    from fastapi import FastAPI

_NO_KEY = ("/", "/health", "/docs", "/openapi.json")
_NO_KEY_FOLDER = "/web/"
_POLLED = ("/health", "/metrics", "/stats")  # all the time, by machines: not logged
_DISCARDED, _DISCARD_SECONDS = 8, 5.0  # of a body that is too large: multiples of the limit, time
_REQUEST_ID = re.compile(rb"[\x21-\x7e]{1,128}")
_KEY = "cairn_record"
_LOGGED = (
    *("id", "method", "path", "status", "ttft"),
    *("prompt_tokens", "completion_tokens", "cached_tokens", "finish", "error"),
)


@dataclass(slots=True)
class Record:
    """What is known of one HTTP request, for the log and for the route that answers it."""

    id: str
    method: str
    path: str
    arrival: float  # time.perf_counter
    send: Send
    """The server's own. What lies between it and a route concerns the start of a response only, and
    a stream sends too often to go through it."""
    status: int = 0
    prompt_tokens: int | None = None
    completion_tokens: int | None = None
    cached_tokens: int | None = None
    finish: list[str] | None = None
    ttft: float | None = None
    error: str | None = None
    client_fields: dict[str, Any] = field(default_factory=dict)
    """What the client wants in the log: user, metadata and the like."""


def record_of(scope: Scope) -> Record:
    record: Record = scope["state"][_KEY]
    return record


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

    def write(self, record: Record) -> None:
        if self._file is None:
            return
        line = {
            "time": round(time.time(), 3),
            "seconds": round(time.perf_counter() - record.arrival, 4),
            **{name: getattr(record, name) for name in _LOGGED},
            **record.client_fields,
        }
        known = {key: value for key, value in line.items() if value is not None}
        self._file.write(json.dumps(known) + "\n")

    def close(self) -> None:
        if self._file is not None and self._file is not sys.stderr:
            self._file.close()


class RequestMiddleware:
    def __init__(self, app: FastAPI, serve: ServeConfig, metrics: Metrics, log: RequestLog) -> None:
        self._app = app
        self._paths = {getattr(route, "path", "") for route in app.routes}
        self._key = None if serve.api_key is None else serve.api_key.encode()
        self._max_body = serve.max_body_bytes
        self._metrics = metrics
        self._log = log

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        headers = dict(scope["headers"])
        given = headers.get(b"x-request-id")
        valid = given is not None and _REQUEST_ID.fullmatch(given) is not None
        name = given if given and valid else f"req-{secrets.token_hex(12)}".encode()
        path = scope["path"][:200]
        record = Record(name.decode(), scope["method"], path, time.perf_counter(), send)
        scope.setdefault("state", {})[_KEY] = record
        body = _Body(receive, self._max_body)
        started = False

        async def send_with_id(message: Message) -> None:
            nonlocal started
            if message["type"] == "http.response.start":
                started = True
                record.status = message["status"]
                message = {**message, "headers": [*message["headers"], (b"x-request-id", name)]}
            await send(message)

        try:
            if given is not None and not valid:
                raise ApiError(400, "X-Request-ID must be 1 to 128 printable ASCII characters")
            self._check_key(path, headers)
            body.check_length(headers)
            await self._app(scope, body.receive, send_with_id)
        except ApiError as error:
            if started:
                raise
            record.error = str(error)
            if error.status == 413:
                await body.discard()
            await error.response()(scope, receive, send_with_id)
        finally:
            known = path if path in self._paths else "other"
            self._metrics.http.labels(known, str(record.status)).inc()
            polled = path in _POLLED or path.startswith(_NO_KEY_FOLDER)
            if record.error is not None or not polled:
                self._log.write(record)

    def _check_key(self, path: str, headers: dict[bytes, bytes]) -> None:
        if self._key is None or path in _NO_KEY or path.startswith(_NO_KEY_FOLDER):
            return
        kind, _, key = headers.get(b"authorization", b"").partition(b" ")
        if kind.lower() != b"bearer" or not hmac.compare_digest(key.strip(), self._key):
            raise ApiError(
                401, "this server needs an API key: Authorization: Bearer KEY", code="invalid_key"
            )


class _Body:
    """Counts the bytes that arrive, whatever the headers say."""

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
        """Read on for a while: a client that is cut off while it sends does not see the error."""
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
