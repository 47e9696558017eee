"""The HTTP routes."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from functools import partial
from importlib import resources
from typing import Any

import msgspec
from fastapi import FastAPI, Request, Response
from fastapi.middleware.cors import CORSMiddleware
from fastapi.responses import FileResponse, JSONResponse
from fastapi.routing import APIRoute
from pydantic import BaseModel
from pydantic.json_schema import models_json_schema
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect
from starlette.types import ASGIApp

from cairn import __version__
from cairn.config import EngineConfig
from cairn.server import other_apis
from cairn.server.api_error import ApiError
from cairn.server.demo import Demo, add_demo_routes
from cairn.server.middleware import RequestLog, RequestMiddleware, record_of
from cairn.server.options import ServeConfig
from cairn.server.other_apis import add_messages, add_responses
from cairn.server.parse import read_body
from cairn.server.pdf_text import add_pdf_route
from cairn.server.schema import (
    ChatRequest,
    CompletionRequest,
    DetokenizeRequest,
    EmbeddingsRequest,
    TokenizeRequest,
)
from cairn.server.service import Service
from cairn.text.prose import PROSE

_WEB = resources.files("cairn.server") / "web"
_BODIES: dict[str, type[BaseModel]] = {
    **other_apis.BODIES,
    "/v1/chat/completions": ChatRequest,
    "/v1/completions": CompletionRequest,
    "/v1/embeddings": EmbeddingsRequest,
    "/tokenize": TokenizeRequest,
    "/detokenize": DetokenizeRequest,
}
_ERRORS = {
    "400": "A field that cannot be honoured; the error names it.",
    "401": "The API key is missing or wrong.",
    "403": "A server without a key was called by a name that it does not know.",
    "404": "Another model than this server's.",
    "413": "The body is too large.",
    "415": "The body is not application/json.",
    "429": "Too many requests at once; Retry-After says when to try again.",
    "500": "The engine failed on this request.",
    "503": "The model is loading, or the engine is being started anew.",
    "504": "The answer took longer than request_timeout.",
}
# The page loads nothing from elsewhere, and no other site may put it into a frame.
_PAGE_HEADERS = {
    "content-security-policy": "default-src 'self'; img-src 'self' data:; frame-ancestors 'none'",
    "cache-control": "no-cache",
}


def build_app(
    service: Service, engine: EngineConfig, serve: ServeConfig, log: RequestLog
) -> ASGIApp:
    demo = Demo(serve) if serve.demo else None

    @asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncIterator[None]:
        try:
            yield
        finally:
            log.close()
            if demo is not None:
                await demo.close()

    app = FastAPI(
        title="Cairn",
        version=__version__,
        summary="OpenAI's API, and which pages of the context each token was read from.",
        docs_url=None,
        redoc_url=None,
        lifespan=lifespan,
    )
    _add_errors(app)
    _add_model_routes(app, service, serve)
    add_messages(app, service, strict=serve.strict_fields)
    add_responses(app, service, strict=serve.strict_fields)
    _add_aliases(app)
    _add_state_routes(app, service, serve)
    _add_worker_routes(app, service, engine)
    _add_pages(app)
    add_pdf_route(app)
    if demo is not None:
        add_demo_routes(app, demo)
    app.openapi = _schema(app)  # type: ignore[method-assign]
    outer: ASGIApp = RequestMiddleware(app, serve, service.metrics, log)
    if serve.cors_origin:
        outer = CORSMiddleware(
            outer,
            allow_origins=list(serve.cors_origin),
            allow_methods=["GET", "POST", "DELETE"],
            allow_headers=["*"],  # official clients send a dozen of their own
            expose_headers=["x-request-id", "retry-after", "x-cairn-ignored-fields"],
        )
    return outer


def _add_model_routes(app: FastAPI, service: Service, serve: ServeConfig) -> None:
    def describe(name: str) -> dict[str, Any]:
        described = {"id": name, "object": "model", "created": service.created}
        owner = {"owned_by": "cairn", "root": name, "parent": None}
        return {**described, **owner, "max_model_len": service.max_tokens}

    read = partial(read_body, strict=serve.strict_fields)

    @app.post("/v1/chat/completions", tags=["OpenAI"], summary="Answer a conversation.")
    async def chat(request: Request) -> Response:
        return service.chat(await read(request, ChatRequest))

    @app.post("/v1/completions", tags=["OpenAI"], summary="Complete a prompt.")
    async def complete(request: Request) -> Response:
        return service.complete(await read(request, CompletionRequest))

    @app.post("/v1/embeddings", tags=["OpenAI"], summary="Pooled hidden states of texts.")
    async def embed(request: Request) -> Response:
        return service.embed(await read(request, EmbeddingsRequest))

    @app.get("/v1/models", tags=["OpenAI"], summary="The model this server has.")
    async def models() -> dict[str, Any]:
        return {"object": "list", "data": [describe(name) for name in service.names]}

    @app.get("/v1/models/{name:path}", tags=["OpenAI"], summary="One model.")
    async def model(name: str) -> dict[str, Any]:
        return describe(service.check_model(name))

    @app.post("/tokenize", tags=["tokens"], summary="Token ids of a text or a conversation.")
    async def tokenize(request: Request) -> Response:
        answer = await service.tokenize(await read(request, TokenizeRequest))
        # FastAPI would check each id, of which there may be a hundred thousand.
        return Response(msgspec.json.encode(answer), media_type="application/json")

    @app.post("/detokenize", tags=["tokens"], summary="The text of token ids.")
    async def detokenize(request: Request) -> dict[str, Any]:
        body = await read(request, DetokenizeRequest)
        service.check_model(body.model)
        return await service.detokenize(body.tokens)


def _add_aliases(app: FastAPI) -> None:
    """The same routes without /v1, for clients that leave it out."""
    for route in list(app.routes):
        if isinstance(route, APIRoute) and route.path.startswith("/v1/"):
            app.add_api_route(
                route.path.removeprefix("/v1"),
                route.endpoint,
                methods=list(route.methods or ()),
                include_in_schema=False,
            )


def _add_state_routes(app: FastAPI, service: Service, serve: ServeConfig) -> None:
    @app.head("/health", include_in_schema=False)
    @app.get("/health", tags=["state"], summary="200 if requests are answered, 503 if not.")
    async def health() -> Response:
        state = service.health
        body = {"status": state.state, "reason": state.reason, "model": service.model}
        return JSONResponse(body, 200 if state.state == "ok" else 503)

    @app.get("/metrics", tags=["state"], summary="For Prometheus.")
    async def metrics() -> Response:
        service.metrics.ready.set(service.health.state == "ok")
        service.metrics.stats = service.client.stats
        return Response(service.metrics.write(), media_type="text/plain; version=0.0.4")

    @app.get("/stats", tags=["state"], summary="The numbers the page at / shows.")
    async def stats() -> dict[str, Any]:
        return {**service.summary(), "demo": serve.demo}


def _add_worker_routes(app: FastAPI, service: Service, engine: EngineConfig) -> None:
    """What routers ask before they send anything: the model's name, and the limits.

    sglang-router and smg use one of two paths for each. Without an answer sglang-router calls the
    model "unknown".
    """
    names = {"model_path": engine.model, "served_model_name": service.model}

    @app.get("/get_model_info", tags=["state"], summary="The model, for routers.")
    @app.get("/model_info", tags=["state"], summary="The model, for routers.")
    async def model_info() -> dict[str, Any]:
        limit = {"max_model_len": service.max_tokens}
        return {**names, "tokenizer_path": engine.model, "is_generation": True, **limit}

    @app.get("/get_server_info", tags=["state"], summary="The limits, for routers.")
    @app.get("/server_info", tags=["state"], summary="The limits, for routers.")
    async def server_info() -> dict[str, Any]:
        ready = service.client.ready
        return {
            **names,
            "version": __version__,
            "status": service.health.state,
            "tp_size": engine.tp,
            "dp_size": 1,
            "max_model_len": service.max_tokens,
            "context_length": None if ready is None else ready.context_length,
            "page_size": None if ready is None else ready.page_size,
            "max_running_requests": engine.max_running_requests,
            "max_queued_requests": engine.max_queued_requests,
        }


def _add_pages(app: FastAPI) -> None:
    files = {entry.name: entry for entry in (*_WEB.iterdir(), PROSE)}

    def page(name: str) -> Response:
        return FileResponse(str(files[name]), headers=_PAGE_HEADERS)

    @app.head("/", include_in_schema=False)
    @app.get("/", include_in_schema=False)
    async def index() -> Response:
        return page("index.html")

    @app.get("/docs", include_in_schema=False)
    async def docs() -> Response:
        return page("docs.html")

    @app.get("/web/{name}", include_in_schema=False)
    async def file(name: str) -> Response:
        if name not in files or name.endswith(".html"):
            raise ApiError(404, f"there is no file {name[:100]!a}")
        return page(name)


def _add_errors(app: FastAPI) -> None:
    @app.exception_handler(ApiError)
    async def own(request: Request, error: ApiError) -> Response:
        record_of(request.scope).error = str(error)
        return error.response(request.url.path)

    @app.exception_handler(HTTPException)
    async def http(request: Request, error: HTTPException) -> Response:
        path = request.url.path[:100]
        what = {404: f"there is nothing at {path!a}", 405: f"{path!a} takes another method"}
        status = error.status_code
        response = ApiError(status, what.get(status, str(error.detail))).response(path)
        response.headers.update(error.headers or {})
        return response

    @app.exception_handler(ClientDisconnect)
    async def left(request: Request, error: ClientDisconnect) -> Response:
        record = record_of(request.scope)
        record.client_left()
        return Response(status_code=record.status)

    @app.exception_handler(Exception)
    async def unexpected(request: Request, error: Exception) -> Response:
        record_of(request.scope).error = f"{type(error).__name__}: {error}"
        failed = ApiError(500, "the server failed on this request; its log says why")
        return failed.response(request.url.path)


def _schema(app: FastAPI) -> Callable[[], dict[str, Any]]:
    """FastAPI's schema, with the bodies and errors that FastAPI does not know of."""
    own = app.openapi

    def openapi() -> dict[str, Any]:
        if app.openapi_schema:
            return app.openapi_schema
        schema = own()
        refs, parts = models_json_schema(
            [(kind, "validation") for kind in _BODIES.values()],
            ref_template="#/components/schemas/{model}",
        )
        components = schema.setdefault("components", {})
        components.setdefault("schemas", {}).update(parts["$defs"])
        components["securitySchemes"] = {"key": {"type": "http", "scheme": "bearer"}}
        schema["security"] = [{"key": []}, {}]
        for path, kind in _BODIES.items():
            operation = schema["paths"][path]["post"]
            content = {"application/json": {"schema": refs[kind, "validation"]}}
            operation["requestBody"] = {"required": True, "content": content}
        for operations in schema["paths"].values():
            for operation in operations.values():
                for status, text in _ERRORS.items():
                    operation["responses"].setdefault(status, {"description": text})
                operation["responses"].pop("422", None)
        app.openapi_schema = schema
        return schema

    return openapi
