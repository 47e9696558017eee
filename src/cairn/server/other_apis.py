"""Routes of Anthropic's Messages API and OpenAI's Responses API.

Both are formats of the chat that `/v1/chat/completions` answers.
"""

from __future__ import annotations

import secrets
from functools import partial
from typing import Any

from fastapi import FastAPI, Request, Response
from pydantic import BaseModel

from cairn.server.api_error import bad_request
from cairn.server.messages_format import MessagesFormat
from cairn.server.messages_input import Conversation, MessagesRequest
from cairn.server.middleware import record_of
from cairn.server.parse import read_body
from cairn.server.responses_format import Keep, ResponsesFormat
from cairn.server.responses_input import ResponsesRequest, whole_conversation
from cairn.server.responses_store import ResponseStore
from cairn.server.service import Service

BODIES: dict[str, type[BaseModel]] = {
    "/v1/messages": MessagesRequest,
    "/v1/messages/count_tokens": Conversation,
    "/v1/responses": ResponsesRequest,
}


def add_messages(app: FastAPI, service: Service, *, strict: bool) -> None:
    @app.post("/v1/messages", tags=["Anthropic"], summary="Answer a conversation.")
    async def messages(request: Request) -> Response:
        body = await read_body(request, MessagesRequest, strict=strict)
        page = service.client.check_running().tokens_per_page
        form = partial(MessagesFormat, page, f"msg_{secrets.token_hex(12)}")
        return service.chat(body.as_chat(), form)

    @app.post("/v1/messages/count_tokens", tags=["Anthropic"], summary="Count a prompt's tokens.")
    async def count_tokens(request: Request) -> dict[str, Any]:
        body = await read_body(request, Conversation, strict=strict)
        count = await service.count_tokens(body.as_chat(), record_of(request.scope))
        return {"input_tokens": count}


def add_responses(app: FastAPI, service: Service, *, strict: bool) -> None:
    store = ResponseStore()

    @app.post("/v1/responses", tags=["OpenAI"], summary="Answer a conversation.")
    async def respond(request: Request) -> Response:
        body = await read_body(request, ResponsesRequest, strict=strict)
        earlier = body.previous_response_id
        items = whole_conversation(
            body, [] if earlier is None else store.get(earlier, 400).items, store.item
        )
        if not items:
            raise bad_request("input", "input is empty; give a text or items")
        keep: Keep | None = partial(store.add, items=items) if body.store else None
        form = partial(ResponsesFormat, body, keep, f"resp_{secrets.token_hex(12)}")
        return service.chat(body.as_chat(items), form)

    @app.get("/v1/responses/{response_id}", tags=["OpenAI"], summary="A stored response.")
    async def stored(response_id: str) -> dict[str, Any]:
        return store.get(response_id).response

    @app.delete("/v1/responses/{response_id}", tags=["OpenAI"], summary="Forget a response.")
    async def forget(response_id: str) -> dict[str, Any]:
        store.delete(response_id)
        return {"id": response_id, "object": "response", "deleted": True}
