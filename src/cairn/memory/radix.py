"""The prefix cache: a radix tree in which every edge is one complete page of tokens.

A node owns one reference to its page in each layer group. In full groups the page lives as long as
the node. In window groups it may be released earlier and replaced by NULL_PAGE, since a long prefix
is usable if its last window is cached. Requests pin the path they use: a pinned node is never
evicted, an unpinned one only if it is a leaf. Keys are tokens, with one namespace per tenant.
"""

from __future__ import annotations

import heapq
from array import array
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

from cairn.memory.geometry import PageGeometry
from cairn.memory.groups import LayerGroup
from cairn.memory.pages import NULL_PAGE, PageAllocator

EvictionPolicy = Literal["lru", "lfu"]
PageTokens = bytes
"""The token ids of a page, 8 bytes each: they compare and hash much faster than tuples."""

_COMPACT_ABOVE = 64
_TOKEN_BYTES = 8


def as_key(tokens: Sequence[int]) -> PageTokens:
    """An array must have items of 8 bytes, as those of requests do."""
    return (tokens if isinstance(tokens, array) else array("q", tokens)).tobytes()


class Node:
    """One cached page. Compared and hashed by identity."""

    __slots__ = ("children", "hits", "key", "last_use", "pages", "parent", "pins")

    def __init__(self, key: PageTokens, parent: Node | None, pages: list[int]) -> None:
        self.key = key
        self.parent = parent
        self.children: dict[PageTokens, Node] = {}
        self.pages = pages  # one page id per layer group
        self.pins = 0  # requests whose path contains this node
        self.hits = 0
        self.last_use = 0


class EvictionQueue:
    """The nodes that can be evicted, in order: a heap with lazy deletion.

    Push, discard and pop cost O(log n), length is exact.

    A node's priority is read when it is pushed. To use a node, discard it; push it again when it
    is idle. Priorities in the heap are therefore never stale.
    """

    def __init__(self, priority: Callable[[Node], tuple[int, ...]]) -> None:
        self._priority = priority
        self._heap: list[tuple[tuple[int, ...], int, Node]] = []
        self._ticket: dict[Node, int] = {}
        self._tickets = 0

    def __len__(self) -> int:
        return len(self._ticket)

    def __contains__(self, node: Node) -> bool:
        return node in self._ticket

    def push(self, node: Node) -> None:
        self._tickets += 1
        self._ticket[node] = self._tickets
        heapq.heappush(self._heap, (self._priority(node), self._tickets, node))
        if len(self._heap) > 2 * len(self._ticket) + _COMPACT_ABOVE:
            self._heap = [entry for entry in self._heap if self._is_live(entry)]
            heapq.heapify(self._heap)

    def discard(self, node: Node) -> None:
        self._ticket.pop(node, None)

    def pop(self) -> Node:
        while True:
            entry = heapq.heappop(self._heap)
            if self._is_live(entry):
                del self._ticket[entry[2]]
                return entry[2]

    def _is_live(self, entry: tuple[tuple[int, ...], int, Node]) -> bool:
        return self._ticket.get(entry[2]) == entry[1]


@dataclass(frozen=True, slots=True)
class PrefixMatch:
    """The path from the namespace's root, without the root, to the deepest usable page."""

    namespace: Hashable
    path: tuple[Node, ...] = ()

    @property
    def num_pages(self) -> int:
        return len(self.path)


