"""Page ids: reference counts and generations.

A page id is allocated with one reference. Each further holder retains it, and when the last holder
releases it the id is free again. Each allocation increments the id's generation, so that
(id, generation) tells a recycled page from the old one. Generations are positive int32 numbers, as
tensors hold them; the first follows the last.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

from cairn.errors import PageError

NULL_PAGE = 0
"""Never allocated. Padding rows are written here, and tables hold it where there is no page."""

LAST_GENERATION = 2**31 - 1


class PageAllocator:
    """Allocates ids 1..num_pages in O(1). Tensors indexed by page id have num_pages + 1 entries."""

    def __init__(self, num_pages: int, on_free: Callable[[int], None] | None = None) -> None:
        if num_pages < 1:
            raise PageError(f"a pool needs at least one page, got {num_pages}")
        self.num_pages = num_pages
        self._on_free = on_free
        self.refcounts = [0] * (num_pages + 1)  # by page id
        self._generations = [0] * (num_pages + 1)
        # A stack with the lowest id on top. New pools allocate ascending ids, and a page that was
        # just freed, and is still in the CPU's cache, is used next.
        self._free = list(range(num_pages, 0, -1))

    @property
    def free_pages(self) -> int:
        return len(self._free)

    @property
    def used_pages(self) -> int:
        return self.num_pages - len(self._free)

    def generation(self, page: int) -> int:
        return self._generations[page]

    def generations_of(self, pages: Iterable[int]) -> list[int]:
        every = self._generations
        return [every[page] for page in pages]

    def allocate(self) -> int:
        if not self._free:
            raise PageError("no free page; callers must make room before they allocate")
        page = self._free.pop()
        self.refcounts[page] = 1
        self._generations[page] = self._generations[page] % LAST_GENERATION + 1
        return page

    def retain(self, page: int) -> None:
        if self.refcounts[page] == 0:
            raise PageError(f"page {page} is not allocated and cannot be retained")
        self.refcounts[page] += 1

    def release(self, page: int) -> int:
        """Drop one reference and return the number of references left."""
        left = self.refcounts[page] - 1
        if left < 0:
            raise PageError(f"page {page} is not allocated and cannot be released")
        self.refcounts[page] = left
        if left == 0:
            self._free.append(page)
            if self._on_free is not None:
                self._on_free(page)
        return left
