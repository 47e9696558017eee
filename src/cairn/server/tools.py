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
        self._inside = False
        self._between = False  # after a call: white space before the next one is dropped

    def push(self, text: str, *, final: bool) -> tuple[str, list[dict[str, Any]]]:
        self._held += text
        said: list[str] = []
        calls: list[dict[str, Any]] = []
        while self._advance(said, calls):
            pass
        if final:
            rest, self._held = self._held, ""
            if self._inside:
                # A model may end without the closing tag.
                if (call := _parse(rest)) is None:
                    said.append(BEGIN + rest)
                else:
                    calls.append(call)
            elif not (self._between and not rest.strip()):
                said.append(rest)
        return "".join(said), calls

    def _advance(self, said: list[str], calls: list[dict[str, Any]]) -> bool:
        """Take one piece off the held text; False if more text is needed."""
        if self._inside:
            inner, found, after = self._held.partition(END)
            if not found:
                return False
            if (call := _parse(inner)) is None:
                said.append(BEGIN + inner + END)
            else:
                calls.append(call)
            self._held, self._inside, self._between = after, False, True
            return True
        before, found, after = self._held.partition(BEGIN)
        if found:
            if not (self._between and not before.strip()):
                said.append(before.rstrip() if before.strip() else "")
            self._held, self._inside = after, True
            return True
        keep = overlap(before, BEGIN)
        ready = before[: len(before) - keep]
        if self._between and not ready.strip():
            return False
        ready = ready.rstrip()  # white space before a call is dropped
        if not ready:
            return False
        said.append(ready)
        self._held = self._held[len(ready) :]
        self._between = False
        return False


def _parse(text: str) -> dict[str, Any] | None:
    try:
        value = json.loads(text)
    except ValueError:
        return None
    if not isinstance(value, dict) or not isinstance(value.get("name"), str):
        return None
    arguments = value.get("arguments", value.get("parameters", {}))
    written = arguments if isinstance(arguments, str) else json.dumps(arguments, ensure_ascii=False)
    return {
        "id": f"call_{secrets.token_hex(12)}",
        "type": "function",
        "function": {"name": value["name"], "arguments": written},
    }
