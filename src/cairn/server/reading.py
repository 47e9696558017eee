"""How far the engine has read a prompt, for clients that want to see it while they wait."""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec

if TYPE_CHECKING:  # the API process does not load the engine
    from cairn.engine.request import Request
    from cairn.server.answer import Choice


class Reading:
    """The engine's side: requests whose prompt is not read yet, by the number of their choice."""

    def __init__(self) -> None:
        self._requests: dict[int, Request] = {}
        self._told: dict[int, int] = {}

    def watch(self, number: int, request: Request) -> None:
        self._requests[number] = request
        self._told[number] = 0

    def news(self) -> list[tuple[int, int]]:
        """(number, tokens read) of the requests that have read on since the last call."""
        news = []
        for number, request in list(self._requests.items()):
            if request.num_output or request.finish_reason is not None:
                del self._requests[number], self._told[number]
            elif request.computed > self._told[number]:
                self._told[number] = request.computed
                news.append((number, request.computed))
        return news


def reading_event(choice: Choice, tokens: int) -> bytes:
    """An event of a stream: `tokens` tokens of the prompt have been read."""
    told = {"read_tokens": tokens, "prompt_tokens": choice.prompt_tokens}
    body = {"object": "cairn.reading", "choices": [], "cairn": told}
    return b"data: " + msgspec.json.encode(body) + b"\n\n"
