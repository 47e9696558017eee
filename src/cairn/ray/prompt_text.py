"""The text by which a request is routed: its prompt, as far as the ingress can tell."""

from __future__ import annotations

from typing import Any

import msgspec

_GENERATING = ("/chat/completions", "/completions", "/messages", "/responses")


class _Body(msgspec.Struct):
    """The fields that matter here; the replica checks all of them."""

    messages: Any = None
    prompt: Any = None
    system: Any = None  # of the Messages API
    instructions: Any = None  # of the Responses API, like `input`
    input: Any = None
    cache_salt: Any = None


def routing_text(path: str, body: bytes) -> str:
    """The text of the prompt, or "" if there is none. The replica reports bodies that are wrong.

    The text of a conversation begins with that of its earlier turns. Prompts with different salts,
    which share no cache, begin differently.
    """
    if path.removeprefix("/v1") not in _GENERATING:
        return ""
    try:
        fields = msgspec.json.decode(body, type=_Body)
    except msgspec.MsgspecError:
        return ""
    turns = fields.messages if fields.messages is not None else fields.input
    text = turns if isinstance(turns, str) else ""
    if isinstance(turns, list):
        text = "".join(map(_message, turns))
    if fields.system or fields.instructions:
        before = {"role": "system", "content": fields.system or fields.instructions}
        text = _message(before) + text
    text = text or _prompt(fields.prompt)
    return f"{fields.cache_salt}\n{text}" if text else ""


def _message(message: Any) -> str:
    if not isinstance(message, dict):
        return ""
    content = message.get("content")
    if isinstance(content, list):
        content = "".join(str(part.get("text")) for part in content if isinstance(part, dict))
    return f"{message.get('role')}\n{content}\n"


def _prompt(prompt: Any) -> str:
    """A prompt may be text, token ids, or a list of either; the first one counts."""
    if isinstance(prompt, list) and prompt and isinstance(prompt[0], str | list):
        prompt = prompt[0]
    return " ".join(map(str, prompt)) if isinstance(prompt, list) else str(prompt or "")
