"""Wraps every HTTP request: its host, its id, the API key, the size of its body, a line in the log.

Plain ASGI, so that the route that answers a client sees it leave.
"""

from __future__ import annotations

import asyncio
import contextlib
import hmac
import ipaddress
import json
import re
import secrets
import socket
import sys
import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from starlette.types import Message, Receive, Scope, Send

from cairn.errors import ConfigError
from cairn.server.api_error import ApiError
from cairn.server.log import LineWriter
from cairn.server.metrics import Metrics
from cairn.server.options import ServeConfig

if TYPE_CHECKING:
    from fastapi import FastAPI

_NO_KEY = ("/", "/health", "/docs", "/openapi.json")
_NO_KEY_FOLDER = "/web/"
_POLLED = ("/health", "/metrics", "/stats")  # all the time, by machines: not logged
_BODIES = 32  # all bodies that are being read may have this many times the largest size
_DISCARDED, _DISCARD_SECONDS = 8, 5.0  # of a body that is too large: multiples of the limit, time
_REQUEST_ID = re.compile(rb"[\x21-\x7e]{1,128}")
_KEY = "cairn_record"
_LOGGED = (
    *("id", "method", "path", "status", "ttft"),
    *("prompt_tokens", "completion_tokens", "cached_tokens", "drafted_tokens", "accepted_tokens"),
    *("finish", "error"),
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
    drafted_tokens: int | None = None
    accepted_tokens: int | None = None
    finish: list[str] | None = None
    ttft: float | None = None
    error: str | None = None
    ignored: list[str] = field(default_factory=list)
    """Fields of the body that were not known, and not used."""
    client_fields: dict[str, Any] = field(default_factory=dict)
    """What the client wants in the log: user, metadata and the like."""

    def client_left(self) -> None:
        self.status, self.error = 499, "the client left"


def record_of(scope: Scope) -> Record:
    record: Record = scope["state"][_KEY]
    return record


class RequestLog:
    """One line of JSON per request."""

    def __init__(self, target: str) -> None:
        self._writer: LineWriter | None = None
        if target == "-":
            self._writer = LineWriter(sys.stderr)
        elif target != "off":
            try:
                self._writer = LineWriter(open(target, "a", encoding="utf-8"))  # noqa: SIM115
            except OSError as error:
                raise ConfigError(
                    f"request_log {target} cannot be written: {error.strerror}; name another file, "
                    "- or off"
                ) from error

    def write(self, record: Record) -> None:
        if self._writer is None:
            return
        line = {
            "time": round(time.time(), 3),
            "seconds": round(time.perf_counter() - record.arrival, 4),
            **{name: getattr(record, name) for name in _LOGGED},
            **record.client_fields,
        }
        if record.ignored:
            line["ignored"] = record.ignored
        known = {key: value for key, value in line.items() if value is not None}
        self._writer.write(json.dumps(known))

    def close(self) -> None:
        if self._writer is not None:
            self._writer.close()


class RequestMiddleware:
    def __init__(self, app: FastAPI, serve: ServeConfig, metrics: Metrics, log: RequestLog) -> None:
        self._app = app
        self._paths = {getattr(route, "path", "") for route in app.routes}
        self._key = None if serve.api_key is None else serve.api_key.encode()
        self._hosts = _allowed_hosts(serve)
        self._bodies = _Bodies(serve.max_body_bytes)
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
        body = _Body(receive, self._bodies)
        started = False

        async def send_with_id(message: Message) -> None:
            nonlocal started
            if message["type"] == "http.response.start":
                started = True
                record.status = message["status"]
                own = [(b"x-request-id", name)]
                if record.ignored:
                    own.append((b"x-cairn-ignored-fields", _header(record.ignored)))
                message = {**message, "headers": [*message["headers"], *own]}
            await send(message)

        try:
            if given is not None and not valid:
                raise ApiError(400, "X-Request-ID must be 1 to 128 printable ASCII characters")
            self._check_host(headers)
            self._check_key(path, headers)
            body.check_length(headers)
            await self._app(scope, body.receive, send_with_id)
        except ApiError as error:
            if started:
                raise
            record.error = str(error)
            if error.status == 413:
                await body.discard()
            await error.response(path)(scope, receive, send_with_id)
        finally:
            body.release()
            known = path if path in self._paths else "other"
            self._metrics.http.labels(known, str(record.status)).inc()
            polled = path in _POLLED or path.startswith(_NO_KEY_FOLDER)
            if record.error is not None or not polled:
                self._log.write(record)

    def _check_host(self, headers: dict[bytes, bytes]) -> None:
        """A page of another site can reach this server under a name of that site (DNS rebinding).

        It cannot choose an address as the name, and it does not know the key.
        """
        if self._hosts is None:
            return
        given = headers.get(b"host", b"").decode("latin-1").lower()
        host = given.rpartition(":")[0] if re.search(r":[0-9]*$", given) else given
        name = host.removeprefix("[").removesuffix("]").removesuffix(".")
        if name not in self._hosts and not _is_address(name):
            raise ApiError(
                403,
                f"this server is not known as {name[:100]!a}; start it with --allowed-host "
                f"{name[:100]}, or with a key",
                code="host_not_allowed",
            )

    def _check_key(self, path: str, headers: dict[bytes, bytes]) -> None:
        if self._key is None or path in _NO_KEY or path.startswith(_NO_KEY_FOLDER):
            return
        kind, _, key = headers.get(b"authorization", b"").partition(b" ")
        if kind.lower() != b"bearer":
            key = headers.get(b"x-api-key", b"")  # Anthropic's clients
        if not hmac.compare_digest(key.strip(), self._key):
            raise ApiError(
                401, "this server needs an API key: Authorization: Bearer KEY", code="invalid_key"
            )


def _allowed_hosts(serve: ServeConfig) -> set[str] | None:
    """Names of this server besides addresses; None for any."""
    if "*" in serve.allowed_host or (serve.api_key is not None and not serve.allowed_host):
        return None
    own = ("localhost", "", socket.gethostname(), serve.host, *serve.allowed_host)
    return {name.lower() for name in own}


def _is_address(name: str) -> bool:
    try:
        ipaddress.ip_address(name)
    except ValueError:
        return False
    return True


class _Bodies:
    """The bodies that are being read, all together."""

    def __init__(self, largest: int) -> None:
        self.largest = largest
        self.most = _BODIES * largest
        self.held = 0


def _header(names: list[str]) -> bytes:
    """Names as a header's value: printable ASCII."""
    return re.sub(r"[^\x20-\x7e]", "?", ", ".join(names)).encode()


class _Body:
    """Counts the bytes that arrive, whatever the headers say."""

    def __init__(self, receive: Receive, all_bodies: _Bodies) -> None:
        self._receive = receive
        self._all = all_bodies
        self._limit = all_bodies.largest
        self._size = 0
        self._held = 0

    def check_length(self, headers: dict[bytes, bytes]) -> None:
        length = headers.get(b"content-length", b"0")
        if length.isdigit() and int(length) > self._limit:
            raise self._too_large()

    async def receive(self) -> Message:
        message = await self._receive()
        if message["type"] == "http.request":
            self._hold(len(message.get("body", b"")))
            if not message.get("more_body"):
                self.release()
        return message

    def _hold(self, size: int) -> None:
        self._size += size
        if self._size > self._limit:
            raise self._too_large()
        if self._all.held + size > self._all.most:
            raise ApiError(
                503,
                f"clients are sending {self._all.held >> 20} MiB at once; send it again later",
                code="too_many_bodies",
                retry_after=5,
            )
        self._held += size
        self._all.held += size

    def release(self) -> None:
        """The body is complete, or given up."""
        self._all.held -= self._held
        self._held = 0

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