class RadixTree:
    def __init__(
        self,
        geometry: PageGeometry,
        groups: Sequence[LayerGroup],
        allocators: Sequence[PageAllocator],
        policy: EvictionPolicy = "lru",
    ) -> None:
        self._geometry = geometry
        self._groups = groups
        self._allocators = allocators
        self._roots: dict[Hashable, Node] = {}
        self._namespace_of: dict[Node, Hashable] = {}
        self._tick = 0
        self._unpinned = 0
        self.num_nodes = 0
        priority = _least_recent if policy == "lru" else _least_frequent
        # Evictable nodes. Full groups: unpinned leaves. Window groups: nodes whose page no request
        # holds.
        self._idle = [EvictionQueue(priority) for _ in groups]
        self._node_of: list[dict[int, Node]] = [{} for _ in groups]
        self._full = [i for i, group in enumerate(groups) if group.window is None]
        self._windowed = [i for i, group in enumerate(groups) if group.window is not None]
        # Window groups whose pages have no other copy: a prefix is unusable without them.
        self._needed = [i for i in self._windowed if groups[i].copy_of is None]

    # -- looking up ---------------------------------------------------------------------------

    def match(self, earlier: PrefixMatch, tokens: Sequence[int], max_pages: int) -> PrefixMatch:
        """The longest cached prefix that a request can start from. Does not change the tree.

        The search goes on from an `earlier` match of the same tokens, which may be empty.
        """
        namespace = earlier.namespace
        path = list(earlier.path)
        if path and path[-1].parent is None:
            path = []  # evicted since
        node = path[-1] if path else self._roots.get(namespace)
        if node is None:
            return PrefixMatch(namespace)
        step = self._geometry.tokens_per_page
        for start in range(len(path) * step, min(max_pages, len(tokens) // step) * step, step):
            child = node.children.get(as_key(tokens[start : start + step]))
            if child is None:
                break
            path.append(child)
            node = child
        return PrefixMatch(namespace, tuple(path[: self._usable_pages(path)]))

    def _usable_pages(self, path: Sequence[Node]) -> int:
        """Length of the longest part of a path that has every window page the next row reads."""
        count = len(path)
        while (lost := self._lost_page(path, count)) is not None:
            count = lost  # every longer prefix reads this page too
        return count

    def _lost_page(self, path: Sequence[Node], count: int) -> int | None:
        """The last page that the row after `count` pages reads and that is not there any more."""
        page_size = self._geometry.page_size
        for g in self._needed:
            first = self._groups[g].first_reachable_page(count * page_size, page_size)
            for index in range(count - 1, first - 1, -1):
                if path[index].pages[g] == NULL_PAGE:
                    return index
        return None

    def last_node(self, match: PrefixMatch) -> Node | None:
        """The node at which a match ends, which may be a root; None if the namespace is new."""
        return match.path[-1] if match.path else self._roots.get(match.namespace)

    # -- pinning ------------------------------------------------------------------------------

    def pin(self, match: PrefixMatch) -> Node:
        """Pin a matched path, mark it as just used, and return its last node."""
        self._tick += 1
        node = self._roots.get(match.namespace)
        if node is None:
            node = Node(b"", None, [NULL_PAGE] * len(self._groups))
            self._roots[match.namespace] = node
            self._namespace_of[node] = match.namespace
        node.pins += 1
        for node in match.path:
            node.last_use = self._tick
            node.hits += 1
            self._pin_node(node)
        return node

    def unpin(self, node: Node) -> None:
        """Unpin the path from the root to `node`."""
        while node.parent is not None:
            parent = node.parent
            node.pins -= 1
            if node.pins == 0:
                self._unpinned += 1
                self._offer(node)
            node = parent
        node.pins -= 1
        self._forget_if_empty(node)

    def _pin_node(self, node: Node) -> None:
        if node.pins == 0:
            self._unpinned -= 1
            for g in self._full:
                self._idle[g].discard(node)
        node.pins += 1

    def _offer(self, node: Node) -> None:
        """Make an unpinned leaf evictable; without pages remove it, then its parents likewise."""
        while node.parent is not None:
            if node.children or node.pins:
                return
            if any(node.pages):
                for g in self._full:
                    self._idle[g].push(node)
                return
            node = self._remove(node)
        self._forget_if_empty(node)

    # -- growing ------------------------------------------------------------------------------

    def extend(self, parent: Node, key: PageTokens, pages: Sequence[int]) -> Node:
        """Add the page after `parent` and move one pin to it.

        If the page is already cached, the cached one stays and the caller keeps its own copy,
        because page tables are append-only. The cached node takes over window pages it has lost.
        """
        self._tick += 1
        node = parent.children.get(key)
        new = node is None
        if node is None:
            node = parent.children[key] = Node(key, parent, [NULL_PAGE] * len(pages))
            self.num_nodes += 1
            self._unpinned += 1
            node.hits = 1
        for g, page in enumerate(pages):
            # A device copy belongs to the page it copies, which is the node's page only if new.
            fits = new or self._groups[g].copy_of is None
            if fits and node.pages[g] == NULL_PAGE and page != NULL_PAGE:
                self._allocators[g].retain(page)
                self.attach(node, g, page)
        node.last_use = self._tick
        self._pin_node(node)
        return node

    def attach(self, node: Node, group: int, page: int) -> None:
        """Give a node a page that it lacks. The caller's reference passes to the tree."""
        node.pages[group] = page
        self._node_of[group][page] = node

    # -- window pages of requests -------------------------------------------------------------

    def hold_pages(self, group: int, pages: Iterable[int]) -> None:
        """A request starts to use cached pages."""
        retain, windowed = self._allocators[group].retain, group in self._windowed
        for page in pages:
            retain(page)
            if windowed:
                self._idle[group].discard(self._node_of[group][page])

    def release_pages(self, group: int, pages: Iterable[int]) -> None:
        """A request stops using pages, cached or not."""
        release, windowed = self._allocators[group].release, group in self._windowed
        for page in pages:
            if release(page) == 1 and windowed:
                node = self._node_of[group].get(page)
                if node is not None:
                    self._idle[group].push(node)

    # -- evicting -----------------------------------------------------------------------------

    def evictable_pages(self, group: int) -> int:
        return self._unpinned if group in self._full else len(self._idle[group])

    def evictable_in(self, match: PrefixMatch, group: int) -> int:
        """Number of the group's evictable pages that would be in use after pinning `match`."""
        if group in self._full:
            return sum(node.pins == 0 for node in match.path)
        row = match.num_pages * self._geometry.page_size
        first = self._groups[group].first_reachable_page(row, self._geometry.page_size)
        return sum(node in self._idle[group] for node in match.path[first:])

    def evict_one(self, group: int) -> None:
        """Free one page of the group. The caller has checked that one is evictable."""
        node = self._idle[group].pop()
        if group in self._full:
            self._offer(self._remove(node))
        else:
            self._drop_page(node, group)
            if not any(node.pages):
                self._offer(node)

    def clear(self) -> None:
        """Evict everything that no request uses."""
        for g in range(len(self._groups)):
            while len(self._idle[g]):
                self.evict_one(g)

    def _drop_page(self, node: Node, group: int) -> None:
        page = node.pages[group]
        if page == NULL_PAGE:
            return
        node.pages[group] = NULL_PAGE
        del self._node_of[group][page]
        self._idle[group].discard(node)
        self._allocators[group].release(page)

    def _remove(self, node: Node) -> Node:
        """Remove an unpinned leaf and return its parent."""
        parent = node.parent
        assert parent is not None and not node.children and node.pins == 0
        for g in range(len(self._groups)):
            self._drop_page(node, g)
        del parent.children[node.key]
        node.parent = None
        self.num_nodes -= 1
        self._unpinned -= 1
        return parent

    def _forget_if_empty(self, root: Node) -> None:
        """Remove an empty namespace, because users can create any number of them."""
        if not root.children and root.pins == 0:
            del self._roots[self._namespace_of.pop(root)]

    # -- for tests and idle checks ------------------------------------------------------------

    def nodes(self) -> Iterator[Node]:
        stack = [child for root in self._roots.values() for child in root.children.values()]
        while stack:
            node = stack.pop()
            yield node
            stack.extend(node.children.values())

    def check(self, fail: Callable[[str], None]) -> None:
        """Call `fail` for every broken invariant of the tree itself."""
        if any(not root.children and root.pins == 0 for root in self._roots.values()):
            fail("an empty namespace stayed behind")
        nodes = list(self.nodes())
        if len(nodes) != self.num_nodes:
            fail(f"tree counts {self.num_nodes} nodes, has {len(nodes)}")
        if sum(node.pins == 0 for node in nodes) != self._unpinned:
            fail("tree miscounts its unpinned nodes")
        for node in nodes:
            parent = node.parent
            assert parent is not None
            if len(node.key) != self._geometry.tokens_per_page * _TOKEN_BYTES:
                fail("a node holds an incomplete page")
            if parent.parent is not None and parent.pins < node.pins:
                fail("a node is pinned more often than its parent")
            for g in self._full:
                if node.pages[g] == NULL_PAGE:
                    fail("a node lost its page in a full group")
                if (node in self._idle[g]) != (node.pins == 0 and not node.children):
                    fail("eviction queue of a full group is not the set of unpinned leaves")
            for g in self._windowed:
                page = node.pages[g]
                idle = page != NULL_PAGE and self._allocators[g].refcounts[page] == 1
                if (node in self._idle[g]) != idle:
                    fail("eviction queue of a window group is not the set of idle pages")
            for g, page in enumerate(node.pages):
                if page != NULL_PAGE and self._node_of[g].get(page) is not node:
                    fail(f"page {page} does not lead back to its node")


def _least_recent(node: Node) -> tuple[int, ...]:
    return (node.last_use,)


def _least_frequent(node: Node) -> tuple[int, ...]:
    return (node.hits, node.last_use)
