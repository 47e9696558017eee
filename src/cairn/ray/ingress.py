"""The deployment that Ray's proxy calls: it forwards each request to a replica."""

from __future__ import annotations

from typing import Any

from ray.exceptions import RayActorError
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from cairn.ray.affinity import blocks_of
from cairn.ray.call import Call, Head
from cairn.ray.prompt_text import routing_text
from cairn.server.api_error import ApiError

_ID_HEADER = b"x-request-id"
_RETRY_AFTER = 1
_LOST = "the replica that answered this request died; send it again, another one will answer"


class Ingress:
    def __init__(self, replicas: Any, max_body: int) -> None:
        self._replicas = replicas.options(method_name="call", stream=True)
        self._max_body = max_body

    async def __call__(self, request: Request) -> Response:
        try:
            parts = self._replicas.remote(_call(request, await self._body(request)))
            try:
                head: Head = await anext(parts)
            except RayActorError as error:
                raise _lost() from error
        except ApiError as error:
            return Response(error.encoded(), error.status, error.headers())
        return _Relayed(head, parts)

    async def _body(self, request: Request) -> bytes:
        parts, size = [], 0
        async for part in request.stream():
            size += len(part)
            if size > self._max_body:
                raise ApiError(
                    413,
                    f"the body is larger than max_body_mib, {self._max_body / 2**20:g} MiB; send "
                    "less, or start the application with a larger max_body_mib",
                    code="body_too_large",
                )
            parts.append(part)
        return b"".join(parts)


def _call(request: Request, body: bytes) -> Call:
    # Ray may mount the application under a path prefix, which replicas do not know.
    path = request.scope["path"].removeprefix(request.scope.get("root_path", ""))
    return Call(
        method=request.method,
        path=path,
        query=request.scope["query_string"],
        headers=list(request.headers.raw),
        body=body,
        blocks=blocks_of(routing_text(path, body)),
    )


class _Relayed(Response):
    """Forwards a replica's answer part by part. Ray cancels its task if the client disconnects."""

    def __init__(self, head: Head, parts: Any) -> None:
        super().__init__(status_code=head.status)
        # Ray's proxy adds the request id itself.
        self.raw_headers = [(name, value) for name, value in head.headers if name != _ID_HEADER]
        self._parts = parts

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        start = {"status": self.status_code, "headers": self.raw_headers}
        await send({"type": "http.response.start", **start})
        try:
            async for part in self._parts:
                await send({"type": "http.response.body", "body": part, "more_body": True})
            last = b""
        except RayActorError:
            if not self._is_events():
                raise  # closes the connection
            last = b"data: " + _lost().encoded() + b"\n\n"
        finally:
            self._parts.cancel()
        await send({"type": "http.response.body", "body": last})

    def _is_events(self) -> bool:
        return self.headers.get("content-type", "").startswith("text/event-stream")


def _lost() -> ApiError:
    return ApiError(503, _LOST, code="replica_lost", retry_after=_RETRY_AFTER)
