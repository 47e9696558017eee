"""Answers that follow a grammar: a model of random weights has no other way to say JSON."""

from __future__ import annotations

import json
from typing import Any

import openai
import pytest
from llguidance import LLMatcher

from cairn.server.grammar import ModelForms, chat_grammar
from cairn.server.grammars import Follower, Grammars
from cairn.server.schema import ChatRequest
from cairn.server.tools.hermes import Hermes
from cairn.server.tools.parser import ToolParser
from cairn.server.wire import Grammar
from cairn.text.tokenizer import Tokenizer
from tests.helpers import byte_tokenizer
from tests.server.process import ServerProcess

QUESTION: list[Any] = [{"role": "user", "content": "What is the weather?"}]
WEATHER: dict[str, Any] = {
    "type": "object",
    "properties": {
        "city": {"enum": ["Oslo", "Rome"]},
        "degrees": {"type": "integer", "minimum": -50, "maximum": 50},
        "windy": {"type": "boolean"},
    },
    "required": ["city", "degrees", "windy"],
    "additionalProperties": False,
}
TOOLS: list[Any] = [
    {"type": "function", "function": {"name": "weather", "parameters": WEATHER}},
    {
        "type": "function",
        "function": {
            "name": "clock",
            "description": "The time.",
            "parameters": {
                "type": "object",
                "properties": {"zone": {"enum": ["UTC", "CET"]}},
                "required": ["zone"],
                "additionalProperties": False,
            },
        },
    },
]


@pytest.fixture(scope="module")
def client(server: ServerProcess) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{server.url}/v1", api_key="unused", max_retries=0)


def ask(client: openai.OpenAI, server: ServerProcess, **options: Any) -> Any:
    given: Any = {"model": server.model, "messages": QUESTION, "max_tokens": 200, **options}
    return client.chat.completions.create(**given)


def schema_format(schema: dict[str, Any]) -> dict[str, Any]:
    return {"type": "json_schema", "json_schema": {"name": "w", "schema": schema, "strict": True}}


def check_weather(value: dict[str, Any]) -> None:
    assert set(value) == {"city", "degrees", "windy"}
    assert value["city"] in ("Oslo", "Rome") and -50 <= value["degrees"] <= 50
    assert isinstance(value["windy"], bool)


def test_a_schema_is_followed(client: openai.OpenAI, server: ServerProcess) -> None:
    for seed in range(4):
        answer = ask(
            client, server, response_format=schema_format(WEATHER), seed=seed, n=2, temperature=1.5
        )
        for choice in answer.choices:
            assert choice.finish_reason == "stop"
            check_weather(json.loads(choice.message.content))


def test_a_schema_is_followed_next_to_free_streams(
    client: openai.OpenAI, server: ServerProcess
) -> None:
    free = ask(client, server, max_tokens=40, temperature=0).choices[0].message.content
    stream = ask(client, server, response_format=schema_format(WEATHER), stream=True, seed=1)
    said = "".join(chunk.choices[0].delta.content or "" for chunk in stream)
    check_weather(json.loads(said))
    assert ask(client, server, max_tokens=40, temperature=0).choices[0].message.content == free


def test_a_json_object(client: openai.OpenAI, server: ServerProcess) -> None:
    # Random weights never stop by themselves; what they say is the beginning of an object.
    quote, brace = server.token('"'), server.token("}")
    answer = ask(
        client,
        server,
        response_format={"type": "json_object"},
        logit_bias={quote: 50, brace: 100},
    )
    assert json.loads(answer.choices[0].message.content) == {}


def test_a_parsed_answer(client: openai.OpenAI, server: ServerProcess) -> None:
    from pydantic import BaseModel, ConfigDict

    class Flags(BaseModel):
        model_config = ConfigDict(extra="forbid")
        on: bool
        loud: bool

    parsed = client.chat.completions.parse(
        model=server.model, messages=QUESTION, response_format=Flags, max_tokens=100
    )
    assert isinstance(parsed.choices[0].message.parsed, Flags)


def test_tools_are_called(client: openai.OpenAI, server: ServerProcess) -> None:
    named = {"type": "function", "function": {"name": "weather"}}
    answer = ask(client, server, tools=TOOLS, tool_choice=named, seed=3)
    (call,) = answer.choices[0].message.tool_calls
    assert answer.choices[0].finish_reason == "tool_calls"
    assert call.function.name == "weather" and call.id.startswith("call_")
    check_weather(json.loads(call.function.arguments))
    assert not answer.choices[0].message.content

    stream = ask(
        client, server, tools=TOOLS, tool_choice="required", parallel_tool_calls=False, stream=True
    )
    calls: list[Any] = []
    reason = None
    for chunk in stream:
        calls += chunk.choices[0].delta.tool_calls or []
        reason = chunk.choices[0].finish_reason or reason
        assert not chunk.choices[0].delta.content
    (call,) = calls
    assert reason == "tool_calls" and call.index == 0
    assert call.function.name in ("weather", "clock")
    json.loads(call.function.arguments)

    # The conversation goes on with the tool's answer.
    again = ask(
        client,
        server,
        messages=[
            *QUESTION,
            answer.choices[0].message.model_dump(exclude_none=True),
            {"role": "tool", "tool_call_id": "x", "content": "sunny"},
        ],
        tools=TOOLS,
        tool_choice="none",
        max_tokens=5,
        extra_body={"ignore_eos": True},
    )
    assert again.usage.completion_tokens == 5


