"""How much the server takes on at once."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from cairn.server.api_error import ApiError

_RETRY_AFTER = 1


class Gate:
    """Counts choices from when their request is read to when it is answered."""

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self.held = 0

    @contextmanager
    def hold(self, count: int = 1) -> Iterator[None]:
        if self.held + count > self._limit:
            raise ApiError(
                429,
                f"{self.held} choices are being answered or wait, {count} more are asked for and "
                f"max_concurrent_requests is {self._limit}; send it again later",
                code="too_many_requests",
                retry_after=_RETRY_AFTER,
            )
        self.held += count
        try:
            yield
        finally:
            self.held -= count
