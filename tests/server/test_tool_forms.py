"""Formats of tool calls and of thoughts, as each family of models writes them."""

from __future__ import annotations

import json
import re
from typing import Any

import pytest

from cairn.server.grammar import ModelForms, chat_grammar
from cairn.server.grammars import Grammars
from cairn.server.output import OutputParser
from cairn.server.reasoning import REASONING_FORMS, Place, ReasoningParser, reasoning_form
from cairn.server.schema import ChatRequest
from cairn.server.tools.choose import tool_form
from cairn.server.tools.deepseek import DeepSeek3, DeepSeek31
from cairn.server.tools.form import ToolForm
from cairn.server.tools.glm import Glm
from cairn.server.tools.hermes import Hermes
from cairn.server.tools.llama3 import Llama3
from cairn.server.tools.mistral import MistralList, MistralNamed
from cairn.server.tools.parser import ToolParser
from cairn.server.tools.qwen3_coder import Qwen3Coder
from cairn.text.tokenizer import Tokenizer
from tests.helpers import byte_tokenizer
from tests.server.test_grammar import wait_for

SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {"city": {"type": "string"}, "days": {"type": "integer"}},
    "required": ["city"],
    "additionalProperties": False,
}
SCHEMAS = {"weather": SCHEMA, "clock": {}}
OSLO, ROME = {"city": "Oslo", "days": 3}, {"city": "Rome"}

# The forms, templates that show them, and what a model writes for a call and for two.
FORMS: list[tuple[type[ToolForm], str, str, str]] = [
    (
        Hermes,
        "anything else",
        '<tool_call>\n{"name": "weather", "arguments": {"city": "Oslo", "days": 3}}\n</tool_call>',
        '<tool_call>\n{"name": "weather", "arguments": {"city": "Oslo", "days": 3}}\n</tool_call>\n'
        '<tool_call>\n{"name": "weather", "arguments": {"city": "Rome"}}\n</tool_call>',
    ),
    (
        Llama3,
        "<|start_header_id|> ... <|python_tag|>",
        '{"name": "weather", "parameters": {"city": "Oslo", "days": 3}}',
        '{"name": "weather", "parameters": {"city": "Oslo", "days": 3}}; '
        '{"name": "weather", "parameters": {"city": "Rome"}}',
    ),
    (
        MistralList,
        "[AVAILABLE_TOOLS] [TOOL_CALLS]",
        '[TOOL_CALLS][{"name": "weather", "arguments": {"city": "Oslo", "days": 3}}]',
        '[TOOL_CALLS][{"name": "weather", "arguments": {"city": "Oslo", "days": 3}}, '
        '{"name": "weather", "arguments": {"city": "Rome"}}]',
    ),
    (
        MistralNamed,
        "[TOOL_CALLS] [ARGS]",
        '[TOOL_CALLS]weather[ARGS]{"city": "Oslo", "days": 3}',
        '[TOOL_CALLS]weather[ARGS]{"city": "Oslo", "days": 3}'
        '[TOOL_CALLS]weather[ARGS]{"city": "Rome"}',
    ),
    (
        Qwen3Coder,
        "<tool_call> <function=name> <parameter=x>",
        "<tool_call>\n<function=weather>\n<parameter=city>\nOslo\n</parameter>\n"
        "<parameter=days>\n3\n</parameter>\n</function>\n</tool_call>",
        "<tool_call>\n<function=weather>\n<parameter=city>\nOslo\n</parameter>\n"
        "<parameter=days>\n3\n</parameter>\n</function>\n</tool_call>\n"
        "<tool_call>\n<function=weather>\n<parameter=city>\nRome\n</parameter>\n</function>\n"
        "</tool_call>",
    ),
    (
        Glm,
        "<arg_key> <arg_value>",
        "<tool_call>weather\n<arg_key>city</arg_key>\n<arg_value>Oslo</arg_value>\n"
        "<arg_key>days</arg_key>\n<arg_value>3</arg_value>\n</tool_call>",
        "<tool_call>weather\n<arg_key>city</arg_key>\n<arg_value>Oslo</arg_value>\n"
        "<arg_key>days</arg_key>\n<arg_value>3</arg_value>\n</tool_call>\n"
        "<tool_call>weather\n<arg_key>city</arg_key>\n<arg_value>Rome</arg_value>\n</tool_call>",
    ),
    (
        DeepSeek3,
        "<｜tool▁calls▁begin｜> ... ```json",  # noqa: RUF001
        "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>weather\n```json\n"  # noqa: RUF001
        '{"city": "Oslo", "days": 3}\n```<｜tool▁call▁end｜><｜tool▁calls▁end｜>',  # noqa: RUF001
        "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>weather\n```json\n"  # noqa: RUF001
        '{"city": "Oslo", "days": 3}\n```<｜tool▁call▁end｜>\n'  # noqa: RUF001
        "<｜tool▁call▁begin｜>function<｜tool▁sep｜>weather\n```json\n"  # noqa: RUF001
        '{"city": "Rome"}\n```<｜tool▁call▁end｜><｜tool▁calls▁end｜>',  # noqa: RUF001
    ),
    (
        DeepSeek31,
        "<｜tool▁calls▁begin｜>",  # noqa: RUF001
        "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>weather<｜tool▁sep｜>"  # noqa: RUF001
        '{"city": "Oslo", "days": 3}<｜tool▁call▁end｜><｜tool▁calls▁end｜>',  # noqa: RUF001
        "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>weather<｜tool▁sep｜>"  # noqa: RUF001
        '{"city": "Oslo", "days": 3}<｜tool▁call▁end｜>'  # noqa: RUF001
        '<｜tool▁call▁begin｜>weather<｜tool▁sep｜>{"city": "Rome"}<｜tool▁call▁end｜>'  # noqa: RUF001
        "<｜tool▁calls▁end｜>",  # noqa: RUF001
    ),
]
BY_NAME = [pytest.param(*form, id=form[0].__name__) for form in FORMS]


