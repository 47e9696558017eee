"""Converts messages to the form that chat templates expect."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from cairn.server.schema import ChatMessage, Content, Tool
from cairn.server.tools.hermes import system_message, written_call


def template_messages(
    messages: Sequence[ChatMessage], tools: Sequence[Tool] | None, template: str
) -> tuple[list[dict[str, Any]], list[dict[str, Any]] | None]:
    """Messages, and tools for the template; None if a message describes them or there are none."""
    knows_calls = "tool_calls" in template
    rendered = [_message(message, knows_calls=knows_calls) for message in messages]
    if not tools:
        return rendered, None
    listed = [tool.model_dump(exclude_none=True) for tool in tools]
    if "tools" in template:
        return rendered, listed
    told = system_message(listed)
    if rendered[0]["role"] == "system":
        rendered[0]["content"] += "\n\n" + told
        return rendered, None
    return [{"role": "system", "content": told}, *rendered], None


def _message(message: ChatMessage, *, knows_calls: bool) -> dict[str, Any]:
    content = _text(message.content)
    role = "system" if message.role == "developer" else message.role
    result: dict[str, Any] = {"role": role, "content": content}
    for name in ("name", "tool_call_id"):
        if (value := getattr(message, name)) is not None:
            result[name] = value
    thoughts = message.reasoning_content or message.reasoning
    if thoughts:
        result["reasoning_content"] = thoughts
    if message.tool_calls:
        calls = [
            {"name": call.function.name, "arguments": _arguments(call.function.arguments)}
            for call in message.tool_calls
        ]
        if knows_calls:
            result["tool_calls"] = [
                {"id": own.id, "type": "function", "function": call}
                for own, call in zip(message.tool_calls, calls, strict=True)
            ]
        else:
            written = [written_call(call["name"], call["arguments"]) for call in calls]
            result["content"] = "\n".join(filter(None, [content, *written]))
    return result


def message_text(message: ChatMessage) -> str:
    return _text(message.content)


def _text(content: Content | None) -> str:
    if content is None:
        return ""
    return content if isinstance(content, str) else "".join(part.text or "" for part in content)


def _arguments(text: str | dict[str, Any] | None) -> Any:
    """Templates write arguments as JSON themselves. Text that is not JSON stays as it is."""
    if not isinstance(text, str):
        return text or {}
    try:
        value: object = json.loads(text)
        json.dumps(value)  # as templates do; both fail on values that are nested too deeply
    except (ValueError, RecursionError):
        return text
    return value
