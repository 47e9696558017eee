"""The page tables of all slots, on the host. Plans carry the edits."""

from __future__ import annotations

import numpy as np

from cairn.engine.plan import TableEdit
from cairn.kernels.packing import table_width
from cairn.memory.geometry import PageGeometry


class SlotTables:
    def __init__(self, groups: int, slots: int, max_pages: int, geometry: PageGeometry) -> None:
        self._geometry = geometry
        self.pages = np.zeros((groups, slots, table_width(max_pages)), dtype=np.int32)
        """[groups, slots, pages]"""
        self.generations = np.zeros_like(self.pages)

    def edit(self, edit: TableEdit) -> None:
        where = edit.group, edit.slot, slice(edit.first, edit.first + len(edit.page_ids))
        self.pages[where] = edit.page_ids
        self.generations[where] = edit.generations

    def of(self, slots: np.ndarray, stop: int) -> tuple[np.ndarray, np.ndarray]:
        """Tables [groups, slots, pages] for `stop` tokens, and the generations of pages."""
        width = table_width(self._geometry.pages(stop))
        return self.pages[:, slots, :width], self.generations[:, slots, :width]

    def completed(
        self, slots: np.ndarray, starts: np.ndarray, reached: np.ndarray, units: int
    ) -> np.ndarray:
        """The units [groups, n] that slots [m] completed between `starts` and `reached` tokens.
        Each page has `units` of them."""
        geometry = self._geometry.cut(units)
        first, last = (geometry.complete_pages(own) for own in (starts, reached))
        found = [self.pages[:, 0, :0]]
        some = last > first
        for slot, begin, end in zip(slots[some], first[some], last[some], strict=True):
            places = np.arange(begin, end)
            found.append(self.pages[:, slot, places // units] * units + places % units)
        return np.concatenate(found, axis=1)