def read(form: ToolForm, text: str, step: int, reason: str = "stop") -> tuple[str, list[Any]]:
    """Content and (name, arguments) of the calls, from text that comes in pieces."""
    parser = OutputParser(None, ToolParser(form, SCHEMAS))
    parts = [parser.push(text[i : i + step], None) for i in range(0, len(text), step)]
    parts.append(parser.push("", reason))
    calls = [(call.name, json.loads(call.arguments)) for part in parts for call in part.calls]
    assert len({call.id for part in parts for call in part.calls}) == len(calls)
    return "".join(part.text for part in parts), calls


@pytest.mark.parametrize(("kind", "template", "one", "two"), BY_NAME)
def test_a_form_is_chosen_and_read(kind: type[ToolForm], template: str, one: str, two: str) -> None:
    form = tool_form(template)
    assert type(form) is kind
    for step in (1, 3, 1000):
        assert read(form, one, step) == ("", [("weather", OSLO)])
        assert read(form, two, step) == ("", [("weather", OSLO), ("weather", ROME)])
        assert read(form, "plain text", step) == ("plain text", [])
        if kind is not Llama3:
            assert read(form, f"See:\n{one}", step) == ("See:", [("weather", OSLO)])


@pytest.mark.parametrize(("kind", "template", "one", "two"), BY_NAME)
def test_a_call_that_is_cut_leaves_nothing_behind(
    kind: type[ToolForm], template: str, one: str, two: str
) -> None:
    begun = len(kind.opening) if kind is not Llama3 else len('{"name"')
    for length in range(begun, len(one)):
        content, calls = read(kind(), one[:length], 7, "length")
        assert content == "" and calls in ([], [("weather", OSLO)])
    # The same text is content if the model itself ended there.
    assert read(kind(), one[: begun + 3], 7, "stop")[0] == one[: begun + 3]


def test_json_that_is_no_call_is_content() -> None:
    for text in ('{"city": "Oslo"}', "{not json", '{"a": 1'):
        assert read(Llama3(), text, 2) == (text, [])
        assert read(Llama3(), text, 2, "length") == (text, [])
    assert read(Llama3(), f"<|python_tag|>{FORMS[1][2]}", 4) == ("", [("weather", OSLO)])


def test_ids_of_mistral_are_what_its_templates_accept() -> None:
    assert re.fullmatch("[a-zA-Z0-9]{9}", MistralList().new_id())


