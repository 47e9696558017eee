"""Answers in the format of Anthropic's Messages API."""

from __future__ import annotations

import json
from typing import Any

import msgspec

from cairn.server.answer import Choice
from cairn.server.api_error import ApiError
from cairn.server.formats import Format, Reads, Scores
from cairn.server.output import Parsed
from cairn.server.tools.form import Call

_encode = msgspec.json.Encoder().encode


class MessagesFormat(Format):
    def __init__(self, tokens_per_page: int, *given: Any) -> None:
        super().__init__(*given)
        self._tokens_per_page = tokens_per_page
        self._block = -1  # index of the newest block
        self._open = ""  # its type, while it is being sent

    def first(self) -> bytes:
        (choice,) = self.choices
        usage = _usage(choice.prompt_tokens, 0, 0, 0)
        body = {**self._message([]), "stop_reason": None, "stop_sequence": None, "usage": usage}
        return _event("message_start", message=body) + _event("ping")

    def emit(
        self, choice: Choice, new: Parsed, scores: Scores, reads: Reads, ids: list[int]
    ) -> bytes:
        events = b""
        if new.reasoning:
            events += self._begin("thinking", {"thinking": "", "signature": ""})
            events += self._delta({"type": "thinking_delta", "thinking": new.reasoning})
        if new.text:
            events += self._begin("text", {"text": ""})
            events += self._delta({"type": "text_delta", "text": new.text})
        for call in new.calls:
            own = {"id": call.id, "name": call.name, "input": {}}
            events += self._end() + self._begin("tool_use", own)
            events += self._delta({"type": "input_json_delta", "partial_json": call.arguments})
        return events + (self._end() if choice.reason is not None else b"")

    def last(self) -> bytes:
        (choice,) = self.choices
        delta = self._stop(choice)
        return _event("message_delta", delta=delta, usage=self._used(choice)) + _event(
            "message_stop"
        )

    def whole(self) -> dict[str, Any]:
        (choice,) = self.choices
        content: list[dict[str, Any]] = []
        if thoughts := "".join(choice.thoughts):
            content.append({"type": "thinking", "thinking": thoughts, "signature": ""})
        if text := self.text_of(choice):
            content.append({"type": "text", "text": text})
        content += [_tool_use(call) for call in choice.calls]
        return {**self._message(content), **self._stop(choice), "usage": self._used(choice)}

    def failure(self, error: ApiError) -> bytes:
        return b"event: error\ndata: " + _encode(error.anthropic()) + b"\n\n"

    def _message(self, content: list[dict[str, Any]]) -> dict[str, Any]:
        head = {"id": self.head["id"], "type": "message", "role": "assistant"}
        return {**head, "model": self.head["model"], "content": content}

    def _stop(self, choice: Choice) -> dict[str, Any]:
        reason = {"tool_calls": "tool_use", "length": "max_tokens"}.get(
            self.reason_of(choice) or "", "end_turn"
        )
        if choice.stop_text is not None and not choice.calls:
            reason = "stop_sequence"
        return {"stop_reason": reason, "stop_sequence": choice.stop_text}

    def _used(self, choice: Choice) -> dict[str, int]:
        """Complete pages of the prompt are in the cache afterwards."""
        cached = 0 if choice.start is None else choice.start.cached_tokens
        whole_pages = choice.prompt_tokens // self._tokens_per_page * self._tokens_per_page
        return _usage(choice.prompt_tokens, choice.tokens, cached, max(0, whole_pages - cached))

    # -- blocks of a stream -------------------------------------------------------------------

    def _begin(self, kind: str, fields: dict[str, Any]) -> bytes:
        """Begin a block, unless one of this kind is open."""
        if self._open == kind:
            return b""
        ended = self._end()
        self._block, self._open = self._block + 1, kind
        block = {"type": kind, **fields}
        return ended + _event("content_block_start", index=self._block, content_block=block)

    def _delta(self, delta: dict[str, Any]) -> bytes:
        return _event("content_block_delta", index=self._block, delta=delta)

    def _end(self) -> bytes:
        if not self._open:
            return b""
        self._open = ""
        return _event("content_block_stop", index=self._block)


def _event(kind: str, **fields: Any) -> bytes:
    return f"event: {kind}\ndata: ".encode() + _encode({"type": kind, **fields}) + b"\n\n"


def _usage(prompt: int, completion: int, cached: int, created: int) -> dict[str, int]:
    return {
        "input_tokens": prompt - cached - created,
        "cache_creation_input_tokens": created,
        "cache_read_input_tokens": cached,
        "output_tokens": completion,
    }


def _tool_use(call: Call) -> dict[str, Any]:
    try:
        given = json.loads(call.arguments)
    except (ValueError, RecursionError):  # the model wrote them as text
        given = call.arguments
    arguments = given if isinstance(given, dict) else {"arguments": given}
    return {"type": "tool_use", "id": call.id, "name": call.name, "input": arguments}
