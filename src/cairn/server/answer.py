"""The answer to one HTTP request: turns the engine's tokens into text, and text into events.

A report of the engine is handled in one pass: each choice turns its token into text, the answer's
format turns that into an event, and the event goes to the client's connection. No task is woken.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Literal

from cairn.engine.logprobs import TokenLogprob
from cairn.server.api_error import ApiError
from cairn.server.outlet import Outlet
from cairn.server.tools.form import Call
from cairn.server.wire import Detail, Start
from cairn.text.detokenizer import Detokenizer

if TYPE_CHECKING:
    from cairn.server.formats import Format


class Choice:
    """One choice of an answer. Its tokens become text here, and a stop string ends it here.

    The engine learns of a stop string a step or two later. Tokens that it makes until then are
    dropped, so that text, usage and reason are those of the token that completed the string.
    """

    def __init__(
        self,
        number: int,
        index: int,
        prompt_tokens: int,
        detokenizer: Detokenizer | None,
        *,
        silent: bool = False,
    ) -> None:
        """`silent`: only the prompt is wanted. The engine makes one token, which is dropped."""
        self.number = number  # its name in messages to and from the engine
        self.index = index  # in the answer
        self.answer: Answer  # set by the answer
        self.prompt_tokens = prompt_tokens
        self.tokens = 0  # generated so far
        self.thought_tokens = 0  # those of them that are thoughts
        self.drafted = 0  # drafts that were checked
        self.accepted = 0  # and came true
        self.start: Start | None = None  # sent with the first token
        self.last_token: float | None = None  # time it came
        self.reason: Literal["stop", "length"] | None = None  # set when the choice ends
        self.vector = b""  # float32, if an embedding is asked for
        self.stop_text: str | None = None  # the stop string that ended it
        self.stop_token: int | None = None  # the token that ended it
        self._detokenizer = detokenizer
        self._silent = silent
        # Used by the format: the output so far or, in a stream, what the next event needs.
        self.texts: list[str] = []
        self.thoughts: list[str] = []
        self.logprobs: list[TokenLogprob] = []
        self.reads: list[dict[str, Any]] = []
        self.ids: list[int] = []
        self.calls: list[Call] = []
        self.offset = 0  # characters, for text_offset of completions
        self.around = b"", b""  # bytes of an event before and after its text
        self.echo = ""  # text to send before the first token's

    def take(self, token: int, detail: Detail | None) -> bytes:
        """The events of a new token, maybe none. Sets `reason` if it ends the choice."""
        self.tokens += not self._silent
        reason = None if detail is None else detail.reason
        text = ""
        if self._silent:
            reason = "length"
        elif self._detokenizer is not None:
            if reason != "stop":  # a stop token has no text
                text = self._detokenizer.push((token,))
            if reason is not None:
                text += self._detokenizer.finish()
            if self._detokenizer.stopped:
                reason, self.stop_text = "stop", self._detokenizer.matched
        if reason == "stop" and self.stop_text is None:
            self.stop_token = token
        if detail is None and reason is None and self.answer.form.plain:
            return self.answer.form.add_text(self, text)
        if detail is not None and detail.start is not None:
            self.start = detail.start
        self.reason = reason
        return self.answer.form.add(self, token, text, detail)

    def take_vector(self, vector: bytes) -> None:
        """The choice is an embedding, and has ended."""
        self.vector, self.reason, self.last_token = vector, "stop", time.perf_counter()


class Answer:
    """All choices of one HTTP request. A slow client delays nobody else.

    The request's own max_tokens bounds what can wait to be sent.
    """

    def __init__(
        self, choices: Sequence[Choice], form: Format, requests: int, arrival: float
    ) -> None:
        self.choices = choices
        self.form = form
        self.arrival = arrival
        self.first_token: float | None = None
        self.open = len(choices)
        self.outlet = Outlet()
        self._unaccepted = requests
        self._done = asyncio.Event()
        self._accepted: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._failure: ApiError | None = None
        for choice in choices:
            choice.answer = self

    async def accepted(self) -> None:
        """Returns when the engine has accepted all requests, raises if it has not."""
        await self._accepted

    async def complete(self) -> None:
        """Returns when all choices have ended and their events are sent, raises if one failed."""
        await self._done.wait()
        await self.outlet.drained()
        if self._failure is not None:
            raise self._failure

    # -- called by the engine's client --------------------------------------------------------

    def accept(self) -> None:
        """The engine has accepted one of the requests."""
        self._unaccepted -= 1
        if not self._unaccepted and not self._accepted.done():
            self._accepted.set_result(None)

    def choice_ended(self) -> None:
        self.open -= 1
        if not self.open:
            self._done.set()

    def fail(self, error: ApiError) -> None:
        self._failure = self._failure or error
        if not self._accepted.done():
            self._accepted.set_exception(error)
            self._accepted.exception()  # mark it as retrieved, even if nobody waits any more
        self._done.set()