@pytest.mark.parametrize(("kind", "template", "one", "two"), BY_NAME)
def test_the_grammar_of_a_form_allows_what_it_reads(
    kind: type[ToolForm], template: str, one: str, two: str
) -> None:
    """The tags are text for the byte tokenizer, so that the whole call can be spelled."""
    end = 255
    fast = byte_tokenizer()
    grammars = Grammars(Tokenizer(fast, None), 256, frozenset({end}))
    tools = [
        {"type": "function", "function": {"name": name, "parameters": schema}}
        for name, schema in SCHEMAS.items()
    ]

    def follows(text: str, **options: Any) -> set[int]:
        body = {"messages": [{"role": "user", "content": "x"}], "tools": tools, **options}
        forms = ModelForms(kind(), REASONING_FORMS["think"], {})
        place: Place | None = "before" if "<think>" in text else None
        grammar = chat_grammar(ChatRequest.model_validate(body), forms, place)
        assert grammar is not None
        (follower,) = grammars.follow(grammar, [0])
        follower.advance(fast.encode(text).ids)
        mask = wait_for(grammars, follower)
        return {token for token in range(256) if mask[token // 8] >> token % 8 & 1}

    assert end in follows(two, tool_choice="required")
    assert end in follows(one, tool_choice="required", parallel_tool_calls=False)
    assert end in follows("<think>so</think>" + one, tool_choice="required")
    assert end not in follows(one[:-1], tool_choice="required")
    if kind.free_text_bound:
        assert end in follows(f"Hm. {two}", tool_choice="auto")
        assert end not in follows(f"Hm. {one[:-3]}", tool_choice="auto")
    grammars.close()


def test_special_tokens_stand_in_grammars_as_tokens() -> None:
    tool = {"type": "function", "function": {"name": "weather", "parameters": SCHEMA}}
    body = {"messages": [{"role": "user", "content": "x"}], "tools": [tool]}
    for choice in ("auto", "required"):
        request = ChatRequest.model_validate({**body, "tool_choice": choice})
        grammar = chat_grammar(
            request, ModelForms(MistralNamed(), None, {"[TOOL_CALLS]": 9, "[ARGS]": 32}), None
        )
        assert grammar is not None and "TOOL_CALLS" not in grammar.text
        assert "<[9]>" in grammar.text and '"weather" <[32]>' in grammar.text


# -- thoughts ---------------------------------------------------------------------------------


@pytest.mark.parametrize("step", [1, 4, 1000])
@pytest.mark.parametrize(
    ("place", "text", "thoughts", "said"),
    [
        ("before", "<think>\nWell.\n\nSo.\n</think>\n\nYes.\n", "Well.\n\nSo.", "Yes.\n"),
        ("before", " \n<think>a</think>b", "a", "b"),
        ("before", "<think></think>b", "", "b"),
        ("before", "No thoughts </think>", "", "No thoughts </think>"),
        ("before", "<thin", "", "<thin"),
        ("before", "<think>cut off </th", "cut off </th", ""),
        ("inside", "a < b</think> c", "a < b", "c"),
        ("inside", "never ends", "never ends", ""),
    ],
)
def test_thoughts_are_found_however_the_text_comes(
    place: Place, text: str, thoughts: str, said: str, step: int
) -> None:
    for streams in (True, False):
        parser = ReasoningParser(REASONING_FORMS["think"], place, streams=streams)
        pieces = [parser.push(text[i : i + step], final=False) for i in range(0, len(text), step)]
        pieces.append(parser.push("", final=True))
        assert "".join(piece[0] for piece in pieces) == thoughts
        assert "".join(piece[1] for piece in pieces) == said


def test_where_an_answer_begins() -> None:
    think = reasoning_form("auto", "... '</think>' in content ...")
    assert think is not None and think.begin == "<think>"
    assert reasoning_form("auto", "plain") is None and reasoning_form("none", "</think>") is None
    mistral = reasoning_form("auto", "[THINK] [/THINK]")
    assert mistral is not None and mistral.begin == "[THINK]"
    assert think.place("<assistant>") == "before"
    assert think.place("<user>what is <think>?<assistant>") == "before"
    assert think.place("<assistant><think>\n") == "inside"
    assert think.place("<assistant><think>\n\n</think>\n\n") == "after"
    assert think.place("x", "<think>so") == "inside"
    assert think.place("x", "<think>so</think> I") == "after"
    assert REASONING_FORMS["deepseek_r1"].place("<assistant>") == "inside"
