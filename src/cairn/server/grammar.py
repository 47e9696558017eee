"""Grammars that answers must follow: JSON, a regular expression, tool calls and the like.

The API process writes them here, in llguidance's dialect of Lark. `server/grammars.py` compiles and
follows them. Both need llguidance, the `grammar` extra.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

from cairn.errors import install
from cairn.server.api_error import bad_request
from cairn.server.reasoning import Place, ReasoningForm
from cairn.server.schema import ChatRequest, Sampling, Tool, ToolChoice
from cairn.server.tools.form import ToolForm, json_rule, literal
from cairn.server.wire import Grammar

if TYPE_CHECKING:
    from llguidance import LLMatcher

_LARGEST = 256 * 1024  # characters
_TEXT = "TEXT: /(.|\\n)*/"


@dataclass(frozen=True, slots=True)
class ModelForms:
    """How a model writes what is not plain content."""

    tools: ToolForm
    reasoning: ReasoningForm | None
    special: Mapping[str, int]
    """Ids of the special tokens among them."""


class _Bound(NamedTuple):
    """What binds an answer."""

    lines: list[str]
    """Of a grammar; the first one is the rule `start`."""
    param: str
    """The field that asks for it."""
    whole: bool = False
    """Nothing may come before it, not even thoughts."""


def chat_grammar(body: ChatRequest, forms: ModelForms, place: Place | None) -> Grammar | None:
    """The grammar that a chat's answers must follow; None for free text.

    `place` says where in its thoughts the answer begins; None if it has none.
    """
    bound, tools = _bound(body), _tool_lines(body, forms)
    if bound is not None and tools is not None:
        raise bad_request(
            bound.param,
            f"{bound.param} and tools bind the answer in two ways; give one, or set tool_choice "
            "to none",
        )
    if tools is not None:
        bound = _Bound(tools, "tools", whole=tools[0].startswith("start: said"))
    if bound is None:
        return None
    if forms.reasoning is not None and place in ("before", "inside") and not bound.whole:
        bound = bound._replace(lines=_after_thoughts(bound.lines, forms.reasoning, place))
    return _checked(body, bound)


def completion_grammar(body: Sampling) -> Grammar | None:
    bound = _bound(body)
    return None if bound is None else _checked(body, bound)


def _checked(body: Sampling, bound: _Bound) -> Grammar:
    param = bound.param
    for name in ("ignore_eos", "min_tokens"):
        if getattr(body, name):
            raise bad_request(
                name, f"{name} does not go with {param}: the grammar says when it ends"
            )
    written = "\n".join(bound.lines)
    if len(written) > _LARGEST:
        raise bad_request(param, f"{param} is {len(written)} characters long, at most {_LARGEST}")
    return Grammar(str(_library().grammar_from_lark(written)), param)


def _after_thoughts(lines: list[str], reasoning: ReasoningForm, place: Place | None) -> list[str]:
    """The same grammar, behind the thoughts of a model that thinks."""
    thought = "thought"
    if place == "before":
        thought = f"({literal(reasoning.begin)} thought)?"
    start = lines[0].removeprefix("start: ")
    return [
        f"start: {thought} answer",
        f"answer: {start}",
        f"thought[lazy]: /(.|\\n)*/ {literal(reasoning.end)}",
        *lines[1:],
    ]


# -- answers ----------------------------------------------------------------------------------


def _bound(body: Sampling) -> _Bound | None:
    own = body.structured_outputs
    given: list[tuple[str, str, Any]] = [
        ("guided_json", "json", body.guided_json),
        ("json_schema", "json", body.json_schema),
        ("guided_regex", "regex", body.guided_regex),
        ("regex", "regex", body.regex),
        ("guided_choice", "choice", body.guided_choice),
        ("guided_grammar", "grammar", body.guided_grammar),
        ("ebnf", "grammar", body.ebnf),
        *(
            ("structured_outputs", kind, value)
            for kind, value in (
                ("json", own and own.json_),
                ("json", {"type": "object"} if own and own.json_object else None),
                ("regex", own and own.regex),
                ("choice", own and own.choice),
                ("grammar", own and own.grammar),
            )
        ),
    ]
    form = body.response_format
    if form is not None and form.type == "json_object":
        given.append(("response_format", "json", {"type": "object"}))
    elif form is not None and form.type == "json_schema":
        if form.json_schema.schema_ is None:
            raise bad_request("response_format", "response_format.json_schema.schema is missing")
        given.append(("response_format", "json", form.json_schema.schema_))
    asked = [each for each in given if each[2] is not None]
    if not asked:
        return None
    if len(asked) > 1:
        names = " and ".join(name for name, _, _ in asked)
        raise bad_request(asked[0][0], f"{names} bind the answer more than once; give one")
    (param, kind, value) = asked[0]
    return _Bound(_lines(param, kind, value), param, whole=kind == "grammar")


def _lines(param: str, kind: str, value: Any) -> list[str]:
    try:
        if kind == "json":
            schema = json.loads(value) if isinstance(value, str) else value
            if not isinstance(schema, dict):
                raise ValueError("a schema is an object")
            return ["start: " + json_rule(schema)]
        if kind == "choice":
            return ["start: " + " | ".join(map(literal, value))]
        if kind == "regex":
            return [f"start: /{_regex(value)}/"]
        from llguidance.gbnf_to_lark import any_to_lark

        return [str(any_to_lark(value))]
    except ModuleNotFoundError as error:
        raise _missing() from error
    except Exception as error:  # the library raises errors of its own
        raise bad_request(param, f"{param} cannot be followed: {error}"[:500]) from error


def _regex(value: str) -> str:
    """As Lark writes it: a slash ends it, and the whole answer has to match anyway."""
    inner = value.removeprefix("^")
    if inner.endswith("$") and not inner.endswith("\\$"):
        inner = inner[:-1]
    return re.sub(r"(?<!\\)/", r"\\/", inner).replace("\n", "\\n")


# -- tool calls -------------------------------------------------------------------------------


def _tool_lines(body: ChatRequest, forms: ModelForms) -> list[str] | None:
    choice = body.tool_choice
    if not body.tools:
        if choice not in (None, "none", "auto"):
            raise bad_request("tool_choice", "tool_choice needs tools")
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
        return _calls(chosen, forms, many=False)
    if choice == "required":
        return _calls(body.tools, forms, many=many)
    return _calls(body.tools, forms, many=many, free=True) if forms.tools.free_text_bound else None


def _calls(
    tools: Sequence[Tool], forms: ModelForms, *, many: bool, free: bool = False
) -> list[str]:
    """A grammar for calls. In a `free` answer they may follow text, and a call that is begun must
    be completed."""
    form = forms.tools

    def text(value: str) -> str:
        return _with_special(literal(value), form, forms.special) if value else ""

    more = f"({text(form.separator)} call)*" if many else ""
    calls = f"{text(form.head)} call {more} {text(form.tail)} {text(form.closing)}"
    if free:
        lines = ["start: said* TEXT" if many else "start: said | TEXT", f"said: opened {calls}"]
        if form.opening in forms.special:  # text never contains a special token
            lines += [_TEXT, f"opened: TEXT {text(form.opening)}"]
        else:
            lines += [_TEXT, f"opened[lazy]: TEXT {literal(form.opening)}"]
    else:
        lines = [f"start: {'' if form.at_start else text(form.opening)} {calls}"]
    lines.append("call: " + " | ".join(f"call_{i}" for i in range(len(tools))))
    for i, tool in enumerate(tools):
        schema = tool.function.parameters or {"type": "object"}
        try:
            parts = form.rule(tool.function.name, schema)
        except ValueError as error:
            raise bad_request("tools", f"tools: {tool.function.name}: {error}") from error
        own = (_with_special(p, form, forms.special) if p[0] == '"' else p for p in parts)
        lines.append(f"call_{i}: {' '.join(own)}")
    return [*lines, *form.rules]


def _with_special(written: str, form: ToolForm, special: Mapping[str, int]) -> str:
    """A literal in which special tokens stand as tokens: as text they would be other tokens."""
    for token in form.special:
        if token in special:
            written = written.replace(token, f'" <[{special[token]}]> "')
    return written.replace('"" ', "").replace(' ""', "") or '""'


def _missing() -> Exception:
    return bad_request(
        "response_format",
        "response_format, structured_outputs and tools need the package llguidance on the server: "
        + install("grammar"),
    )


def _library() -> type[LLMatcher]:
    try:
        from llguidance import LLMatcher
    except ModuleNotFoundError as error:
        raise _missing() from error
    return LLMatcher
