"""Converts between tokens, rows and pages.

A page has `page_size` rows, of which the first `tokens_per_page` hold tokens. The two differ for
models that end every page with a landmark row: 64 rows then hold 63 tokens. Users see tokens, the
KV cache stores rows, and only this module converts between them.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypeVar

import numpy as np

from cairn.errors import ConfigError

Numbers = TypeVar("Numbers", int, np.ndarray)


@dataclass(frozen=True, slots=True)
class PageGeometry:
    page_size: int
    tokens_per_page: int

    def __post_init__(self) -> None:
        if self.page_size < 1:
            raise ConfigError(f"page_size is {self.page_size}; it must be at least 1")
        if not 0 <= self.page_size - self.tokens_per_page <= 1 or self.tokens_per_page < 1:
            raise ConfigError(
                f"tokens_per_page is {self.tokens_per_page} for page_size {self.page_size}; "
                "a page holds page_size tokens, or one fewer and a landmark row"
            )

    def cut(self, units: int) -> PageGeometry:
        """That of equal parts of a page. Pages with a landmark row cannot be cut."""
        if units == 1:
            return self
        assert not self.has_landmark_row and self.page_size % units == 0
        return PageGeometry(self.page_size // units, self.page_size // units)

    @property
    def has_landmark_row(self) -> bool:
        return self.tokens_per_page < self.page_size

    def rows(self, tokens: Numbers) -> Numbers:
        """Rows that `tokens` tokens occupy, including the landmark rows of complete pages. Also the
        row of token number `tokens`, counted from 0."""
        per_page = self.tokens_per_page
        rows: Numbers = tokens + tokens // per_page * (self.page_size - per_page)
        return rows

    def pages(self, tokens: int) -> int:
        """Number of pages needed for `tokens` tokens."""
        return -(-tokens // self.tokens_per_page)

    def complete_pages(self, tokens: Numbers) -> Numbers:
        pages: Numbers = tokens // self.tokens_per_page
        return pages

    def tokens_in(self, rows: int) -> int:
        """The most tokens that fit in `rows` rows, including landmark rows."""
        pages, rest = divmod(rows, self.page_size)
        return pages * self.tokens_per_page + min(rest, self.tokens_per_page - 1)

    def tokens(self, pages: int) -> int:
        """Tokens that fit in `pages` pages."""
        return pages * self.tokens_per_page
