"""Calls of Qwen3-Coder: XML, with arguments as plain text.

<tool_call>
<function=get_weather>
<parameter=city>
Oslo
</parameter>
</function>
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

_CALL = re.compile(r"\s*<function=([^>\n]+)>(.*?)(?:</function>\s*)?", re.DOTALL)
_ARGUMENT = re.compile(r"\s*<parameter=([^>\n]+)>\n?(.*?)\n?</parameter>\s*", re.DOTALL)


class Qwen3Coder(ToolForm):
    opening = "<tool_call>"
    closing = "</tool_call>"
    separator = f"{closing}\n{opening}"
    rules = ('text_value[lazy]: /(.|\\n)*/ "\\n</parameter>"',)

    @staticmethod
    def fits(template: str) -> bool:
        return "<function=" in template and "<parameter=" in template

    def rule(self, name: str, schema: Mapping[str, Any]) -> list[str]:
        parts = [literal(f"\n<function={name}>\n")]
        required = schema.get("required") or ()
        for key, own in properties(schema).items():
            value = "text_value"
            if own.get("type") != "string":
                value = json_rule(own) + " " + literal("\n</parameter>")
            part = f"{literal(f'<parameter={key}>' + chr(10))} {value} {literal(chr(10))}"
            parts.append(part if key in required else f"({part})?")
        return [*parts, literal("</function>\n")]

    def read(self, inner: str, tools: Schemas) -> list[Call] | None:
        found = _CALL.fullmatch(inner)
        if found is None:
            return None
        name, body = found[1].strip(), found[2]
        known = properties(tools.get(name, {}))
        arguments: dict[str, object] = {}
        end = 0
        for each in _ARGUMENT.finditer(body):
            if each.start() != end:
                return None
            end, key = each.end(), each[1].strip()
            arguments[key] = typed_value(each[2], known.get(key, {}))
        return [self.new_call(name, arguments)] if not body[end:].strip() else None
