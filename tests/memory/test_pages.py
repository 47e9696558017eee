from __future__ import annotations

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from cairn.engine.plan import TableEdit
from cairn.engine.slot_tables import SlotTables
from cairn.errors import PageError
from cairn.memory.geometry import PageGeometry
from cairn.memory.pages import LAST_GENERATION, NULL_PAGE, PageAllocator


def test_pages_are_handed_out_in_ascending_order_and_reused_warm() -> None:
    pages = PageAllocator(3)
    assert [pages.allocate() for _ in range(3)] == [1, 2, 3]
    pages.release(2)
    assert pages.allocate() == 2


def test_generation_rises_with_every_allocation() -> None:
    pages = PageAllocator(1)
    page = pages.allocate()
    first = pages.generation(page)
    pages.release(page)
    assert pages.generation(page) == first
    assert pages.allocate() == page
    assert pages.generation(page) == first + 1


def test_generations_fit_into_the_tables_of_a_server_that_never_ends() -> None:
    pages, tables = PageAllocator(1), SlotTables(1, 1, 1, PageGeometry(4, 4))
    pages._generations[1] = LAST_GENERATION - 1
    for expected in (LAST_GENERATION, 1, 2):
        page = pages.allocate()
        tables.edit(TableEdit(0, 0, 0, (page,), (pages.generation(page),)))
        assert tables.generations[0, 0, 0] == pages.generation(page) == expected
        pages.release(page)


def test_misuse_is_refused() -> None:
    pages = PageAllocator(1)
    with pytest.raises(PageError, match="cannot be released"):
        pages.release(1)
    with pytest.raises(PageError, match="cannot be retained"):
        pages.retain(1)
    with pytest.raises(PageError, match="cannot be released"):
        pages.release(NULL_PAGE)
    pages.allocate()
    with pytest.raises(PageError, match="no free page"):
        pages.allocate()


class AllocatorMachine(RuleBasedStateMachine):
    """Against the obvious model: a dictionary of reference counts."""

    def __init__(self) -> None:
        super().__init__()
        self.freed: list[int] = []
        self.pages = PageAllocator(5, on_free=self.freed.append)
        self.held: dict[int, int] = {}
        self.generations: dict[int, int] = {}
        self.expected_freed: list[int] = []

    @precondition(lambda self: len(self.held) < 5)
    @rule()
    def allocate(self) -> None:
        page = self.pages.allocate()
        assert page not in self.held
        assert 1 <= page <= 5
        assert self.pages.generation(page) == self.generations.get(page, 0) + 1
        self.generations[page] = self.pages.generation(page)
        self.held[page] = 1

    @precondition(lambda self: self.held)
    @rule(data=st.data())
    def retain(self, data: st.DataObject) -> None:
        page = data.draw(st.sampled_from(sorted(self.held)))
        self.pages.retain(page)
        self.held[page] += 1

    @precondition(lambda self: self.held)
    @rule(data=st.data())
    def release(self, data: st.DataObject) -> None:
        page = data.draw(st.sampled_from(sorted(self.held)))
        self.held[page] -= 1
        assert self.pages.release(page) == self.held[page]
        if self.held[page] == 0:
            del self.held[page]
            self.expected_freed.append(page)

    @invariant()
    def counts_agree(self) -> None:
        assert self.pages.free_pages + len(self.held) == self.pages.num_pages
        assert self.pages.used_pages == len(self.held)
        for page in range(1, 6):
            assert self.pages.refcounts[page] == self.held.get(page, 0)
        assert self.freed == self.expected_freed


TestAllocatorMachine = AllocatorMachine.TestCase
