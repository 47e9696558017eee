"""Calls of DeepSeek V3 and R1, and of V3.1. The tags are tokens of the model.

    <tool-calls-begin><tool-call-begin>function<tool-sep>get_weather
    ```json
    {"city": "Oslo"}
    ```<tool-call-end><tool-calls-end>

V3.1 leaves out the word function and the fence.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import Any

from cairn.server.tools.form import Call, Schemas, ToolForm, json_rule, literal


def _tag(words: str) -> str:
    return "<\uff5c" + words.replace(" ", "\u2581") + "\uff5c>"


_BEGIN, _SEPARATOR, _END = _tag("tool call begin"), _tag("tool sep"), _tag("tool call end")
_CALL = re.compile(
    rf"\s*{_BEGIN}(?:function{_SEPARATOR})?(?P<name>[^\n<`{{]+?)(?:{_SEPARATOR}|\n```json\n)"
    rf"(?P<arguments>.*?)(?:\n```)?{_END}\s*",
    re.DOTALL,
)


class DeepSeek31(ToolForm):
    opening = _tag("tool calls begin")
    closing = _tag("tool calls end")
    special = (opening, closing, _BEGIN, _SEPARATOR, _END)

    @staticmethod
    def fits(template: str) -> bool:
        return DeepSeek31.opening in template

    def rule(self, name: str, schema: Mapping[str, Any]) -> list[str]:
        return [literal(f"{_BEGIN}{name}{_SEPARATOR}"), json_rule(schema), literal(_END)]

    def read(self, inner: str, tools: Schemas) -> list[Call] | None:
        calls, end = [], 0
        for found in _CALL.finditer(inner):
            if found.start() != end:
                return None
            end = found.end()
            calls.append(self.new_call(found["name"].strip(), json.loads(found["arguments"])))
        return calls if calls and not inner[end:].strip() else None


class DeepSeek3(DeepSeek31):
    separator = "\n"

    @staticmethod
    def fits(template: str) -> bool:
        return DeepSeek31.opening in template and "```json" in template

    def rule(self, name: str, schema: Mapping[str, Any]) -> list[str]:
        begin = f"{_BEGIN}function{_SEPARATOR}{name}\n```json\n"
        return [literal(begin), json_rule(schema), literal(f"\n```{_END}")]