def test_free_text_with_tools(client: openai.OpenAI, server: ServerProcess) -> None:
    answer = ask(client, server, tools=TOOLS, max_tokens=20, temperature=0)
    assert answer.choices[0].message.tool_calls is None
    assert answer.choices[0].finish_reason == "length"


def wait_for(grammars: Grammars, follower: Follower) -> bytes:
    """The follower's mask. Its time limits are those of the worker."""
    while grammars.num_pending:
        grammars.take()
    follower.close()
    assert follower.allowed is not None, follower.error
    return follower.allowed.masks[0]


def test_a_call_once_begun_is_a_whole_one() -> None:
    """Of free text nothing is forbidden until the opening tag; then only a call is left."""
    end = 255
    fast = byte_tokenizer()
    grammars = Grammars(Tokenizer(fast, None), 256, frozenset({end}))
    body = ChatRequest.model_validate({"messages": QUESTION, "tools": TOOLS})
    grammar = chat_grammar(body, ModelForms(Hermes(), None, {}), None)
    assert grammar is not None

    def follows(text: str) -> set[int]:
        (follower,) = grammars.follow(grammar, [0])
        follower.advance(fast.encode(text).ids)
        mask = wait_for(grammars, follower)
        return {token for token in range(256) if mask[token // 8] >> token % 8 & 1}

    assert end in follows("Hello <tool") and len(follows("Hello <tool")) > 100
    assert follows("Hello <tool_call>") == set(fast.encode("\n").ids)
    inner = 'Hello <tool_call>\n{"name": "clock", "arguments": {"zone": "'
    assert follows(inner) == set(fast.encode("UC").ids)
    assert end in follows(inner + 'UTC"}}\n</tool_call>')
    grammars.close()


def test_drafts_are_looked_at_as_far_as_they_are_allowed() -> None:
    """They move nothing: the next question begins where the output ends."""
    fast = byte_tokenizer()
    grammars = Grammars(Tokenizer(fast, None), 256, frozenset({255}))
    (follower,) = grammars.follow(Grammar(LLMatcher.grammar_from_regex("abc[de]*f"), "regex"), [0])

    def follows(tokens: str, drafts: str) -> list[str]:
        follower.advance(fast.encode(tokens).ids, fast.encode(drafts).ids)
        while grammars.num_pending:
            grammars.take()
        assert follower.allowed is not None, follower.error
        masks, kept = follower.allowed
        assert list(kept) == fast.encode(drafts).ids[: len(masks) - 1]
        return [fast.decode([t for t in range(255) if mask[t // 8] >> t % 8 & 1]) for mask in masks]

    assert follows("", "abx") == ["a", "b", "c"]
    assert follows("a", "") == ["b"]
    assert follows("b", "cdde") == ["c", "def", "def", "def", "def"]
    assert follows("cd", "f") == ["def", ""]  # only the end is left
    assert follows("", "fa") == ["def", ""]
    grammars.close()


def test_what_cannot_be_followed_is_refused(client: openai.OpenAI, server: ServerProcess) -> None:
    for name, options in (
        ("response_format", {"response_format": schema_format({"type": "nonsense"})}),
        ("response_format", {"response_format": {"type": "json_schema"}}),
        ("response_format", {"response_format": schema_format({"pattern": "(" * 50})}),
        ("response_format", {"response_format": schema_format({"type": "string", "pattern": "["})}),
        ("response_format", {"response_format": {"type": "xml"}}),
        (
            "response_format",
            {"response_format": schema_format({"$ref": "https://example.org/schema.json"})},
        ),
        ("tool_choice", {"tool_choice": "required"}),
        (
            "tool_choice",
            {"tools": TOOLS, "tool_choice": {"type": "function", "function": {"name": "no"}}},
        ),
        ("tools", {"tools": [*TOOLS, TOOLS[0]]}),
        ("response_format", {"tools": TOOLS, "response_format": {"type": "json_object"}}),
        (
            "ignore_eos",
            {"response_format": {"type": "json_object"}, "extra_body": {"ignore_eos": True}},
        ),
    ):
        with pytest.raises(openai.BadRequestError) as refused:
            ask(client, server, **options)
        assert (refused.value.param or "").split(".")[0] == name, refused.value
    assert server.get("/health").status_code == 200


CALL = '<tool_call>\n{"name": "f", "arguments": {"x": 1}}\n</tool_call>'


@pytest.mark.parametrize("step", [1, 3, 7, 1000])
@pytest.mark.parametrize(
    ("text", "said", "calls"),
    [
        ("plain text <b>", "plain text <b>", 0),
        (CALL, "", 1),
        (f"Let me see.\n{CALL}\n{CALL}", "Let me see.", 2),
        (f"{CALL} and so", " and so", 1),
        ("<tool_call>not json</tool_call>", "<tool_call>not json</tool_call>", 0),
        (CALL.removesuffix("\n</tool_call>"), "", 1),
        ("ends in <tool", "ends in <tool", 0),
        ("blanks kept \n", "blanks kept \n", 0),
    ],
)
def test_calls_are_found_however_the_text_comes(
    text: str, said: str, calls: int, step: int
) -> None:
    parser = ToolParser(Hermes(), {})
    pieces = [text[i : i + step] for i in range(0, len(text), step)]
    results = [parser.push(piece, final=False) for piece in pieces] + [parser.push("", final=True)]
    assert "".join(words for words, _ in results) == said
    found = [call for _, each in results for call in each]
    assert [(call.name, call.arguments) for call in found] == [("f", '{"x": 1}')] * calls
