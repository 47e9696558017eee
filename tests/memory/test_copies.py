"""Pages between host and device: the books alone, and the slots that slices are read from."""

from __future__ import annotations

import random
from collections.abc import Hashable, Sequence
from functools import partial

import pytest
import torch
from hypothesis import strategies as st
from hypothesis.stateful import initialize, invariant, precondition, rule

from cairn.errors import PageError
from cairn.memory.cache import PagedCache, SequencePages
from cairn.memory.copies import CopyEdits, PageCopies, PageState, Transfer
from cairn.memory.geometry import PageGeometry
from cairn.memory.groups import LayerGroup
from cairn.memory.hot_cache import HotCache
from cairn.memory.radix import PrefixMatch, as_key
from tests.helpers import watch_frees
from tests.memory.test_cache import CacheMachine
from tests.memory.test_cache import Sequence as Running


class ManualMover:
    def __init__(self) -> None:
        self.moving: list[Transfer] = []
        self.done: list[Transfer] = []

    def back_up(self, transfers: Sequence[Transfer]) -> None:
        self.moving += transfers

    def end(self, index: int = 0) -> None:
        self.done.append(self.moving.pop(index))

    def poll(self) -> list[Transfer]:
        done, self.done = self.done, []
        return done

    def wait(self) -> list[Transfer]:
        if not self.done and self.moving:
            self.end()
        return self.poll()


def make(pages: int = 16, frames: int = 6, window: int = 4) -> tuple[PagedCache, ManualMover]:
    mover = ManualMover()
    groups = (LayerGroup("full", ()), LayerGroup("resident", (0,), window, copy_of=0))
    copies = PageCopies(pages, frames, mover)
    return PagedCache(PageGeometry(4, 4), groups, [pages, frames], copies=copies), mover


def advance(cache: PagedCache, pages: SequencePages, tokens: list[int], stop: int) -> CopyEdits:
    cache.poll()
    cache.grow(pages, stop)
    edits = cache.take_edits()
    cache.commit(pages, tokens, stop)
    cache.launched()
    cache.check()
    return edits


def states(cache: PagedCache) -> dict[str, int]:
    return {state.value: count for state, count in cache.page_states().items() if count}


def test_the_life_of_a_page() -> None:
    cache, mover = make()
    tokens = list(range(20))
    pages = cache.open(cache.match(PrefixMatch(None), tokens), 20)
    assert advance(cache, pages, tokens, 3).frames == (Transfer(1, 1),)
    assert states(cache) == {"free": 15, "filling": 1}
    advance(cache, pages, tokens, 17)
    assert states(cache) == {"free": 11, "backing": 4, "filling": 1}
    assert cache.tree.num_nodes == 0  # nothing is published that the host does not have
    assert pages.live_from[1] == 0  # and no frame given up
    mover.end(1)
    advance(cache, pages, tokens, 18)
    assert states(cache)["clean"] == 1 and cache.tree.num_nodes == 0  # the first is missing
    for _ in range(3):
        mover.end()
    advance(cache, pages, tokens, 19)
    assert states(cache) == {"free": 11, "clean": 4, "filling": 1}
    assert cache.tree.num_nodes == 4
    while cache.tree.evictable_pages(1):
        cache.tree.evict_one(1)
    cache.check()
    assert states(cache) == {"free": 11, "host_only": 4, "filling": 1}
    edits = advance(cache, pages, tokens, 20)
    assert {frame for _, frame in edits.frames} == {0} and len(edits.frames) == 4


def test_who_ends_before_its_copies_stays_behind_until_they_are_done() -> None:
    cache, mover = make()
    tokens = list(range(9))
    pages = cache.open(cache.match(PrefixMatch(None), tokens), 9)
    advance(cache, pages, tokens, 9)
    cache.close(pages, tokens, 9)
    cache.check()
    assert cache.match(PrefixMatch(None), tokens).num_pages == 0
    assert cache.arriving() == {(pages.node, as_key(tokens[:4]))}
    assert cache.reclaim()  # waits for one
    assert cache.match(PrefixMatch(None), tokens).num_pages == 1
    mover.end()
    cache.poll()
    cache.check()
    assert cache.match(PrefixMatch(None), tokens).num_pages == 2
    assert not cache.arriving() and not cache.reclaim()
    assert [usage.owned for usage in cache.usage()] == [0, 0]


