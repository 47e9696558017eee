"""Answers in the format of OpenAI's Responses API."""

from __future__ import annotations

import secrets
from collections.abc import Callable
from typing import Any

import msgspec

from cairn.server.answer import Choice
from cairn.server.api_error import ApiError
from cairn.server.formats import Format, Reads, Scores
from cairn.server.output import Parsed
from cairn.server.responses_input import ResponsesRequest
from cairn.server.tools.form import Call

_encode = msgspec.json.Encoder().encode
# What the events of an item's text are called, and the type of its part.
_NAMES = {
    "message": ("response.output_text", "output_text"),
    "reasoning": ("response.reasoning_text", "reasoning_text"),
}

Keep = Callable[[dict[str, Any]], None]
"""Stores a response."""


class ResponsesFormat(Format):
    def __init__(self, body: ResponsesRequest, keep: Keep | None, *given: Any) -> None:
        super().__init__(*given)
        self._body = body
        self._keep = keep
        self._number = 0  # of the next event
        self._items: list[dict[str, Any]] = []
        self._open = ""  # type of the item that is being sent
        self._unsent: list[dict[str, Any]] = []  # scores of tokens that brought no text yet
        begun = self._response("in_progress")
        # Made here: the first token may come before they are sent, and events are numbered.
        self._first = self._event("response.created", response=begun) + self._event(
            "response.in_progress", response=begun
        )

    # -- a stream -----------------------------------------------------------------------------

    def first(self) -> bytes:
        return self._first

    def emit(
        self, choice: Choice, new: Parsed, scores: Scores, reads: Reads, ids: list[int]
    ) -> bytes:
        events = b""
        if new.reasoning:
            events += self._add_text("reasoning", new.reasoning, [])
        self._unsent += self.token_texts.scored(scores)
        ends_message = choice.reason is not None and (self._open == "message" or not self._items)
        if new.text or (ends_message and self._unsent):
            events += self._add_text("message", new.text, self._unsent)
            self._unsent = []
        for call in new.calls:
            events += self._add_call(call)
        if choice.reason is not None:
            if not self._items:
                events += self._begin("message")
            events += self._end(choice.reason)
        return events

    def last(self) -> bytes:
        body = self._done()
        return self._event(f"response.{body['status']}", response=body)

    def failure(self, error: ApiError) -> bytes:
        told = {"message": str(error), "code": error.code, "param": error.param}
        return self._event("error", **told, error=told)

    def _begin(self, kind: str) -> bytes:
        """Begin an item with text, unless one of this kind is open."""
        if self._open == kind:
            return b""
        ended = self._end("stop")
        self._open = kind
        item = _item(kind)
        self._items.append(item)
        part = {**item["content"][0]}
        empty = {**item, "content": []}
        return (
            ended
            + self._event("response.output_item.added", output_index=self._index, item=empty)
            + self._event("response.content_part.added", **self._place, part=part)
        )

    def _add_text(self, kind: str, text: str, scores: list[dict[str, Any]]) -> bytes:
        begun = self._begin(kind)
        (part,) = self._items[-1]["content"]
        part["text"] += text
        more = {}
        if kind == "message":
            part["logprobs"] += scores
            more["logprobs"] = scores
        return begun + self._event(f"{_NAMES[kind][0]}.delta", **self._place, delta=text, **more)

    def _add_call(self, call: Call) -> bytes:
        events = self._end("stop")
        item = _call(call)
        self._items.append(item)
        where = {"item_id": item["id"], "output_index": self._index}
        empty = {**item, "arguments": "", "status": "in_progress"}
        arguments = "response.function_call_arguments"
        events += self._event("response.output_item.added", output_index=self._index, item=empty)
        events += self._event(f"{arguments}.delta", **where, delta=call.arguments)
        done = {"name": call.name, "arguments": call.arguments}
        events += self._event(f"{arguments}.done", **where, **done)
        return events + self._event(
            "response.output_item.done", output_index=self._index, item=item
        )

    def _end(self, reason: str) -> bytes:
        """End the open item, if there is one."""
        if not self._open:
            return b""
        kind, self._open = self._open, ""
        item = self._items[-1]
        item["status"] = "incomplete" if reason == "length" else "completed"
        (part,) = item["content"]
        more = {"logprobs": part["logprobs"]} if kind == "message" else {}
        name, place = _NAMES[kind][0], self._place
        return (
            self._event(f"{name}.done", **place, text=part["text"], **more)
            + self._event("response.content_part.done", **place, part=part)
            + self._event("response.output_item.done", output_index=self._index, item=item)
        )

    @property
    def _index(self) -> int:
        return len(self._items) - 1

    @property
    def _place(self) -> dict[str, Any]:
        where = {"item_id": self._items[-1]["id"], "output_index": self._index}
        return {**where, "content_index": 0}

    def _event(self, kind: str, **fields: Any) -> bytes:
        body = {"type": kind, "sequence_number": self._number, **fields}
        self._number += 1
        return f"event: {kind}\ndata: ".encode() + _encode(body) + b"\n\n"

    # -- the whole response -------------------------------------------------------------------

    def whole(self) -> dict[str, Any]:
        (choice,) = self.choices
        status = "incomplete" if choice.reason == "length" else "completed"
        texts = (("reasoning", "".join(choice.thoughts)), ("message", self.text_of(choice)))
        for kind, text in texts:
            if text or (kind == "message" and not choice.calls):
                item = {**_item(kind), "status": status}
                item["content"][0]["text"] = text
                if kind == "message":
                    item["content"][0]["logprobs"] = self.token_texts.scored(choice.logprobs)
                self._items.append(item)
        self._items += [_call(call) for call in choice.calls]
        return self._done()

    def _done(self) -> dict[str, Any]:
        (choice,) = self.choices
        cut = choice.reason == "length"
        body = self._response("incomplete" if cut else "completed")
        if self._keep is not None:
            self._keep(body)
        return body

    def _response(self, status: str) -> dict[str, Any]:
        body = self._body
        given = body.model_dump(
            exclude_none=True,
            by_alias=True,
            include={"reasoning", "text", "tool_choice", "tools"},
        )
        cut = status == "incomplete"
        return {
            "id": self.head["id"],
            "object": "response",
            "created_at": self.head["created"],
            "status": status,
            "background": False,
            "error": None,
            "incomplete_details": {"reason": "max_output_tokens"} if cut else None,
            "instructions": body.instructions,
            "max_output_tokens": body.max_output_tokens,
            "metadata": body.metadata or {},
            "model": self.head["model"],
            "output": self._items,
            "parallel_tool_calls": body.parallel_tool_calls is not False,
            "previous_response_id": body.previous_response_id,
            "reasoning": given.get("reasoning", {"effort": None, "summary": None}),
            "service_tier": "default",
            "store": self._keep is not None,
            "temperature": body.temperature,
            "text": given.get("text", {"format": {"type": "text"}}),
            "tool_choice": given.get("tool_choice", "auto"),
            "tools": given.get("tools", []),
            "top_logprobs": body.top_logprobs or 0,
            "top_p": body.top_p,
            "truncation": "disabled",
            "usage": None if status == "in_progress" else self._used(),
            "user": body.user,
        }

    def _used(self) -> dict[str, Any]:
        (choice,), usage = self.choices, self.usage()
        return {
            "input_tokens": usage["prompt_tokens"],
            "input_tokens_details": usage["prompt_tokens_details"],
            "output_tokens": usage["completion_tokens"],
            "output_tokens_details": {"reasoning_tokens": choice.thought_tokens},
            "total_tokens": usage["total_tokens"],
        }


def _item(kind: str) -> dict[str, Any]:
    part: dict[str, Any] = {"type": _NAMES[kind][1], "text": ""}
    if kind == "reasoning":
        own: dict[str, Any] = {"id": f"rs_{secrets.token_hex(12)}", "summary": []}
    else:
        own = {"id": f"msg_{secrets.token_hex(12)}", "role": "assistant"}
        part |= {"annotations": [], "logprobs": []}
    return {**own, "type": kind, "status": "in_progress", "content": [part]}


def _call(call: Call) -> dict[str, Any]:
    return {
        "id": f"fc_{secrets.token_hex(12)}",
        "type": "function_call",
        "status": "completed",
        "call_id": call.id,
        "name": call.name,
        "arguments": call.arguments,
    }
