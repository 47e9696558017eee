"""What a router asks of a worker before it sends it anything.

sglang-router and smg read the model's name, and the limits, from here; each asks under one of two
names. Without an answer sglang-router calls the model "unknown".
"""

from __future__ import annotations

from typing import Any

from fastapi import FastAPI

from cairn import __version__
from cairn.config import EngineConfig
from cairn.server.service import Service

_ROUTES = ("/get_model_info", "/model_info", "/get_server_info", "/server_info")


def add_worker_routes(app: FastAPI, service: Service, engine: EngineConfig) -> None:
    async def model_info() -> dict[str, Any]:
        return {
            "model_path": engine.model,
            "tokenizer_path": engine.model,
            "served_model_name": service.model,
            "is_generation": True,
            "max_model_len": _max_tokens(service),
        }

    async def server_info() -> dict[str, Any]:
        ready = service.client.ready
        return {
            "version": __version__,
            "status": service.health.state,
            "model_path": engine.model,
            "served_model_name": service.model,
            "tp_size": 1,
            "dp_size": 1,
            "max_model_len": _max_tokens(service),
            "context_length": None if ready is None else ready.context_length,
            "page_size": None if ready is None else ready.page_size,
            "max_running_requests": engine.max_running_requests,
            "max_queued_requests": engine.max_queued_requests,
        }

    for path in _ROUTES:
        told = model_info if path.endswith("model_info") else server_info
        what = "The model, for routers." if told is model_info else "The limits, for routers."
        app.get(path, tags=["state"], summary=what)(told)


def _max_tokens(service: Service) -> int | None:
    """Of a request, prompt and output; not known before the model is loaded."""
    ready = service.client.ready
    return None if ready is None else ready.max_tokens
