"""Page ids: who holds them, and in which life they are.

A page id is handed out with one reference. Each further holder retains it; when the last one lets
go the id is free again. The generation of an id rises with every allocation, so that whoever
remembers (id, generation) can tell a recycled page from the one it knew.
"""

from __future__ import annotations

from collections.abc import Callable

from cairn.errors import PageError

NULL_PAGE = 0
"""Never allocated. Padding rows write here and tables point here where no page is held."""


class PageAllocator:
    """Ids 1..num_pages, every operation O(1). Tensors by page id have num_pages + 1 entries."""

    def __init__(self, num_pages: int, on_free: Callable[[int], None] | None = None) -> None:
        if num_pages < 1:
            raise PageError(f"a pool needs at least one page, got {num_pages}")
        self.num_pages = num_pages
        self._on_free = on_free
        self._refcounts = [0] * (num_pages + 1)
        self._generations = [0] * (num_pages + 1)
        # A stack with the lowest id on top: fresh pools hand out ascending ids, and a page just
        # freed, still warm in the CPU's cache, is the next to be used.
        self._free = list(range(num_pages, 0, -1))

    @property
    def free_pages(self) -> int:
        return len(self._free)

    @property
    def used_pages(self) -> int:
        return self.num_pages - len(self._free)

    def refcount(self, page: int) -> int:
        return self._refcounts[page]

    def generation(self, page: int) -> int:
        return self._generations[page]

    def allocate(self) -> int:
        if not self._free:
            raise PageError("no free page; callers must make room before they allocate")
        page = self._free.pop()
        self._refcounts[page] = 1
        self._generations[page] += 1
        return page

    def retain(self, page: int) -> None:
        if self._refcounts[page] == 0:
            raise PageError(f"page {page} is not allocated and cannot be retained")
        self._refcounts[page] += 1

    def release(self, page: int) -> int:
        """Drop one reference and return how many are left."""
        left = self._refcounts[page] - 1
        if left < 0:
            raise PageError(f"page {page} is not allocated and cannot be released")
        self._refcounts[page] = left
        if left == 0:
            self._free.append(page)
            if self._on_free is not None:
                self._on_free(page)
        return left
