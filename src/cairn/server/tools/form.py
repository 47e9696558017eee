"""What a format of tool calls defines. Each module beside this one has one format."""

from __future__ import annotations

import json
import secrets
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

# No optional white space: a model could add it without end.
COMPACT: dict[str, Any] = {
    "whitespace_flexible": False,
    "item_separator": ", ",
    "key_separator": ": ",
}

Schemas = Mapping[str, Mapping[str, Any]]
"""The JSON schema of each tool's arguments, by the tool's name."""


@dataclass(frozen=True, slots=True)
class Call:
    id: str
    name: str
    arguments: str  # JSON


class ToolForm:
    """How a model writes calls: `opening`, a call, more of them after `separator`, `closing`."""

    opening = ""
    closing = ""
    """Empty if calls run to the end of the answer."""
    head = tail = ""
    """Further texts around the calls, inside opening and closing."""
    separator = ""
    at_start = ""
    """An answer that begins with this is a call without the opening."""
    special: tuple[str, ...] = ()
    """Special tokens among these texts. They have no text otherwise."""
    rules: tuple[str, ...] = ()
    """Further rules that `rule` refers to."""
    free_text_bound = True
    """In a free answer, what follows `opening` is a call and nothing else."""

    @staticmethod
    def fits(template: str) -> bool:
        """Whether a model with this chat template writes its calls so."""
        raise NotImplementedError

    def rule(self, name: str, schema: Mapping[str, Any]) -> list[str]:
        """Parts of a grammar rule for a call, written by `literal`, `json_rule` and the like."""
        raise NotImplementedError

    def read(self, inner: str, tools: Schemas) -> list[Call] | None:
        """The calls in what stands between opening and closing. None or a ValueError if they cannot
        be read."""
        raise NotImplementedError

    def begun(self, inner: str) -> bool:
        """Whether text after `opening` or `at_start` that was cut is the beginning of a call."""
        return True

    def new_call(self, name: str, arguments: object) -> Call:
        """`arguments` are a value, or text if a model wrote them as text."""
        if not isinstance(arguments, str):
            arguments = json.dumps(arguments, ensure_ascii=False)
        return Call(self.new_id(), name, arguments)

    def new_id(self) -> str:
        return f"call_{secrets.token_hex(12)}"


def literal(text: str) -> str:
    """A text in a grammar rule. `server/grammar.py` replaces special tokens in it."""
    return json.dumps(text, ensure_ascii=False)


def json_rule(schema: Mapping[str, Any]) -> str:
    return "%json " + json.dumps({**schema, "x-guidance": COMPACT}, allow_nan=False)


def read_objects(
    form: ToolForm, values: Sequence[object], key: str = "arguments"
) -> list[Call] | None:
    """Calls from objects with a name and arguments, under `key` or another usual name."""
    calls = []
    for value in values:
        if not isinstance(value, dict) or not isinstance(value.get("name"), str):
            return None
        found = [value[k] for k in (key, "arguments", "parameters") if k in value]
        calls.append(form.new_call(value["name"], found[0] if found else {}))
    return calls


def typed_value(text: str, schema: Mapping[str, Any]) -> object:
    """An argument that a model wrote without quotes: text if the schema says so, else JSON."""
    if schema.get("type") == "string":
        return text
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return text


def properties(schema: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    """The schemas of an object's members, each with the definitions that it may refer to."""
    found = schema.get("properties")
    shared = {key: schema[key] for key in ("$defs", "definitions") if key in schema}
    return {
        key: {**shared, **(own if isinstance(own, dict) else {})}
        for key, own in (found.items() if isinstance(found, dict) else ())
    }
