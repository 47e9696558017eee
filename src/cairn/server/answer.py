"""What comes back for one HTTP request: tokens in, text and events out.

Everything that one report of the engine brings is taken in one pass: each choice turns its token
into text, the answer's format turns that into an event, and the event goes to the client's
connection. No task is woken for it.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, Protocol

from cairn.engine.logprobs import TokenLogprob
from cairn.server.api_error import ApiError
from cairn.server.outlet import Outlet
from cairn.server.wire import Detail, Start
from cairn.text.detokenizer import Detokenizer
from cairn.trace import TokenReads


@dataclass(frozen=True, slots=True)
class Ended:
    """The last word on a choice."""

    reason: Literal["stop", "length"]
    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int
    queued_seconds: float
    prompt_logprobs: list[TokenLogprob | None] | None


@dataclass(frozen=True, slots=True)
class Piece:
    """What a token brought for one choice, where that is more than text."""

    token: int
    text: str
    logprob: TokenLogprob | None  # if asked for
    reads: TokenReads | None  # if traced
    ended: Ended | None


class Format(Protocol):
    """How an answer is written down. Events are bytes, as they are sent; b"" is none."""

    streams: bool

    def first(self) -> bytes:
        """Events before any token."""

    def add_text(self, index: int, text: str) -> bytes:
        """A choice said more."""

    def add(self, index: int, piece: Piece) -> bytes:
        """Likewise, with scores, pages or its end."""

    def last(self) -> bytes:
        """Events after all choices have ended."""

    def whole(self) -> object:
        """The answer in one; after all choices have ended."""


class Choice:
    """One choice: its tokens become text here, and a stop string ends it here.

    The engine hears of a stop string a step or two later. The tokens it makes until then are
    dropped, so that text, usage and reason are those of the token that completed the string.
    """

    def __init__(
        self, number: int, index: int, prompt_tokens: int, detokenizer: Detokenizer | None
    ) -> None:
        self.number = number  # what the engine calls it
        self.index = index  # its place in the answer
        self.answer: Answer  # set by the answer
        self.last_token: float | None = None  # when it came
        self.ended: Ended | None = None
        self._prompt_tokens = prompt_tokens
        self._detokenizer = detokenizer
        self._tokens = 0
        self._start: Start | None = None

    def take(self, token: int, detail: Detail | None) -> bytes:
        """The events of a new token, maybe none; if it is the choice's end, `ended` is set."""
        self._tokens += 1
        reason = None if detail is None else detail.reason
        text = ""
        if self._detokenizer is not None:
            if reason != "stop":  # a stop token has no text
                text = self._detokenizer.push((token,))
            if reason is not None or self._detokenizer.stopped:
                text += self._detokenizer.finish()
            if self._detokenizer.stopped:
                reason = "stop"
        if detail is None and reason is None:
            return self.answer.form.add_text(self.index, text)
        if detail is not None and detail.start is not None:
            self._start = detail.start
        if reason is not None:
            assert self._start is not None
            self.ended = Ended(
                reason,
                self._prompt_tokens,
                self._tokens,
                self._start.cached_tokens,
                self._start.queued_seconds,
                self._start.prompt_logprobs,
            )
        logprob, reads = (None, None) if detail is None else (detail.logprob, detail.reads)
        return self.answer.form.add(self.index, Piece(token, text, logprob, reads, self.ended))


class Answer:
    """All choices of one HTTP request. A slow reader holds up nobody but itself.

    What can wait to be sent is bounded by the request's own max_tokens.
    """

    def __init__(self, choices: Sequence[Choice], form: Format, arrival: float) -> None:
        self.choices = choices
        self.form = form
        self.arrival = arrival
        self.first_token: float | None = None
        self.open = len(choices)
        self.outlet = Outlet()
        self._expected: set[int] = set()  # requests the engine has not accepted yet
        self._done = asyncio.Event()
        self._accepted: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._failure: ApiError | None = None
        for choice in choices:
            choice.answer = self

    async def accepted(self) -> None:
        """Returns when the engine has taken all of it, raises if it has not."""
        await self._accepted

    async def complete(self) -> None:
        """Returns when all choices have ended and their events are sent; raises if they cannot."""
        await self._done.wait()
        await self.outlet.drained()
        if self._failure is not None:
            raise self._failure

    # -- told by the engine's client ----------------------------------------------------------

    def expect(self, number: int) -> None:
        self._expected.add(number)

    def accept(self, number: int) -> None:
        self._expected.discard(number)
        if not self._expected and not self._accepted.done():
            self._accepted.set_result(None)

    def choice_ended(self) -> None:
        self.open -= 1
        if not self.open:
            self._done.set()

    def fail(self, error: ApiError) -> None:
        self._failure = self._failure or error
        if not self._accepted.done():
            self._accepted.set_exception(error)
            self._accepted.exception()  # seen, even if nobody waits any more
        self._done.set()
