"""Calls of Hermes, Qwen2, Qwen3 and SmolLM2.

<tool_call>
{"name": "get_weather", "arguments": {"city": "Oslo"}}
</tool_call>
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from cairn.server.tools.form import Call, Schemas, ToolForm, json_rule, literal, read_objects


class Hermes(ToolForm):
    opening = "<tool_call>"
    closing = "</tool_call>"
    separator = f"{closing}\n{opening}"

    @staticmethod
    def fits(template: str) -> bool:
        return True  # models without a format of their own are told to write this one

    def rule(self, name: str, schema: Mapping[str, Any]) -> list[str]:
        begin = f'\n{{"name": "{name}", "arguments": '
        return [literal(begin), json_rule(schema), literal("}\n")]

    def read(self, inner: str, tools: Schemas) -> list[Call] | None:
        return read_objects(self, [json.loads(inner)])


def system_message(tools: Sequence[dict[str, Any]]) -> str:
    """Describes tools to a model whose template cannot."""
    listed = "\n".join(json.dumps(tool, ensure_ascii=False) for tool in tools)
    return (
        "You may call functions to help with the user's request. These are their signatures:\n"
        f"<tools>\n{listed}\n</tools>\n"
        "To call one, answer with its name and arguments as JSON between these tags:\n"
        f'{Hermes.opening}\n{{"name": "function name", "arguments": {{"argument": "value"}}}}\n'
        f"{Hermes.closing}"
    )


def written_call(name: str, arguments: object) -> str:
    """A call as the model would have written it."""
    inner = json.dumps({"name": name, "arguments": arguments})
    return f"{Hermes.opening}\n{inner}\n{Hermes.closing}"
