"""Tool calls: describes tools to a model, and finds its calls in the generated text.

    <tool_call>
    {"name": "get_weather", "arguments": {"city": "Oslo"}}
    </tool_call>

This is the format of Hermes, Qwen2, Qwen3 and SmolLM2. A chat template that supports tools
describes them itself; otherwise a system message does.
"""

from __future__ import annotations

import json
import secrets
from collections.abc import Sequence
from typing import Any

from cairn.text.detokenizer import overlap

BEGIN, END = "<tool_call>", "</tool_call>"


def system_message(tools: Sequence[dict[str, Any]]) -> str:
    listed = "\n".join(json.dumps(tool, ensure_ascii=False) for tool in tools)
    return (
        "You may call functions to help with the user's request. These are their signatures:\n"
        f"<tools>\n{listed}\n</tools>\n"
        "To call one, answer with its name and arguments as JSON between these tags:\n"
        f'{BEGIN}\n{{"name": "function name", "arguments": {{"argument": "value"}}}}\n{END}'
    )


class ToolParser:
    """Splits a choice's text, as it comes, into content and tool calls.

    A call is returned when it is complete. Text that begins like a call but is none is content.
    """

    def __init__(self) -> None:
        self._held = ""
        self._after_call = False  # white space before the next call is dropped

    def push(self, text: str, *, final: bool) -> tuple[str, list[dict[str, Any]]]:
        """Content and calls that new text completes; with `final` all that is left."""
        self._held += text
        content: list[str] = []
        calls: list[dict[str, Any]] = []
        while BEGIN in self._held:
            before, _, rest = self._held.partition(BEGIN)
            content.append(before.rstrip())  # white space before a call is dropped
            inner, closed, after = rest.partition(END)
            if not (closed or final):  # a model may end without the closing tag
                self._held = BEGIN + rest
                break
            if (call := _parse(inner)) is None:
                content.append(BEGIN + inner + closed)
            else:
                calls.append(call)
            self._held, self._after_call = after, True
        else:
            open_tag = overlap(self._held, BEGIN)
            ready = self._held if final else self._held[: len(self._held) - open_tag].rstrip()
            if ready.strip() or not self._after_call:
                content.append(ready)
                self._held = self._held[len(ready) :]
                self._after_call = False
        return "".join(content), calls


def _parse(text: str) -> dict[str, Any] | None:
    try:
        value = json.loads(text)
        if not isinstance(value, dict) or not isinstance(value.get("name"), str):
            return None
        arguments = value.get("arguments", value.get("parameters", {}))
        written = arguments
        if not isinstance(arguments, str):
            written = json.dumps(arguments, ensure_ascii=False)
    except (ValueError, RecursionError):
        return None
    return {
        "id": f"call_{secrets.token_hex(12)}",
        "type": "function",
        "function": {"name": value["name"], "arguments": written},
    }
