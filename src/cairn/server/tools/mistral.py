"""Calls of Mistral's models, older and newer.

[TOOL_CALLS][{"name": "get_weather", "arguments": {"city": "Oslo"}}, ...]
[TOOL_CALLS]get_weather[ARGS]{"city": "Oslo"}[TOOL_CALLS]...
"""

from __future__ import annotations

import json
import secrets
import string
from collections.abc import Mapping
from typing import Any

from cairn.server.tools.form import Call, Schemas, ToolForm, json_rule, literal, read_objects

_OPENING, _ARGUMENTS = "[TOOL_CALLS]", "[ARGS]"


class MistralList(ToolForm):
    opening = _OPENING
    head, tail = "[", "]"
    separator = ", "
    special: tuple[str, ...] = (_OPENING,)

    @staticmethod
    def fits(template: str) -> bool:
        return _OPENING in template

    def rule(self, name: str, schema: Mapping[str, Any]) -> list[str]:
        begin = f'{{"name": "{name}", "arguments": '
        return [literal(begin), json_rule(schema), literal("}")]

    def read(self, inner: str, tools: Schemas) -> list[Call] | None:
        values = json.loads(inner)
        return read_objects(self, values if isinstance(values, list) else [values])

    def new_id(self) -> str:
        """The templates insist on nine letters or digits."""
        return "".join(secrets.choice(string.ascii_letters + string.digits) for _ in range(9))


class MistralNamed(MistralList):
    head = tail = ""
    separator = _OPENING
    special = (_OPENING, _ARGUMENTS)

    @staticmethod
    def fits(template: str) -> bool:
        return _OPENING in template and _ARGUMENTS in template

    def rule(self, name: str, schema: Mapping[str, Any]) -> list[str]:
        return [literal(name + _ARGUMENTS), json_rule(schema)]

    def read(self, inner: str, tools: Schemas) -> list[Call] | None:
        calls = []
        for each in inner.split(_OPENING):
            name, found, arguments = each.partition(_ARGUMENTS)
            if not found or not name.strip():
                return None
            calls.append(self.new_call(name.strip(), json.loads(arguments)))
        return calls
