"""What comes back for one request, from the engine's reports to whoever waits for it."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncIterator

from cairn.server.api_error import ApiError
from cairn.server.wire import Piece


class Answer:
    """Pieces wait here until they are taken; a slow reader holds up nobody but itself.

    What can wait is bounded by the request's own max_tokens.
    """

    def __init__(self, ids: list[str], choices: int, arrival: float) -> None:
        self.ids = ids  # of the engine's requests, one for each prompt
        self.arrival = arrival
        self.first_token: float | None = None
        self.last_token: dict[int, float] = {}  # when, by choice
        self.open = choices
        self._expected = set(ids)
        self._pieces: deque[tuple[int, Piece]] = deque()
        self._wake = asyncio.Event()
        self._accepted: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._failure: ApiError | None = None

    async def accepted(self) -> None:
        """Returns when the engine has taken all of it, raises if it has not."""
        await self._accepted

    async def pieces(self) -> AsyncIterator[list[tuple[int, Piece]]]:
        """All that has come, by index of the choice, again and again, until all have ended."""
        while True:
            await self._wake.wait()
            self._wake.clear()
            pieces = list(self._pieces)
            self._pieces.clear()
            if pieces:
                yield pieces
            if self._pieces:
                continue
            if self._failure is not None:
                raise self._failure
            if not self.open:
                return

    # -- told by the engine's client ----------------------------------------------------------

    def accept(self, request_id: str) -> None:
        self._expected.discard(request_id)
        if not self._expected and not self._accepted.done():
            self._accepted.set_result(None)

    def put(self, index: int, piece: Piece) -> None:
        self._pieces.append((index, piece))
        self.open -= piece.ended is not None
        self._wake.set()

    def fail(self, error: ApiError) -> None:
        self._failure = self._failure or error
        if not self._accepted.done():
            self._accepted.set_exception(error)
            self._accepted.exception()  # seen, even if nobody waits any more
        self._wake.set()
