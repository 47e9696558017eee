from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass, field
from functools import partial

import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from cairn.errors import PageError
from cairn.memory.cache import PagedCache, SequencePages
from cairn.memory.geometry import PageGeometry
from cairn.memory.groups import group_layers
from cairn.memory.pages import NULL_PAGE
from cairn.memory.radix import PrefixMatch, as_key
from tests.helpers import watch_frees


def make_cache(
    pages: list[int], windows: list[int | None], page_size: int = 4, **options: object
) -> PagedCache:
    geometry = PageGeometry(page_size, page_size)
    return PagedCache(geometry, group_layers(windows), pages, **options)  # type: ignore[arg-type]


def run(cache: PagedCache, tokens: list[int], namespace: Hashable = None) -> SequencePages:
    """A request that computes all its tokens at once."""
    pages = cache.open(cache.match(PrefixMatch(namespace), tokens), len(tokens))
    cache.grow(pages, len(tokens))
    cache.commit(pages, tokens, len(tokens))
    cache.check()
    return pages


def test_complete_pages_are_shared_and_the_tail_is_private() -> None:
    cache = make_cache([8], [None])
    first = run(cache, list(range(10)))
    second = run(cache, [*range(8), 99, 98])
    assert first.tables[0][:2] == second.tables[0][:2]
    assert first.tables[0][2] != second.tables[0][2]


def test_one_token_is_always_left_to_compute() -> None:
    cache = make_cache([8], [None])
    cache.close(run(cache, list(range(8))))
    assert cache.match(PrefixMatch(None), list(range(8))).num_pages == 1
    assert cache.match(PrefixMatch(None), list(range(9))).num_pages == 2


def test_namespaces_do_not_share_and_do_not_stay_behind() -> None:
    cache = make_cache([8], [None])
    cache.close(run(cache, list(range(8)), "tenant"))
    assert cache.match(PrefixMatch("other"), list(range(8))).num_pages == 0
    assert cache.match(PrefixMatch("tenant"), list(range(8))).num_pages == 1
    cache.tree.clear()
    assert not cache.tree._roots


def test_same_prefix_computed_twice_keeps_tables_append_only() -> None:
    cache = make_cache([8], [None])
    tokens = list(range(8))
    one = cache.open(cache.match(PrefixMatch(None), tokens), 8)
    two = cache.open(cache.match(PrefixMatch(None), tokens), 8)
    for pages in (one, two):
        cache.grow(pages, 8)
    before = list(two.tables[0])
    cache.commit(one, tokens, 8)
    cache.commit(two, tokens, 8)
    cache.check()
    assert two.tables[0] == before
    cache.close(one)
    cache.check()
    cache.close(two)  # its copies become free, the first request's stay cached
    cache.check()
    assert cache.allocators[0].used_pages == 2


@given(
    windows=st.sampled_from([(None,), (5,), (None, 5), (3, None, 9)]),
    landmarks=st.booleans(),
    publish=st.booleans(),
    steps=st.lists(st.integers(1, 7), min_size=1, max_size=40),
)
def test_a_commit_before_it_is_due_would_change_nothing(
    windows: tuple[int | None, ...], landmarks: bool, publish: bool, steps: list[int]
) -> None:
    geometry = PageGeometry(4, 3 if landmarks else 4)
    groups = group_layers(windows)
    tokens = list(range(sum(steps)))
    caches = [PagedCache(geometry, groups, [100] * len(groups)) for _ in range(2)]
    always, when_due = (
        c.open(c.match(PrefixMatch(None), tokens), len(tokens), publish=publish) for c in caches
    )
    computed = 0
    for step in steps:
        # The newest token is not known yet when a step is launched, and is a moment later.
        computed += step
        for cache, pages in zip(caches, (always, when_due), strict=True):
            cache.grow(pages, computed)
            for known in (computed - 1, computed):
                if pages is always or computed >= pages.due:
                    cache.commit(pages, tokens[:known], computed)
            cache.check()
        assert always.tables == when_due.tables
        assert (always.published, always.live_from) == (when_due.published, when_due.live_from)


@pytest.mark.parametrize(("policy", "survivor"), [("lru", 10), ("lfu", 0)])
def test_eviction_gives_up_the_least_recently_or_least_often_used(
    policy: str, survivor: int
) -> None:
    cache = make_cache([2], [None], eviction=policy)
    old, new = [0, 1, 2, 3, 4], [10, 11, 12, 13, 14]
    for tokens in (old, old, old, new):
        pages = cache.open(cache.match(PrefixMatch(None), tokens), 5)
        cache.grow(pages, 4)
        cache.commit(pages, tokens, 4)
        cache.close(pages)
    run(cache, [20, 21, 22, 23])
    assert cache.match(PrefixMatch(None), old).num_pages == (survivor == 0)
    assert cache.match(PrefixMatch(None), new).num_pages == (survivor == 10)


