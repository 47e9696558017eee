"""Anthropic's official client."""

from __future__ import annotations

from typing import Any

import pytest

from tests.server.process import ServerProcess

anthropic: Any = pytest.importorskip("anthropic")

QUESTION = [{"role": "user", "content": "Where is the cairn?"}]
TOOL = {
    "name": "weather",
    "input_schema": {
        "type": "object",
        "properties": {"city": {"enum": ["Oslo", "Rome"]}},
        "required": ["city"],
        "additionalProperties": False,
    },
}


@pytest.fixture(scope="module")
def client(server: ServerProcess) -> Any:
    return anthropic.Anthropic(base_url=server.url, api_key="unused", max_retries=0)


def test_messages_and_streams(client: Any, server: ServerProcess) -> None:
    options: dict[str, Any] = {"model": server.model, "messages": QUESTION, "max_tokens": 16}
    options["extra_body"] = {"temperature": 0}  # newer clients do not know it
    whole = client.messages.create(**options, system="Be brief.")
    assert whole.stop_reason == "max_tokens" and whole.usage.output_tokens == 16
    with client.messages.stream(**options, system="Be brief.") as stream:
        said = "".join(stream.text_stream)
        final = stream.get_final_message()
    assert said == whole.content[0].text == final.content[0].text
    assert final.stop_reason == "max_tokens" and final.usage.output_tokens == 16


def test_tools_and_their_results(client: Any, server: ServerProcess) -> None:
    options: dict[str, Any] = {"model": server.model, "max_tokens": 100, "tools": [TOOL]}
    choice = {"type": "any", "disable_parallel_tool_use": True}
    with client.messages.stream(**options, messages=QUESTION, tool_choice=choice) as stream:
        answer = stream.get_final_message()
    (use,) = answer.content
    assert answer.stop_reason == "tool_use" and use.input["city"] in ("Oslo", "Rome")
    result = {"type": "tool_result", "tool_use_id": use.id, "content": "sunny"}
    history = [
        *QUESTION,
        {"role": "assistant", "content": answer.content},
        {"role": "user", "content": [result]},
    ]
    again = client.messages.create(**options, messages=history, tool_choice={"type": "none"})
    assert again.role == "assistant"


def test_counts_and_errors(client: Any, server: ServerProcess) -> None:
    counted = client.messages.count_tokens(model=server.model, messages=QUESTION)
    assert counted.input_tokens == len("<user>Where is the cairn?<assistant>")
    with pytest.raises(anthropic.NotFoundError, match="claude"):
        client.messages.create(model="claude", messages=QUESTION, max_tokens=1)
    with pytest.raises(anthropic.BadRequestError, match="at least 1"):
        client.messages.create(model=server.model, messages=QUESTION, max_tokens=0)
