"""Whether all pages of a step are on the device, against looking at every one of them."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from cairn.memory.copies import Transfer
from cairn.memory.residency import Residency

PAGES, SLOTS, WIDTH = 9, 3, 5


def move(residency: Residency, moves: list[Transfer]) -> None:
    for page, frame in moves:
        residency._frames[page] = frame
    residency.move(moves)


@given(data=st.data())
def test_the_host_knows_when_everything_is_on_the_device(data: st.DataObject) -> None:
    residency = Residency(0, np.zeros(PAGES + 1, dtype=np.int32), SLOTS)
    table = np.zeros((SLOTS, WIDTH), dtype=np.int32)
    here: set[int] = set()
    page = st.integers(1, PAGES)
    for _ in range(data.draw(st.integers(1, 12))):
        come, go = data.draw(st.sets(page)), data.draw(st.sets(page, max_size=1))
        here = (here | come) - go
        moves = [Transfer(p, p if p in here else 0) for p in come | go]
        move(residency, moves)
        for slot in data.draw(st.sets(st.integers(0, SLOTS - 1))):
            first = data.draw(st.integers(0, WIDTH - 1))
            table[slot, first:] = data.draw(
                st.lists(page, min_size=WIDTH - first, max_size=WIDTH - first)
            )
            residency.edit(slot, first)
        slots = np.array(data.draw(st.permutations(range(SLOTS)))[: data.draw(st.integers(1, 3))])
        counts = np.array([data.draw(st.integers(1, WIDTH)) for _ in slots])
        # What is behind a sequence's pages is not its own.
        own = [page for s, n in zip(slots, counts, strict=True) for page in table[s, :n].tolist()]
        assert residency.all_here(slots, table[slots], counts) == (here >= set(own))


def test_what_is_known_is_not_looked_at_again() -> None:
    residency = Residency(0, np.zeros(PAGES + 1, dtype=np.int32), 1)
    slots, counts = np.array([0]), np.array([3])
    table = np.array([[1, 2, 3, 4]])
    move(residency, [Transfer(page, page) for page in (1, 2, 3)])
    assert residency.all_here(slots, table, counts)
    unread = np.full_like(table, PAGES + 7)  # no such page
    assert residency.all_here(slots, unread, counts)
    unread[0, 3] = 4
    assert not residency.all_here(slots, unread, counts + 1)
    move(residency, [Transfer(4, 4)])
    assert residency.all_here(slots, unread, counts + 1)
    move(residency, [Transfer(2, 0)])
    assert not residency.all_here(slots, table, counts)
