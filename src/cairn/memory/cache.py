"""The paged KV cache as the scheduler sees it: page ids only, no tensors.

It owns the allocators of all layer groups and the prefix tree. A page is free, owned by a request,
or cached. Ownership of one request's pages, in order:

    |-- taken from the tree --|-- computed, published --|-- computed, tail --|-- not yet --|
     shared with the tree      shared with the tree       private to request    no page

In window groups the left part is released as soon as no later row can reach it. The table then
holds NULL_PAGE, so that page i of every table always holds tokens from i * tokens_per_page on.

With a host tier (see `copies`), a page is published and its frame released only when the host has
its bytes. If a request ends earlier, its pages are kept until they can be published.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from cairn.errors import PageError
from cairn.memory.copies import CopyEdits, PageCopies, PageState, Transfer
from cairn.memory.geometry import PageGeometry
from cairn.memory.groups import LayerGroup, max_tokens
from cairn.memory.pages import NULL_PAGE, PageAllocator
from cairn.memory.radix import EvictionPolicy, Node, PageTokens, PrefixMatch, RadixTree, as_key

PageKey = tuple[Node, PageTokens]
"""A position in the tree: the page with these tokens after this node."""


@dataclass(slots=True, eq=False)
class SequencePages:
    """The pages of one running request, per layer group."""

    tables: list[list[int]]  # page ids, append-only; released ones are replaced by NULL_PAGE
    generations: list[list[int]]  # the page's generation when it entered the table
    live_from: list[int]  # first page still held; everything before is NULL_PAGE
    node: Node  # deepest node of the request's pinned path
    published: int  # pages from the start that are in the tree
    publishes: bool  # complete pages enter the tree
    completed: int  # pages from the start whose rows are all computed
    reach: int = 0  # the next row to compute; pages before its window may be released
    due: int = 0  # `commit` has nothing to do until this many tokens are computed

    @property
    def num_pages(self) -> int:
        return len(self.tables[0])


@dataclass(frozen=True, slots=True)
class GroupUsage:
    """Number of pages of one layer group by state; the three states add up to all pages."""

    name: str
    total: int
    free: int
    cached: int
    owned: int


@dataclass(slots=True)
class CacheStats:
    lookup_tokens: int = 0
    hit_tokens: int = 0
    evicted_pages: int = 0


class PagedCache:
    def __init__(
        self,
        geometry: PageGeometry,
        groups: Sequence[LayerGroup],
        num_pages: Sequence[int],
        *,
        eviction: EvictionPolicy = "lru",
        prefix_caching: bool = True,
        copies: PageCopies | None = None,
    ) -> None:
        """`num_pages[g]` is the number of usable pages of group g. With `copies`, one group holds
        copies of another group's pages."""
        self.geometry = geometry
        self.groups = tuple(groups)
        self.prefix_caching = prefix_caching
        self.copies = copies
        # The group of frames (-1 without one), and the group whose pages the frames hold.
        self._frame_group = next(
            (g for g, x in enumerate(self.groups) if x.copy_of is not None), -1
        )
        self._page_group = self.groups[self._frame_group].copy_of or 0
        on_free: dict[int, Callable[[int], None]] = {}
        if copies is not None:
            on_free = {self._frame_group: copies.frame_freed, self._page_group: copies.page_freed}
        self.allocators = [
            PageAllocator(count, on_free.get(g)) for g, count in enumerate(num_pages)
        ]
        self.tree = RadixTree(geometry, self.groups, self.allocators, eviction)
        self.stats = CacheStats()
        self._windowed = [g for g, group in enumerate(self.groups) if group.window is not None]
        self._sequences: set[SequencePages] = set()
        # Requests that have ended but have pages that cannot be published yet, and their tokens.
        self._leaving: dict[SequencePages, Sequence[int]] = {}

    @property
    def max_tokens(self) -> int:
        """Tokens of the longest request that fits if it runs alone."""
        sizes = [allocator.num_pages for allocator in self.allocators]
        return max_tokens(self.groups, sizes, self.geometry)

    # -- room ---------------------------------------------------------------------------------

    def available_pages(self, group: int) -> int:
        return self.allocators[group].free_pages + self.tree.evictable_pages(group)

    def min_available(self) -> int:
        return min(self.available_pages(g) for g in range(len(self.groups)))

    def new_pages(self, pages: SequencePages | None, tokens: int) -> int:
        """Number of pages to allocate in every group to grow to `tokens` tokens."""
        held = 0 if pages is None else pages.num_pages
        return max(0, self.geometry.pages(tokens) - held)

    def reachable_tokens(self, pages: SequencePages) -> int:
        """Tokens that the request could hold with all available pages."""
        return self.geometry.tokens(pages.num_pages + self.min_available())

    def reclaim(self) -> bool:
        """Wait until pages that are being copied become available; False if there are none."""
        if self.copies is None:
            return False
        # Windows may still hold pages whose copies arrived since the last commit.
        slid = [self._slide(pages) for pages in self._sequences]
        if any(slid):
            return True
        done = self.copies.wait()
        self._settle(done)
        for pages in self._sequences:
            self._slide(pages)
        return bool(done)

    def page_states(self) -> dict[PageState, int]:
        """Number of pages by state; empty without a host tier."""
        if self.copies is None:
            return {}
        return self.copies.count(self.allocators[self._page_group].free_pages)

    def usage(self) -> list[GroupUsage]:
        result = []
        for g, (group, allocator) in enumerate(zip(self.groups, self.allocators, strict=True)):
            cached = self.tree.evictable_pages(g)
            owned = allocator.used_pages - cached
            result.append(
                GroupUsage(group.name, allocator.num_pages, allocator.free_pages, cached, owned)
            )
        return result

    # -- the life of a request ----------------------------------------------------------------

    def match(self, earlier: PrefixMatch, tokens: Sequence[int]) -> PrefixMatch:
        """The cached pages that a request can start from. At least one token is left to compute,
        for its logits. What an `earlier` match of the same tokens found is not searched again."""
        if not self.prefix_caching:
            return earlier
        return self.tree.match(earlier, tokens, self.geometry.complete_pages(len(tokens) - 1))

    def next_page(self, match: PrefixMatch, tokens: Sequence[int]) -> PageKey | None:
        """Key of a request's first page that is not cached; None if that page cannot be shared."""
        node = self.tree.last_node(match)
        index = match.num_pages
        if node is None or index >= self.geometry.complete_pages(len(tokens) - 1):
            return None
        return node, self._page_tokens(tokens, index)

    def pending_page(self, pages: SequencePages, tokens: Sequence[int]) -> PageKey | None:
        """Key of the next page that a running request will publish; None if the page's tokens are
        not all known or the request does not publish."""
        if not pages.publishes or pages.published >= self.geometry.complete_pages(len(tokens)):
            return None
        return pages.node, self._page_tokens(tokens, pages.published)

    def arriving(self) -> set[PageKey]:
        """Keys of pages of ended requests that will be published when the host has them."""
        keys = (self.pending_page(*left) for left in self._leaving.items())
        return {key for key in keys if key is not None}

    def held_by(self, match: PrefixMatch, group: int) -> int:
        """Number of the group's pages that a request starting from `match` need not allocate."""
        first = self._first_page(group, match)
        return sum(node.pages[group] != NULL_PAGE for node in match.path[first:])

    def available_after(self, match: PrefixMatch, group: int) -> int:
        return self.available_pages(group) - self.tree.evictable_in(match, group)

    def open(
        self, match: PrefixMatch, lookup_tokens: int, *, publish: bool = True
    ) -> SequencePages:
        """Start a request from a matched prefix.

        A request that does not look up prefixes must not publish either. It would pin cached pages
        in addition to its own copies, and so take twice as much room.
        """
        self.stats.lookup_tokens += lookup_tokens
        self.stats.hit_tokens += self.geometry.tokens(match.num_pages)
        node = self.tree.pin(match)
        tables, generations, live_from = [], [], []
        for g in range(len(self.groups)):
            first = self._first_page(g, match)
            path = match.path[first:]
            missing = [node for node in path if node.pages[g] == NULL_PAGE]
            self.tree.hold_pages(g, filter(None, [node.pages[g] for node in path]))
            for lost in missing:
                self._fetch(g, lost)
                self.tree.hold_pages(g, [lost.pages[g]])
            table = [NULL_PAGE] * first + [held.pages[g] for held in path]
            tables.append(table)
            generations.append(self.allocators[g].generations_of(table))
            live_from.append(first)
        pages = SequencePages(
            tables,
            generations,
            live_from,
            node,
            published=match.num_pages,
            publishes=publish and self.prefix_caching,
            completed=match.num_pages,
        )
        self._sequences.add(pages)
        return pages

    def _first_page(self, group: int, match: PrefixMatch) -> int:
        """The first page of a matched prefix that later rows can read."""
        row = match.num_pages * self.geometry.page_size
        return self.groups[group].first_reachable_page(row, self.geometry.page_size)

    def _fetch(self, group: int, node: Node) -> None:
        assert self.copies is not None
        while not self.allocators[group].free_pages:
            if self.tree.evictable_pages(group):
                self._evict(group)
            elif not self.reclaim():
                raise PageError(f"no page of group {self.groups[group].name} is left to fetch into")
        frame = self.allocators[group].allocate()
        self.tree.attach(node, group, frame)
        self.copies.fetch(node.pages[self._page_group], frame)

    def _evict(self, group: int) -> None:
        self.tree.evict_one(group)
        self.stats.evicted_pages += 1

    def grow(self, pages: SequencePages, tokens: int) -> int:
        """Allocate pages for `tokens` tokens in every group, or none at all.

        Returns the number of pages that each table grew by. Raises PageError if there is no room.
        """
        count = self.new_pages(pages, tokens)
        if count > self.min_available():
            raise PageError(f"{count} pages wanted, {self.min_available()} available")
        for g, allocator in enumerate(self.allocators):
            while allocator.free_pages < count:
                self._evict(g)
            for _ in range(count):
                page = allocator.allocate()
                pages.tables[g].append(page)
                pages.generations[g].append(allocator.generation(page))
        if self.copies is not None:
            new = slice(pages.num_pages - count, None)
            ids, frames = pages.tables[self._page_group][new], pages.tables[self._frame_group][new]
            for page, frame in zip(ids, frames, strict=True):
                self.copies.fill(page, frame)
        return count

    def commit(self, pages: SequencePages, token_ids: Sequence[int], computed: int) -> None:
        """Publish complete pages and slide windows, now that `computed` tokens are computed.

        Launched steps are enough: they write the pages before any later step reads them. The newest
        tokens may still be unknown; a later call publishes their pages.
        """
        known = min(computed, len(token_ids))
        pages.reach = max(pages.reach, self.geometry.rows(computed))
        if self.copies is not None:
            self._complete(pages, computed)
        if pages.publishes and known >= self.geometry.tokens(pages.published + 1):
            self._publish(pages, token_ids, known)
        if self._windowed:
            self._slide(pages)
        pages.due = self._next_due(pages)

    def _next_due(self, pages: SequencePages) -> int:
        """Number of computed tokens at which the next page is complete or leaves a window."""
        if self.copies is not None:
            return 0  # also depends on which copies have arrived
        due = self.geometry.tokens(pages.published + 1) if pages.publishes else sys.maxsize
        for g in self._windowed:
            row = self.groups[g].row_beyond(pages.live_from[g], self.geometry.page_size)
            due = min(due, self.geometry.tokens_in(row - 1) + 1)
        return due

    def launched(self) -> None:
        """Called after all commits of a launched step; starts copies to the host."""
        if self.copies is not None:
            self.copies.start()

    def poll(self) -> None:
        """Process the copies to the host that were completed since the last call."""
        if self.copies is not None:
            self._settle(self.copies.poll())

    def take_edits(self) -> CopyEdits:
        """The changes of frames that the next plan must carry."""
        return CopyEdits() if self.copies is None else self.copies.take_edits()

    def put_back(self, edits: CopyEdits) -> None:
        """Return the edits of a plan that was not carried out."""
        if self.copies is not None:
            self.copies.put_back(edits)

    def close(self, pages: SequencePages, token_ids: Sequence[int] = (), computed: int = 0) -> None:
        """End a request. Published pages stay cached, private ones become free.

        `computed` tokens are in the cache. Complete pages whose copies have not arrived yet are
        kept, and are published when they have.
        """
        if self.copies is not None and pages.publishes:
            known = min(computed, len(token_ids))
            self._publish(pages, token_ids, known)
            if pages.published < self.geometry.complete_pages(known):
                self._leaving[pages] = token_ids[:known]
                return
        self._close(pages)

    def clear(self) -> None:
        """Evict everything that no request uses, and drop pages that wait to be published."""
        for pages in self._leaving:
            self._close(pages)
        self._leaving.clear()
        self.tree.clear()

    def _close(self, pages: SequencePages) -> None:
        self._sequences.remove(pages)
        for g, table in enumerate(pages.tables):
            # Deepest page first, so that on ties of recency the tail is evicted before the head.
            self.tree.release_pages(g, reversed(table[pages.live_from[g] :]))
        self.tree.unpin(pages.node)

    def _complete(self, pages: SequencePages, computed: int) -> None:
        """Queue newly completed pages to be copied to the host."""
        assert self.copies is not None
        for index in range(pages.completed, self.geometry.complete_pages(computed)):
            page = pages.tables[self._page_group][index]
            frame = pages.tables[self._frame_group][index]
            self.allocators[self._page_group].retain(page)
            self.allocators[self._frame_group].retain(frame)
            self.copies.complete(page, frame)
            pages.completed = index + 1

    def _settle(self, done: Sequence[Transfer]) -> None:
        """Release the pages and frames of arrived copies, and close requests that waited."""
        if not done:
            return
        for page, frame in done:
            self.tree.release_pages(self._frame_group, [frame])
            self.tree.release_pages(self._page_group, [page])
        for pages, token_ids in list(self._leaving.items()):
            self._publish(pages, token_ids, len(token_ids))
            if pages.published >= self.geometry.complete_pages(len(token_ids)):
                del self._leaving[pages]
                self._close(pages)

    def _publish(self, pages: SequencePages, token_ids: Sequence[int], computed: int) -> None:
        for index in range(pages.published, self.geometry.complete_pages(computed)):
            if not self._is_durable(pages, index):
                return
            key = self._page_tokens(token_ids, index)
            pages.node = self.tree.extend(pages.node, key, [table[index] for table in pages.tables])
            pages.published = index + 1

    def _page_tokens(self, tokens: Sequence[int], index: int) -> PageTokens:
        step = self.geometry.tokens_per_page
        return as_key(tokens[index * step : (index + 1) * step])

    def _is_durable(self, pages: SequencePages, index: int) -> bool:
        """Whether the page may be published: there is no host tier, or the host has its bytes."""
        return self.copies is None or self.copies.is_durable(pages.tables[self._page_group][index])

    def _slide(self, pages: SequencePages) -> bool:
        """Release pages that no later row can reach; True if there were any."""
        before = sum(pages.live_from)
        for g in self._windowed:
            first = self.groups[g].first_reachable_page(pages.reach, self.geometry.page_size)
            table = pages.tables[g]
            for index in range(pages.live_from[g], min(first, len(table))):
                if g == self._frame_group and not self._is_durable(pages, index):
                    break
                self.tree.release_pages(g, [table[index]])
                table[index] = NULL_PAGE
                pages.generations[g][index] = self.allocators[g].generation(NULL_PAGE)
                pages.live_from[g] = index + 1
        return sum(pages.live_from) > before

    # -- invariants ---------------------------------------------------------------------------

    def check(self) -> None:
        """Raise PageError if any invariant about pages is broken. Cheap enough to run when idle."""
        problems: list[str] = []
        self.tree.check(problems.append)
        backing = [] if self.copies is None else self.copies.backing()
        for g, allocator in enumerate(self.allocators):
            expected = [0] * (allocator.num_pages + 1)
            for node in self.tree.nodes():
                expected[node.pages[g]] += 1
            for pages in self._sequences:
                for page, generation in zip(pages.tables[g], pages.generations[g], strict=True):
                    expected[page] += 1
                    if generation != allocator.generation(page):
                        problems.append(f"a table names page {page} of an earlier generation")
            if g in (self._page_group, self._frame_group):
                for transfer in backing:
                    expected[transfer.page if g == self._page_group else transfer.frame] += 1
            problems.extend(
                f"page {page} of group {self.groups[g].name} has {allocator.refcounts[page]} "
                f"references and {expected[page]} holders"
                for page in range(1, allocator.num_pages + 1)
                if expected[page] != allocator.refcounts[page]
            )
            if sum(count > 0 for count in expected[1:]) != allocator.used_pages:
                problems.append("free and used pages do not add up")
            cached = sum(
                1
                for node in self.tree.nodes()
                if node.pages[g] != NULL_PAGE
                and (node.pins == 0 or self.groups[g].window is not None)
                and allocator.refcounts[node.pages[g]] == 1
            )
            if cached != self.tree.evictable_pages(g):
                problems.append("evictable pages are miscounted")
        if self.copies is not None:
            of_pages = self.allocators[self._page_group].refcounts
            of_frames = self.allocators[self._frame_group].refcounts
            self.copies.check(of_pages, of_frames, problems.append)
            problems.extend(
                f"page {node.pages[self._page_group]} is cached but the host does not have it"
                for node in self.tree.nodes()
                if not self.copies.is_durable(node.pages[self._page_group])
            )
        if problems:
            raise PageError("; ".join(problems))
