"""Tells whether all pages of a step's sequences are on the device when the step is launched.

Every step asks, so pages that are known to be there are not checked again until a page leaves.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from cairn.memory.copies import Transfer
from cairn.memory.pages import NULL_PAGE


class Residency:
    def __init__(self, group: int, frames: np.ndarray, num_slots: int) -> None:
        """Track the pages that the tables of layer group `group` name, for up to `num_slots`
        running requests. `frames` [pages] is the current frame of each page, 0 for none."""
        self.group = group
        self._frames = frames
        # Number of pages at the start of each slot's table that are known to be on the device.
        self._known = np.zeros(num_slots, dtype=np.int64)
        self._gap = (-1, 0)  # slot and place of the page that was missing last

    def move(self, frames: Sequence[Transfer]) -> None:
        """Record that pages are in new frames, or no longer in one."""
        if any(frame == NULL_PAGE for _, frame in frames):
            self._known[:] = 0

    def edit(self, slot: int, first: int) -> None:
        """Record that the slot's table changed from entry `first` on."""
        self._known[slot] = min(self._known[slot], first)

    def all_here(self, slots: np.ndarray, table: np.ndarray, counts: np.ndarray) -> bool:
        """Whether all pages of these slots are on the device. The first `counts` [seqs] entries of
        `table` [seqs, pages] are their pages."""
        slot, place = self._gap
        # The page that was missing last is usually missing in the next step too.
        for s in np.flatnonzero(slots == slot):
            if place < counts[s] and not self._frames[table[s, place]]:
                return False
        known = self._known[slots]
        for s in np.flatnonzero(known < counts):
            missing = self._frames[table[s, known[s] : counts[s]]] == NULL_PAGE
            if missing.any():
                self._gap = (int(slots[s]), int(known[s] + missing.argmax()))
                return False
            self._known[slots[s]] = counts[s]
        return True
