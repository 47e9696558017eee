"""Calls of Llama 3.1 and later: the whole answer is JSON.

    {"name": "get_weather", "parameters": {"city": "Oslo"}}; {"name": ...}

A special token may come first. Text that begins with a brace and is no call is content.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import Any

from cairn.server.tools.form import Call, Schemas, ToolForm, json_rule, literal, read_objects


class Llama3(ToolForm):
    opening = "<|python_tag|>"
    separator = "; "
    at_start = "{"
    special = (opening,)
    free_text_bound = False  # a free answer may be JSON for other reasons

    @staticmethod
    def fits(template: str) -> bool:
        return "<|python_tag|>" in template or (
            "<|start_header_id|>" in template and '"parameters"' in template
        )

    def rule(self, name: str, schema: Mapping[str, Any]) -> list[str]:
        begin = f'{{"name": "{name}", "parameters": '
        return [literal(begin), json_rule(schema), literal("}")]

    def begun(self, inner: str) -> bool:
        return re.match(r'\s*\{\s*"(name|type)"', inner) is not None

    def read(self, inner: str, tools: Schemas) -> list[Call] | None:
        decoder, values, rest = json.JSONDecoder(), [], inner.strip()
        while rest:
            value, end = decoder.raw_decode(rest)
            values.append(value)
            rest = rest[end:].lstrip(" ;\n")
        return read_objects(self, values, "parameters") if values else None
