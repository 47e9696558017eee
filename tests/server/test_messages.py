"""Anthropic's Messages API, over plain HTTP. tests/clients drives it with the official client."""

from __future__ import annotations

import json
from typing import Any

import httpx

from tests.patience import PATIENCE
from tests.server.process import ServerProcess

PATH = "/v1/messages"
TOOL = {
    "name": "weather",
    "description": "The weather.",
    "input_schema": {
        "type": "object",
        "properties": {"city": {"enum": ["Oslo", "Rome"]}},
        "required": ["city"],
        "additionalProperties": False,
    },
    "cache_control": {"type": "ephemeral"},
}


def post(server: ServerProcess, path: str = PATH, **body: Any) -> httpx.Response:
    given = {"messages": [{"role": "user", "content": "Hello"}], "max_tokens": 8, **body}
    return server.post(path, json=given)


def events(server: ServerProcess, **body: Any) -> list[dict[str, Any]]:
    answer = post(server, stream=True, **body)
    assert answer.status_code == 200, answer.text
    found = []
    for event in answer.text.strip().split("\n\n"):
        name, data = event.split("\n")
        found.append(json.loads(data.removeprefix("data: ")))
        assert name == f"event: {found[-1]['type']}"
    return found


def prompt_of(server: ServerProcess, **body: Any) -> int:
    counted = post(server, "/v1/messages/count_tokens", **body)
    assert counted.status_code == 200, counted.text
    return int(counted.json()["input_tokens"])


def test_a_message(server: ServerProcess) -> None:
    answer = post(server, model=server.model, temperature=0).json()
    assert answer["type"] == "message" and answer["role"] == "assistant"
    assert answer["id"].startswith("msg_") and answer["model"] == server.model
    (block,) = answer["content"]
    assert block["type"] == "text" and block["text"]
    assert answer["stop_reason"] == "max_tokens" and answer["stop_sequence"] is None
    usage = answer["usage"]
    assert usage["output_tokens"] == 8
    read = usage["cache_read_input_tokens"] + usage["cache_creation_input_tokens"]
    assert usage["input_tokens"] + read == prompt_of(server) == len("<user>Hello<assistant>")
    # The same question in OpenAI's format has the same answer.
    chat = httpx.post(
        f"{server.url}/v1/chat/completions",
        json={
            "messages": [{"role": "user", "content": "Hello"}],
            "max_tokens": 8,
            "temperature": 0,
        },
        timeout=PATIENCE,
    )
    assert chat.json()["choices"][0]["message"]["content"] == block["text"]


def test_a_stream_says_the_same(server: ServerProcess) -> None:
    body: dict[str, Any] = {"temperature": 0, "messages": [{"role": "user", "content": "x" * 64}]}
    whole = post(server, **body).json()
    stream = events(server, **body)
    kinds = [event["type"] for event in stream]
    assert kinds[:3] == ["message_start", "ping", "content_block_start"]
    assert kinds[-3:] == ["content_block_stop", "message_delta", "message_stop"]
    text = "".join(e["delta"]["text"] for e in stream if e["type"] == "content_block_delta")
    assert text == whole["content"][0]["text"]
    begun, ended = stream[0]["message"], stream[-2]
    assert begun["usage"]["output_tokens"] == 0 and begun["content"] == []
    assert ended["delta"] == {"stop_reason": "max_tokens", "stop_sequence": None}
    used = ended["usage"]
    parts = ("input_tokens", "cache_creation_input_tokens", "cache_read_input_tokens")
    assert sum(used[part] for part in parts) == begun["usage"]["input_tokens"]
    assert used["cache_read_input_tokens"] >= 64  # whole pages of the first answer's prompt


def test_stop_sequences_and_the_end(server: ServerProcess) -> None:
    (letter,) = post(server, temperature=0, max_tokens=1).json()["content"][0]["text"]
    stopped = post(server, temperature=0, stop_sequences=[letter]).json()
    assert (stopped["stop_reason"], stopped["stop_sequence"]) == ("stop_sequence", letter)
    assert stopped["content"] == []


def test_tools(server: ServerProcess) -> None:
    body: dict[str, Any] = {"tools": [TOOL], "max_tokens": 100}
    body["tool_choice"] = {"type": "any", "disable_parallel_tool_use": True}
    answer = post(server, **body).json()
    assert answer["stop_reason"] == "tool_use"
    (block,) = answer["content"]
    assert block["type"] == "tool_use" and block["name"] == "weather"
    assert block["input"]["city"] in ("Oslo", "Rome")
    stream = events(server, **{**body, "tool_choice": {"type": "tool", "name": "weather"}})
    (start,) = [e for e in stream if e["type"] == "content_block_start"]
    assert start["content_block"]["name"] == "weather"
    parts = [e["delta"] for e in stream if e["type"] == "content_block_delta"]
    written = "".join(part["partial_json"] for part in parts)
    assert json.loads(written)["city"] in ("Oslo", "Rome")
    # The conversation goes on with the tool's result.
    history = [
        {"role": "user", "content": [{"type": "text", "text": "Weather?"}]},
        {"role": "assistant", "content": [{"type": "text", "text": "Let me see."}, block]},
        {
            "role": "user",
            "content": [
                {"type": "tool_result", "tool_use_id": block["id"], "content": "sunny"},
                {"type": "text", "text": "So?", "cache_control": {"type": "ephemeral"}},
            ],
        },
    ]
    again = post(server, messages=history, tools=[TOOL], tool_choice={"type": "none"})
    assert again.status_code == 200 and again.json()["usage"]["output_tokens"] > 0


def test_system_and_prefill(server: ServerProcess) -> None:
    system = [{"type": "text", "text": "Be"}, {"type": "text", "text": "brief."}]
    assert prompt_of(server, system=system) == len("<system>Be\nbrief.<user>Hello<assistant>")
    history = [{"role": "user", "content": "Go"}, {"role": "assistant", "content": "Once up"}]
    assert prompt_of(server, messages=history) == len("<user>Go<assistant>Once up")
    schema = {"type": "object", "properties": {}, "additionalProperties": False}
    form = {"format": {"type": "json_schema", "schema": schema}}
    assert post(server, output_config=form).json()["content"][0]["text"] == "{}"


def test_errors_are_anthropics(server: ServerProcess) -> None:
    image = [{"type": "image", "source": {"type": "base64", "data": ""}}]
    for body, kind, said in (
        ({"max_tokens": None}, "invalid_request_error", "max_tokens"),
        ({"model": "claude"}, "not_found_error", "claude"),
        ({"tools": [{"name": "x", "type": "bash_20250124"}]}, "invalid_request_error", "tools[0]"),
        (
            {"messages": [{"role": "user", "content": image}]},
            "invalid_request_error",
            "messages[0].content[0].type is 'image'",
        ),
    ):
        refused = post(server, **body)
        assert refused.status_code in (400, 404)
        error = refused.json()
        assert error["type"] == "error" and error["error"]["type"] == kind
        assert said in error["error"]["message"]
    thinking = {"type": "enabled", "budget_tokens": 1024}
    accepted = post(server, thinking=thinking)
    assert accepted.headers["x-cairn-ignored-fields"] == "thinking.budget_tokens, enable_thinking"


def test_paths_without_v1(server: ServerProcess) -> None:
    assert post(server, "/messages").status_code == 200
    assert post(server, "/chat/completions").status_code == 200
    assert server.get("/models").json() == server.get("/v1/models").json()
    assert not any(path.startswith("/messages") for path in server.get("/openapi.json").json())
