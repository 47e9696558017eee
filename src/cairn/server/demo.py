"""A second, small engine for the page: `cairn-nano`, which finds facts in long texts.

It starts when a visitor first asks for it, and runs on the CPU beside any model. Its routes are the
ones of the API that the page needs, under /nano.
"""

from __future__ import annotations

import asyncio
from typing import Any

from fastapi import FastAPI, Request, Response

from cairn.config import EngineConfig
from cairn.errors import CairnError
from cairn.server.options import ServeConfig
from cairn.server.parse import read_body
from cairn.server.schema import ChatRequest
from cairn.server.service import Service

_ENGINE = EngineConfig(model="cairn-nano", device="cpu", kv_cache_gib=0.5, chunked_prefill_size=512)


class Demo:
    def __init__(self, serve: ServeConfig) -> None:
        self._serve = serve
        self._service: Service | None = None
        self._starting: asyncio.Task[None] | None = None

    async def service(self) -> Service:
        """Start the engine if need be. Returns when it is ready, or has failed."""
        if self._service is None:
            self._service = Service(_ENGINE, self._serve)
            self._service.start()
            self._starting = asyncio.create_task(self._service.started())
        assert self._starting is not None
        try:
            await asyncio.shield(self._starting)
        except CairnError:
            self._service.text()  # raises an error that says why
        return self._service

    async def close(self) -> None:
        if self._starting is not None:
            self._starting.cancel()
            await asyncio.wait({self._starting})
        if self._service is not None:
            await self._service.close()


def add_demo_routes(app: FastAPI, demo: Demo) -> None:
    @app.post("/nano/start", include_in_schema=False)
    async def start() -> dict[str, Any]:
        return (await demo.service()).summary()

    @app.post("/nano/v1/chat/completions", include_in_schema=False)
    async def chat(request: Request) -> Response:
        body = await read_body(request, ChatRequest)
        return (await demo.service()).chat(body)