def test_a_prefix_in_host_memory_comes_back_where_the_next_row_needs_it() -> None:
    cache, _ = make()
    tokens = list(range(17))
    pages = cache.open(cache.match(PrefixMatch(None), tokens), 17)
    advance(cache, pages, tokens, 17)
    cache.close(pages, tokens, 17)
    while cache.reclaim():
        pass
    while cache.tree.evictable_pages(1):
        cache.tree.evict_one(1)
    cache.take_edits()
    match = cache.match(PrefixMatch(None), [*tokens, 1])
    assert match.num_pages == 4
    assert cache.held_by(match, 0) == 4 and cache.held_by(match, 1) == 0
    again = cache.open(match, 18)
    # A row behind 16 sees the 3 before it: one page is fetched, and it alone.
    edits = advance(cache, again, [*tokens, 1], 17)
    assert [page for page, _ in edits.fetches] == [match.path[3].pages[0]]
    other = cache.open(cache.match(PrefixMatch(None), [*tokens, 1]), 18)
    assert other.tables[1][3] == again.tables[1][3]  # on the device once
    assert not cache.take_edits().fetches


def test_a_fetch_that_is_no_longer_wanted_is_dropped_and_one_that_failed_said_again() -> None:
    cache, _ = make(frames=3)
    tokens = list(range(9))
    pages = cache.open(cache.match(PrefixMatch(None), tokens), 9)
    advance(cache, pages, tokens, 9)
    cache.close(pages, tokens, 9)
    while cache.reclaim():
        pass
    while cache.tree.evictable_pages(1):
        cache.tree.evict_one(1)
    cache.take_edits()
    again = cache.open(cache.match(PrefixMatch(None), [*tokens, 1]), 10)
    edits = cache.take_edits()
    assert len(edits.fetches) == 1
    cache.put_back(edits)
    cache.check()
    assert cache.take_edits() == edits
    cache.put_back(edits)
    cache.close(again)
    while cache.tree.evictable_pages(1):
        cache.tree.evict_one(1)  # its frame goes to somebody else
    cache.check()
    assert cache.take_edits().fetches == ()
    cache.put_back(edits)
    assert cache.take_edits().fetches == ()


def test_an_aborted_request_keeps_pages_only_while_they_are_copied() -> None:
    cache, mover = make()
    tokens = list(range(9))
    pages = cache.open(cache.match(PrefixMatch(None), tokens), 9, publish=False)
    advance(cache, pages, tokens, 9)
    cache.close(pages)
    cache.check()
    assert states(cache) == {"free": 14, "backing": 2}
    mover.end(1)
    cache.poll()
    cache.check()
    assert states(cache) == {"free": 15, "backing": 1}
    mover.end()
    cache.poll()
    assert states(cache) == {"free": 16}


def test_frames_are_waited_for_and_never_taken_from_a_copy() -> None:
    cache, mover = make(frames=3)
    tokens = list(range(40))
    pages = cache.open(cache.match(PrefixMatch(None), tokens), 40)
    advance(cache, pages, tokens, 12)
    assert cache.min_available() == 0 and len(mover.moving) == 3
    with pytest.raises(PageError):
        cache.grow(pages, 13)
    assert cache.reclaim() and cache.min_available() == 1
    advance(cache, pages, tokens, 16)


