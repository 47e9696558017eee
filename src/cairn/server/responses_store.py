"""Responses that clients asked to store, in memory, the newest ones."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from typing import Any, NamedTuple

import msgspec

from cairn.server.api_error import ApiError
from cairn.server.responses_input import Item

_MOST_BYTES = 64 * 2**20


class Stored(NamedTuple):
    response: dict[str, Any]
    items: list[Item]
    """The conversation up to and with the response."""
    size: int


class ResponseStore:
    def __init__(self) -> None:
        self._stored: OrderedDict[str, Stored] = OrderedDict()  # the oldest first
        self._size = 0

    def add(self, response: dict[str, Any], items: Sequence[Item]) -> None:
        """`items` are the conversation that the response answers."""
        own = [Item.model_validate(item) for item in response["output"]]
        given = [item.model_dump(exclude_none=True) for item in items]
        size = len(msgspec.json.encode((response, given)))
        self._stored[response["id"]] = Stored(response, [*items, *own], size)
        self._size += size
        while self._size > _MOST_BYTES:
            self._size -= self._stored.popitem(last=False)[1].size

    def get(self, response_id: str, status: int = 404) -> Stored:
        """Raises an error with this status if there is none."""
        found = self._stored.get(response_id)
        if found is None:
            raise ApiError(
                status,
                f"the response {response_id[:100]!a} is not stored; only those sent with store: "
                "true are, in memory, the newest ones",
                param="previous_response_id",
                code="response_not_found",
            )
        return found

    def item(self, item_id: str) -> Item | None:
        """An item of a stored response."""
        for stored in reversed(self._stored.values()):
            for item in stored.items:
                if item.id == item_id:
                    return item
        return None

    def delete(self, response_id: str) -> None:
        self._size -= self.get(response_id).size
        del self._stored[response_id]