def test_window_group_holds_its_window_while_full_group_holds_everything() -> None:
    cache = make_cache([64, 64], [None, 8], prefix_caching=False)
    tokens = list(range(200))
    pages = cache.open(cache.match(PrefixMatch(None), tokens), 200)
    for computed in range(1, 201):
        cache.grow(pages, computed)
        cache.commit(pages, tokens, computed)
        cache.check()
        assert cache.allocators[0].used_pages == -(-computed // 4)
        assert cache.allocators[1].used_pages <= 3  # 8 rows straddle at most 3 pages of 4
    cache.close(pages)
    assert cache.allocators[0].used_pages == cache.allocators[1].used_pages == 0


def test_a_prefix_is_usable_only_where_its_last_window_is_cached() -> None:
    cache = make_cache([16, 16], [None, 6])
    tokens = list(range(24))
    cache.close(run(cache, tokens))
    assert cache.match(PrefixMatch(None), [*tokens, 0]).num_pages == 6
    # The oldest window pages go first; a later prefix does not need them, an earlier one does.
    cache.tree.evict_one(1)
    cache.check()
    assert cache.match(PrefixMatch(None), [*tokens, 0]).num_pages == 6
    lost = [node for node in cache.tree.nodes() if node.pages[1] == NULL_PAGE]
    assert len(lost) == 1
    while cache.tree.evictable_pages(1):
        cache.tree.evict_one(1)
    cache.check()
    assert cache.match(PrefixMatch(None), [*tokens, 0]).num_pages == 0


def test_a_long_chain_without_full_layers_is_removed_without_recursion() -> None:
    cache = make_cache([3000], [6], page_size=1)
    cache.close(run(cache, list(range(2500))))
    cache.tree.clear()
    cache.check()
    assert cache.tree.num_nodes == 0


def test_growing_beyond_the_pool_changes_nothing() -> None:
    cache = make_cache([4, 2], [None, 6])
    pages = cache.open(cache.match(PrefixMatch(None), [1]), 1)
    cache.grow(pages, 4)
    with pytest.raises(PageError, match="available"):
        cache.grow(pages, 13)
    cache.check()
    assert pages.num_pages == 1


@dataclass
class Sequence:
    pages: SequencePages
    tokens: list[int]
    namespace: Hashable
    computed: int = field(default=0)


class CacheMachine(RuleBasedStateMachine):
    """Each page remembers what was computed into it; whoever is given a page must find that."""

    sequences: dict[int, Sequence]

    def __init__(self) -> None:
        super().__init__()
        self.waiting: list[tuple[list[int], PrefixMatch]] = []

    @initialize(
        page_size=st.integers(2, 4),
        landmark=st.booleans(),
        windows=st.sampled_from([(None,), (None, 5), (3, None, 9), (4,)]),
        policy=st.sampled_from(["lru", "lfu"]),
        caching=st.sampled_from([True, True, True, False]),
    )
    def setup(
        self,
        page_size: int,
        landmark: bool,
        windows: tuple[int | None, ...],
        policy: str,
        caching: bool,
    ) -> None:
        geometry = PageGeometry(page_size, page_size - landmark)
        groups = group_layers(windows)
        self.content: list[dict[int, tuple[Hashable, tuple[int, ...]]]] = [{} for _ in groups]
        self.cache = PagedCache(
            geometry,
            groups,
            [10 if group.window is None else 8 for group in groups],
            eviction="lru" if policy == "lru" else "lfu",
            prefix_caching=caching,
        )
        for g, allocator in enumerate(self.cache.allocators):
            watch_frees(allocator, partial(self.forget, g))
        self.sequences = {}
        self.opened = 0

    def forget(self, group: int, page: int) -> None:
        self.content[group].pop(page, None)

    @rule(tokens=st.lists(st.integers(0, 1), min_size=1, max_size=24), salt=st.integers(0, 1))
    def open(self, tokens: list[int], salt: int) -> None:
        match = self.cache.match(PrefixMatch(salt), tokens)
        assert match.num_pages == self.longest_usable(salt, tokens)
        pages = self.cache.open(match, len(tokens))
        sequence = Sequence(pages, tokens, salt, self.cache.geometry.tokens(match.num_pages))
        assert sequence.computed < len(tokens)
        self.sequences[self.opened] = sequence
        self.opened += 1

    @rule(tokens=st.lists(st.integers(0, 1), min_size=1, max_size=24), salt=st.integers(0, 1))
    def wait(self, tokens: list[int], salt: int) -> None:
        self.waiting.append((tokens, PrefixMatch(salt)))

    @rule()
    def look_up_again(self) -> None:
        """What has changed since then makes no difference."""
        for i, (tokens, earlier) in enumerate(self.waiting):
            match = self.cache.match(earlier, tokens)
            assert match == self.cache.match(PrefixMatch(earlier.namespace), tokens)
            assert match.num_pages == self.longest_usable(earlier.namespace, tokens)
            self.waiting[i] = tokens, match

    @precondition(lambda self: self.sequences)
    @rule(data=st.data(), count=st.integers(1, 8))
    def advance(self, data: st.DataObject, count: int) -> None:
        sequence = self.pick(data)
        stop = min(sequence.computed + count, len(sequence.tokens))
        before = [list(table) for table in sequence.pages.tables]
        if self.cache.new_pages(sequence.pages, stop) > self.cache.min_available():
            with pytest.raises(PageError):
                self.cache.grow(sequence.pages, stop)
            assert before == sequence.pages.tables
            return
        self.cache.grow(sequence.pages, stop)
        assert all(
            table[: len(old)] == old
            for table, old in zip(sequence.pages.tables, before, strict=True)
        )
        self.check_readable(sequence)
        for g in range(len(self.cache.groups)):
            for index in range(sequence.computed // self.step, self.cache.geometry.pages(stop)):
                prefix = tuple(sequence.tokens[: min(stop, (index + 1) * self.step)])
                self.content[g][sequence.pages.tables[g][index]] = (sequence.namespace, prefix)
        sequence.computed = stop
        self.cache.commit(sequence.pages, sequence.tokens, stop)

    @precondition(lambda self: self.sequences)
    @rule(data=st.data(), token=st.integers(0, 1))
    def append(self, data: st.DataObject, token: int) -> None:
        self.pick(data).tokens.append(token)

    @precondition(lambda self: self.sequences)
    @rule(data=st.data())
    def close(self, data: st.DataObject) -> None:
        sequence = self.pick(data)
        self.cache.close(sequence.pages)
        self.sequences = {k: s for k, s in self.sequences.items() if s is not sequence}

    @rule()
    def clear(self) -> None:
        self.cache.tree.clear()
        assert all(self.cache.tree.evictable_pages(g) == 0 for g in range(len(self.cache.groups)))

    @property
    def step(self) -> int:
        return self.cache.geometry.tokens_per_page

    def pick(self, data: st.DataObject) -> Sequence:
        return self.sequences[data.draw(st.sampled_from(sorted(self.sequences)))]

    def longest_usable(self, salt: Hashable, tokens: list[int]) -> int:
        """By definition: the most pages that are cached and whose last window is cached."""
        present: dict[bytes, list[int]] = {}
        for node in self.cache.tree.nodes():
            key, up = node.key, node.parent
            assert up is not None
            while up.parent is not None:
                key, up = up.key + key, up.parent
            if self.cache.tree._namespace_of[up] == salt:
                present[key] = node.pages
        size = self.cache.geometry.page_size
        best = 0
        for count in range(1, (len(tokens) - 1) // self.step + 1):
            path = [present.get(as_key(tokens[: i * self.step])) for i in range(1, count + 1)]
            if all(path) and all(
                pages is not None and pages[g] != NULL_PAGE
                for g in self.usable_groups()
                for pages in path[self.cache.groups[g].first_reachable_page(count * size, size) :]
            ):
                best = count
        return best

    def usable_groups(self) -> list[int]:
        """Groups without whose pages a prefix is of no use."""
        return list(range(len(self.cache.groups)))

    def check_readable(self, sequence: Sequence) -> None:
        """Every computed page the next row can reach holds this sequence's own past."""
        size = self.cache.geometry.page_size
        row = self.cache.geometry.rows(sequence.computed)
        for g, group in enumerate(self.cache.groups):
            first = group.first_reachable_page(row, size)
            for index in range(first, self.cache.geometry.pages(sequence.computed)):
                end = min(sequence.computed, (index + 1) * self.step)
                held = self.content[g][sequence.pages.tables[g][index]]
                assert held[0] == sequence.namespace
                assert held[1][:end] == tuple(sequence.tokens[:end])

    @invariant()
    def books_balance(self) -> None:
        if not hasattr(self, "cache"):
            return
        self.cache.check()
        for usage in self.cache.usage():
            assert usage.free + usage.cached + usage.owned == usage.total
        for sequence in self.sequences.values():
            self.check_readable(sequence)

    def teardown(self) -> None:
        if not hasattr(self, "cache"):
            return
        for sequence in self.sequences.values():
            self.cache.close(sequence.pages)
        self.cache.tree.clear()
        self.cache.check()
        assert all(allocator.used_pages == 0 for allocator in self.cache.allocators)
        assert self.cache.tree.num_nodes == 0


TestCacheMachine = CacheMachine.TestCase