class TieredCacheMachine(CacheMachine):
    """The same requests, but what a page holds is on the device, on the host, or on its way."""

    @initialize(
        page_size=st.integers(2, 4),
        landmark=st.booleans(),
        window=st.integers(1, 9),
        beside=st.sampled_from([None, 5]),
        policy=st.sampled_from(["lru", "lfu"]),
        caching=st.sampled_from([True, True, False]),
        late=st.booleans(),
        by_row=st.booleans(),
        seed=st.integers(0, 99),
    )
    def setup(
        self,
        page_size: int,
        landmark: bool,
        window: int,
        beside: int | None,
        policy: str,
        caching: bool,
        late: bool,
        by_row: bool,
        seed: int,
    ) -> None:
        groups = [LayerGroup("full", ())]
        if beside is not None:
            groups.append(LayerGroup("window", (1,), beside))
        groups.append(LayerGroup("resident", (0,), window, copy_of=0))
        self.frames = len(groups) - 1
        self.content = [{} for _ in groups]
        self.host: dict[int, tuple[Hashable, tuple[int, ...]]] = {}
        self.frame_of: dict[int, int] = {}  # as the device knows it
        self.late, self.rng = late, random.Random(seed)
        self.mover = ManualMover()
        sizes = [14, *[8 for _ in groups[1:]]]
        self.cache = PagedCache(
            PageGeometry(page_size, page_size - landmark),
            groups,
            sizes,
            eviction="lru" if policy == "lru" else "lfu",
            prefix_caching=caching,
            copies=PageCopies(sizes[0], sizes[-1], self.mover),
        )
        for g, allocator in enumerate(self.cache.allocators):
            watch_frees(allocator, partial(self.freed, g))
        self.per_page = page_size if by_row else 1
        self.hot = HotCache(1, 5, torch.device("cpu"))
        self.slots: dict[int, tuple[object, int]] = {}  # page and offset that each slot holds
        self.sequences = {}
        self.opened = 0

    def freed(self, group: int, page: int) -> None:
        self.content[group].pop(page, None)
        if group == 0:
            self.host.pop(page, None)

    def copy(self, transfer: Transfer) -> None:
        self.host[transfer.page] = self.content[self.frames][transfer.frame]

    def launch(self) -> None:
        """The step behind the last commits is launched."""
        before = len(self.mover.moving)
        self.cache.launched()
        if not self.late:
            for transfer in self.mover.moving[before:]:
                self.copy(transfer)

    @rule(count=st.integers(1, 4))
    def copies_end(self, count: int) -> None:
        for _ in range(min(count, len(self.mover.moving))):
            index = self.rng.randrange(len(self.mover.moving))
            if self.late:
                self.copy(self.mover.moving[index])
            self.mover.end(index)

    @rule()
    def poll(self) -> None:
        self.cache.poll()

    @rule()
    def reclaim(self) -> None:
        self.copies_end(1)
        self.cache.reclaim()

    @precondition(lambda self: self.sequences)
    @rule(data=st.data(), count=st.integers(1, 8))
    def advance(self, data: st.DataObject, count: int) -> None:
        super().advance(data, count)
        self.launch()

    @precondition(lambda self: self.sequences)
    @rule(data=st.data())
    def close(self, data: st.DataObject) -> None:
        sequence = self.pick(data)
        self.cache.close(sequence.pages, sequence.tokens, sequence.computed)
        self.sequences = {k: s for k, s in self.sequences.items() if s is not sequence}

    @rule(tokens=st.lists(st.integers(0, 1), min_size=1, max_size=24), salt=st.integers(0, 1))
    def open(self, tokens: list[int], salt: int) -> None:
        match = self.cache.match(PrefixMatch(salt), tokens)
        missing = match.num_pages - self.cache._first_page(self.frames, match)
        missing -= self.cache.held_by(match, self.frames)
        if missing > self.cache.available_after(match, self.frames):
            return  # admission would not let it in
        super().open(tokens, salt)

    def usable_groups(self) -> list[int]:
        return [g for g in range(len(self.cache.groups)) if g != self.frames]

    def check_readable(self, sequence: Running) -> None:
        """Windows are in frames; every page before them is on the device or on the host."""
        self.apply_edits()
        super().check_readable(sequence)
        ids = sequence.pages.tables[0]
        for index in range(sequence.computed // self.step):
            page, end = ids[index], (index + 1) * self.step
            frame = self.frame_of.get(page, 0)
            held = self.content[self.frames][frame] if frame else self.host[page]
            assert held == (sequence.namespace, tuple(sequence.tokens[:end]))
        self.read(sequence)

    def read(self, sequence: Running) -> None:
        """Read pages, or single rows, that are not in frames, through hot slots."""
        ids, lives = sequence.pages.tables[0], sequence.pages.generations[0]
        complete = range(sequence.computed // self.step)
        away = [
            (index, self.rng.randrange(self.per_page))
            for index in complete
            if not self.frame_of.get(ids[index])
        ][-self.hot.slots :]
        if not away:
            return
        numbers = torch.tensor([[[ids[i] * self.per_page + offset for i, offset in away]]])
        generations = torch.tensor([[[lives[i] for i, _ in away]]])
        plan = self.hot.plan(numbers, generations, numbers >= 0)
        for number, slot in zip(plan.slices.tolist(), plan.into.tolist(), strict=True):
            page, offset = divmod(number, self.per_page)
            self.slots[slot] = self.host[page], offset
        for (i, offset), slot in zip(away, plan.slots.flatten().tolist(), strict=True):
            tokens = tuple(sequence.tokens[: (i + 1) * self.step])
            assert self.slots[slot] == ((sequence.namespace, tokens), offset)

    def apply_edits(self) -> None:
        edits = self.cache.take_edits()
        self.frame_of.update(edits.frames)
        for page, frame in edits.fetches:
            self.content[self.frames][frame] = self.host[page]

    @invariant()
    def what_is_cached_is_on_the_host(self) -> None:
        if hasattr(self, "cache"):
            assert all(node.pages[0] in self.host for node in self.cache.tree.nodes())
            counts = self.cache.page_states()
            assert sum(counts.values()) == 14 and counts[PageState.BACKING] == len(
                self.mover.moving + self.mover.done
            )

    def teardown(self) -> None:
        if hasattr(self, "cache"):
            for sequence in self.sequences.values():
                self.cache.close(sequence.pages, sequence.tokens, sequence.computed)
            self.sequences = {}
            while self.mover.moving or self.mover.done:
                self.copies_end(9)
                self.cache.poll()
            assert not self.cache._leaving
        super().teardown()


TestTieredCacheMachine = TieredCacheMachine.TestCase
