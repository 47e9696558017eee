"""Calls of GLM-4.5 and later.

<tool_call>get_weather
<arg_key>city</arg_key>
<arg_value>Oslo</arg_value>
</tool_call>
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from cairn.server.tools.form import (
    Call,
    Schemas,
    ToolForm,
    json_rule,
    literal,
    properties,
    typed_value,
)

_ARGUMENT = re.compile(r"\s*<arg_key>(.*?)</arg_key>\s*<arg_value>(.*?)</arg_value>\s*", re.DOTALL)


class Glm(ToolForm):
    opening = "<tool_call>"
    closing = "</tool_call>"
    separator = f"{closing}\n{opening}"
    rules = ('text_value[lazy]: /(.|\\n)*/ "</arg_value>"',)

    @staticmethod
    def fits(template: str) -> bool:
        return "<arg_key>" in template and "<arg_value>" in template

    def rule(self, name: str, schema: Mapping[str, Any]) -> list[str]:
        parts = [literal(name + "\n")]
        required = schema.get("required") or ()
        for key, own in properties(schema).items():
            value = "text_value"
            if own.get("type") != "string":
                value = json_rule(own) + " " + literal("</arg_value>")
            begin = literal(f"<arg_key>{key}</arg_key>\n<arg_value>")
            part = f"{begin} {value} {literal(chr(10))}"
            parts.append(part if key in required else f"({part})?")
        return parts

    def read(self, inner: str, tools: Schemas) -> list[Call] | None:
        head, found, rest = inner.partition("<arg_key>")
        name, body = head.strip(), found + rest
        if name not in tools:  # nothing else shows that it is a call
            return None
        known = properties(tools[name])
        arguments: dict[str, object] = {}
        end = 0
        for each in _ARGUMENT.finditer(body):
            if each.start() != end:
                return None
            end, key = each.end(), each[1].strip()
            arguments[key] = typed_value(each[2], known.get(key, {}))
        return [self.new_call(name, arguments)] if not body[end:].strip() else None
