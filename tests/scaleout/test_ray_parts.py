"""Parts of the Ray application that need no Ray: its options, and HTTP requests as values."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from starlette.types import Receive, Scope, Send

from cairn.errors import ConfigError
from cairn.ray.call import Call, Head, answer
from cairn.ray.options import read_options

CALL = Call("POST", "/path", b"a=1", [(b"x-name", b"value")], b"body", ())


def test_options_are_those_of_the_server_and_its_own() -> None:
    given = {
        "model": "here",
        "replicas": "3",
        "gpus": 1,
        "page_size": "32",
        "disable_radix_cache": "true",
        "disable_cuda_graph": False,
        "cors_origin": ["https://a.org", "https://b.org"],
        "context_length": None,
    }
    replicas, serve, engine = read_options(given)
    assert (replicas.replicas, replicas.gpus) == (3, 1)
    assert (engine.model, engine.page_size, engine.context_length) == ("here", 32, None)
    assert engine.disable_radix_cache and not engine.disable_cuda_graph
    assert serve.cors_origin == ("https://a.org", "https://b.org")


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"port": 8000}, "Ray's proxy listens"),
        ({"replicas": 0}, "whole number from 1"),
        ({"replicas": "many"}, "--replicas"),
        ({"disable_radix_cache": "yes"}, "true or false"),
        ({"gpus": -1}, "number from 0"),
        ({"health_period": 0}, "above 0"),
        ({"page_sise": 4}, "--page-sise"),
    ],
)
def test_wrong_options_are_named(given: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        read_options(given)


def test_an_answer_is_a_head_and_its_body() -> None:
    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        assert (scope["method"], scope["path"], scope["query_string"]) == ("POST", "/path", b"a=1")
        asked = await receive()
        await send({"type": "http.response.start", "status": 201, "headers": scope["headers"]})
        for part in (asked["body"], b"", b" twice"):
            await send({"type": "http.response.body", "body": part, "more_body": True})
        await send({"type": "http.response.body", "body": b""})

    async def main() -> list[Head | bytes]:
        return [part async for part in answer(app, CALL)]

    head, *body = asyncio.run(main())
    assert head == Head(201, [(b"x-name", b"value")])
    assert b"".join(part for part in body if isinstance(part, bytes)) == b"body twice"


def test_leaving_early_is_told_to_the_app() -> None:
    told = []

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        await receive()
        await send({"type": "http.response.start", "status": 200, "headers": []})
        told.append((await receive())["type"])

    async def main() -> None:
        parts = answer(app, CALL)
        assert isinstance(await anext(parts), Head)
        waiting = asyncio.ensure_future(anext(parts))
        await asyncio.sleep(0)
        waiting.cancel()
        with pytest.raises(asyncio.CancelledError):
            await waiting

    asyncio.run(main())
    assert told == ["http.disconnect"]


def test_an_app_that_fails_is_heard() -> None:
    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        raise ValueError("broken")

    async def main() -> None:
        async for _ in answer(app, CALL):
            pass

    with pytest.raises(ValueError, match="broken"):
        asyncio.run(main())
