"""Grammars that answers must follow: JSON, a JSON schema, tool calls.

The API process writes them here. `server/grammars.py` compiles and follows them. Both need
llguidance, the `grammar` extra.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from cairn.server.api_error import bad_request
from cairn.server.schema import ChatRequest, Tool, ToolChoice
from cairn.server.tools import BEGIN, END
from cairn.server.wire import Grammar

if TYPE_CHECKING:
    from llguidance import LLMatcher

# No optional white space: a model could add it without end.
_COMPACT: Any = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}
_LARGEST = 256 * 1024  # characters


def chat_grammar(body: ChatRequest) -> Grammar | None:
    """The grammar that a request's answers must follow; None for free text."""
    written, param = _response_grammar(body), "response_format"
    tools = _tool_grammar(body)
    if tools is not None:
        if written is not None:
            raise bad_request(
                "response_format",
                "response_format and tools bind the answer in two ways; give one, or set "
                "tool_choice to none",
            )
        written, param = tools, "tools"
    if written is None:
        return None
    for name in ("ignore_eos", "min_tokens"):
        if getattr(body, name):
            raise bad_request(
                name, f"{name} does not go with {param}: the grammar says when it ends"
            )
    _check_length(param, written)
    return Grammar(written, param)


def _check_length(param: str, written: str) -> None:
    if len(written) > _LARGEST:
        raise bad_request(param, f"{param} is {len(written)} characters long, at most {_LARGEST}")


def _response_grammar(body: ChatRequest) -> str | None:
    form = body.response_format
    if form is None or form.type == "text":
        return None
    if form.type == "json_object":
        return _json({"type": "object"})
    if form.json_schema.schema_ is None:
        raise bad_request("response_format", "response_format.json_schema.schema is missing")
    return _json(form.json_schema.schema_)


def _json(schema: dict[str, Any]) -> str:
    try:
        written = json.dumps(schema, allow_nan=False)
        _check_length("response_format", written)
        return str(_library().grammar_from_json_schema(written, overrides=_COMPACT))
    except ValueError as error:
        raise bad_request(
            "response_format", f"response_format cannot be followed: {error}"
        ) from error


def _tool_grammar(body: ChatRequest) -> str | None:
    choice = body.tool_choice
    if not body.tools:
        if choice not in (None, "none"):
            raise bad_request("tool_choice", "tool_choice needs tools")
        if body.parallel_tool_calls is not None:
            raise bad_request("parallel_tool_calls", "parallel_tool_calls needs tools")
        return None
    names = [tool.function.name for tool in body.tools]
    if len(set(names)) < len(names):
        raise bad_request("tools", "tools has two functions of the same name")
    if choice == "none":
        return None
    many = body.parallel_tool_calls is not False
    if isinstance(choice, ToolChoice):
        chosen = [tool for tool in body.tools if tool.function.name == choice.function.name]
        if not chosen:
            raise bad_request(
                "tool_choice",
                f"tool_choice names {choice.function.name!a}; tools has {', '.join(names)}",
            )
        return _calls(chosen, "start: call")
    if choice == "required":
        return _calls(body.tools, 'start: call ("\\n" call)*' if many else "start: call")
    # Free text, in which a call that is begun must be completed.
    return _calls(body.tools, "start: said* TEXT" if many else "start: said | TEXT", free=True)


def _calls(tools: Sequence[Tool], start: str, *, free: bool = False) -> str:
    """A grammar for calls. `start` refers to `call`, or to `said`, a call after free text."""
    lines = [start, "call: OPENING inner"]
    if free:
        lines = [start, "said: opened inner", "TEXT: /(.|\\n)*/"]
        lines.append(f"opened[lazy]: TEXT {json.dumps(BEGIN)}")
    else:
        lines.append(f"OPENING: {json.dumps(BEGIN)}")
    lines.append("inner: " + " | ".join(f"call_{i}" for i in range(len(tools))))
    lines += [f"call_{i}: {_call(tool)}" for i, tool in enumerate(tools)]
    return str(_library().grammar_from_lark("\n".join(lines)))


def _call(tool: Tool) -> str:
    """The rule for a call of one tool, after the opening tag."""
    function = tool.function
    opening = f'\n{{"name": "{function.name}", "arguments": '
    schema = {**(function.parameters or {"type": "object"}), "x-guidance": _COMPACT}
    closing = f"}}\n{END}"
    try:
        inner = json.dumps(schema, allow_nan=False)
    except ValueError as error:
        raise bad_request("tools", f"tools: {function.name}: {error}") from error
    return f"{json.dumps(opening)} %json {inner} {json.dumps(closing)}"


def _library() -> type[LLMatcher]:
    try:
        from llguidance import LLMatcher
    except ModuleNotFoundError as error:
        raise bad_request(
            "response_format",
            "response_format and tools need the package llguidance on the server: "
            "pip install 'cairn[grammar]'",
        ) from error
    return LLMatcher
