"""The order in which cached items are evicted, without ever scanning all of them."""

from __future__ import annotations

import heapq
from collections.abc import Callable, Hashable
from typing import Generic, TypeVar

Item = TypeVar("Item", bound=Hashable)

_COMPACT_ABOVE = 64


class EvictionQueue(Generic[Item]):
    """A heap with lazy deletion: push, discard and pop cost O(log n), length is exact.

    An item's priority is read when it is pushed. To use an item, discard it; push it again when it
    is idle. Priorities in the heap are therefore never stale.
    """

    def __init__(self, priority: Callable[[Item], tuple[int, ...]]) -> None:
        self._priority = priority
        self._heap: list[tuple[tuple[int, ...], int, Item]] = []
        self._ticket: dict[Item, int] = {}
        self._tickets = 0

    def __len__(self) -> int:
        return len(self._ticket)

    def __contains__(self, item: Item) -> bool:
        return item in self._ticket

    def push(self, item: Item) -> None:
        self._tickets += 1
        self._ticket[item] = self._tickets
        heapq.heappush(self._heap, (self._priority(item), self._tickets, item))
        if len(self._heap) > 2 * len(self._ticket) + _COMPACT_ABOVE:
            self._heap = [entry for entry in self._heap if self._is_live(entry)]
            heapq.heapify(self._heap)

    def discard(self, item: Item) -> None:
        self._ticket.pop(item, None)

    def pop(self) -> Item:
        while True:
            entry = heapq.heappop(self._heap)
            if self._is_live(entry):
                del self._ticket[entry[2]]
                return entry[2]

    def _is_live(self, entry: tuple[tuple[int, ...], int, Item]) -> bool:
        return self._ticket.get(entry[2]) == entry[1]
