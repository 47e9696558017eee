"""OpenAI's Responses API, through the official client."""

from __future__ import annotations

import json
from typing import Any

import openai
import pytest

from tests.server.process import ServerProcess

TOOL: Any = {
    "type": "function",
    "name": "weather",
    "parameters": {
        "type": "object",
        "properties": {"city": {"enum": ["Oslo", "Rome"]}},
        "required": ["city"],
        "additionalProperties": False,
    },
    "strict": True,
}


@pytest.fixture(scope="module")
def client(server: ServerProcess) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{server.url}/v1", api_key="unused", max_retries=0)


def ask(client: openai.OpenAI, server: ServerProcess, **body: Any) -> Any:
    given: Any = {"model": server.model, "input": "Hello", "max_output_tokens": 8, **body}
    return client.responses.create(**given)


def test_a_response(client: openai.OpenAI, server: ServerProcess) -> None:
    answer = ask(client, server, temperature=0, instructions="Be brief.")
    assert answer.status == "incomplete"
    assert answer.incomplete_details.reason == "max_output_tokens"
    assert answer.output_text and answer.output[0].role == "assistant"
    prompt = len("<system>Be brief.<user>Hello<assistant>")
    assert (answer.usage.input_tokens, answer.usage.output_tokens) == (prompt, 8)
    chat: Any = client.chat.completions.create(
        model=server.model,
        messages=[
            {"role": "system", "content": "Be brief."},
            {"role": "user", "content": "Hello"},
        ],
        max_completion_tokens=8,
        temperature=0,
    )
    assert chat.choices[0].message.content == answer.output_text


def test_a_stream_says_the_same(client: openai.OpenAI, server: ServerProcess) -> None:
    whole = ask(client, server, temperature=0)
    stream = list(ask(client, server, temperature=0, stream=True))
    assert [event.type for event in stream[:4]] == [
        "response.created",
        "response.in_progress",
        "response.output_item.added",
        "response.content_part.added",
    ]
    assert [event.type for event in stream[-4:]] == [
        "response.output_text.done",
        "response.content_part.done",
        "response.output_item.done",
        "response.incomplete",
    ]
    assert [event.sequence_number for event in stream] == list(range(len(stream)))
    deltas = [event.delta for event in stream if event.type == "response.output_text.delta"]
    assert "".join(deltas) == whole.output_text == stream[-1].response.output_text
    assert stream[-1].response.usage.total_tokens == whole.usage.total_tokens


def test_scores(client: openai.OpenAI, server: ServerProcess) -> None:
    options: Any = {"include": ["message.output_text.logprobs"], "top_logprobs": 2}
    scores = ask(client, server, **options).output[0].content[0].logprobs
    assert len(scores) == 8 and all(len(score.top_logprobs) == 2 for score in scores)
    assert ask(client, server).output[0].content[0].logprobs == []
    # In a stream too. Some tokens are parts of characters: their scores come with the next text.
    sent: list[Any] = []
    for event in ask(client, server, stream=True, **options):
        if event.type == "response.output_text.delta":
            sent += event.logprobs
        elif event.type == "response.incomplete":
            (part,) = event.response.output[0].content
            assert [score.logprob for score in part.logprobs] == [score.logprob for score in sent]
    assert [score.logprob for score in sent] == [score.logprob for score in scores]


def test_tools(client: openai.OpenAI, server: ServerProcess) -> None:
    options: Any = {"tools": [TOOL], "max_output_tokens": 100, "parallel_tool_calls": False}
    answer = ask(client, server, tool_choice="required", **options)
    (call,) = answer.output
    assert call.type == "function_call" and call.name == "weather"
    assert json.loads(call.arguments)["city"] in ("Oslo", "Rome")
    named: Any = {"type": "function", "name": "weather"}
    stream = list(ask(client, server, tool_choice=named, stream=True, **options))
    kinds = [event.type for event in stream]
    begin = kinds.index("response.output_item.added")
    assert kinds[begin:] == [
        "response.output_item.added",
        "response.function_call_arguments.delta",
        "response.function_call_arguments.done",
        "response.output_item.done",
        "response.completed",
    ]
    history: Any = [
        {"role": "user", "content": "Weather?"},
        {"type": "reasoning", "id": "rs_1", "summary": [{"type": "summary_text", "text": "hm"}]},
        call.model_dump(),
        {"type": "function_call_output", "call_id": call.call_id, "output": "sunny"},
    ]
    again = ask(client, server, input=history, tools=[TOOL], tool_choice="none")
    assert again.usage.output_tokens > 0


def test_a_schema(client: openai.OpenAI, server: ServerProcess) -> None:
    from pydantic import BaseModel, ConfigDict

    class Flags(BaseModel):
        model_config = ConfigDict(extra="forbid")
        on: bool

    parsed = client.responses.parse(model=server.model, input="Is it on?", text_format=Flags)
    assert isinstance(parsed.output_parsed, Flags)
    with client.responses.stream(
        model=server.model, input="Is it on?", text_format=Flags
    ) as stream:
        assert isinstance(stream.get_final_response().output_parsed, Flags)


def test_nothing_is_stored_unless_asked(client: openai.OpenAI, server: ServerProcess) -> None:
    forgotten = ask(client, server)
    assert forgotten.store is False
    with pytest.raises(openai.NotFoundError, match="store"):
        client.responses.retrieve(forgotten.id)
    with pytest.raises(openai.BadRequestError, match="store"):
        ask(client, server, previous_response_id=forgotten.id)
    first = ask(client, server, store=True, temperature=0)
    assert client.responses.retrieve(first.id).output_text == first.output_text
    second = ask(client, server, previous_response_id=first.id, input="More", store=True)
    items: Any = [{"role": "user", "content": "Hello"}, first.output[0].model_dump()]
    by_hand = ask(client, server, input=[*items, {"role": "user", "content": "More"}])
    assert second.usage.input_tokens == by_hand.usage.input_tokens
    reference: Any = {"type": "item_reference", "id": first.output[0].id}
    by_reference = ask(
        client, server, input=[items[0], reference, {"role": "user", "content": "More"}]
    )
    assert by_reference.usage.input_tokens == by_hand.usage.input_tokens
    streamed = list(ask(client, server, store=True, stream=True))[-1].response
    assert client.responses.retrieve(streamed.id).output_text == streamed.output_text
    client.responses.delete(first.id)
    with pytest.raises(openai.NotFoundError):
        client.responses.retrieve(first.id)
    with pytest.raises(openai.BadRequestError, match="not stored"):
        ask(client, server, input=[{"type": "item_reference", "id": "msg_x"}])


def test_what_is_refused(client: openai.OpenAI, server: ServerProcess) -> None:
    image: Any = [{"role": "user", "content": [{"type": "input_image", "image_url": "x"}]}]
    for name, options in (
        ("input", {"input": []}),
        ("input[0].content[0].type", {"input": image}),
        ("tools[0].type", {"tools": [{"type": "web_search"}]}),
        ("background", {"background": True}),
        ("truncation", {"truncation": "auto"}),
        ("input[0].type", {"input": [{"type": "computer_call"}]}),
    ):
        with pytest.raises(openai.BadRequestError) as refused:
            ask(client, server, **options)
        assert refused.value.param == name, refused.value


def test_a_stream_that_fails_says_so(client: openai.OpenAI, server: ServerProcess) -> None:
    body = {"input": "x", "stream": True, "text": {"format": {"type": "json_schema"}}}
    refused = server.post("/v1/responses", json=body)
    assert refused.status_code == 400 and "schema" in refused.json()["error"]["message"]
