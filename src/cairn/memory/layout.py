"""The cache layout of a layer: named parts, each with a shape and a type.

Keys and values of heads are one layout, a latent row without heads is another. Device and host
pools, page bytes and copies between host and device are derived from it.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Literal

import torch

from cairn.kernels.fp8_rows import is_narrow, packed_width, scale_rows

KV = "kv"
"""The part that holds keys and values of heads: all keys first, then all values."""
LATENT = "latent"
"""The part that holds one latent row for all heads: what keys and values are made of, then the
rotated part of the key."""
INDEX = "index"
"""The part that holds one key per row, by which an index scores the rows that a query reads."""

QUERY = "query"
"""The part that holds the query of each row and head, for policies that look back at a prompt."""


@dataclass(frozen=True, slots=True)
class CachePart:
    """One kind of data that a layer keeps for every row, or once for every page."""

    name: str
    shape: tuple[int, ...]
    """Shape of one row, or of one page if `per` is "page"."""
    dtype: torch.dtype | None = None
    """None for the cache's type (`kv_cache_dtype`), which `CacheLayout.of_type` fills in."""
    per: Literal["row", "page"] = "row"
    may_leave: bool = True
    """This part of a page may be only in host memory; otherwise it stays on the device."""
    heads: int = 1
    """Number of heads that select pages independently. The size of the first axis of `shape` is a
    multiple of it; entry i belongs to head i modulo `heads`."""
    own_scales: bool = False
    """Each row of 8 bits ends with its scales, so that it can be copied alone; otherwise they
    follow the rows of a page."""

    def page_shape(self, page_size: int) -> tuple[int, ...]:
        """Shape of one page. The row axis is the last but one, so that a head's rows of a page are
        contiguous. Rows of 8 bits hold their scales, or are followed by rows that do."""
        if self.per == "page":
            return self.shape
        *heads, dim = self.shape
        if self.own_scales and is_narrow(self.dtype):
            return (*heads, page_size, packed_width(dim))
        more = scale_rows(page_size, dim) if is_narrow(self.dtype) else 0
        return (*heads, page_size + more, dim)

    def page_bytes(self, page_size: int) -> int:
        return math.prod(self.page_shape(page_size)) * self.known_dtype.itemsize

    def by_head(self, pages: torch.Tensor, pieces: int = 1) -> torch.Tensor:
        """A view of pages as [pages * pieces, n, heads, elements]; head h reads [:, :, h].

        Each page is cut into `pieces` runs of rows. Only parts whose rows follow one another in a
        page, such as latent rows, can be cut.
        """
        assert pieces == 1 or (len(self.shape) == 1 and self.per == "row")
        entries = self.shape[0] // self.heads if self.heads > 1 else 1
        return pages.view(len(pages) * pieces, entries, self.heads, -1)

    @property
    def known_dtype(self) -> torch.dtype:
        assert self.dtype is not None, f"part {self.name} has no type yet; see CacheLayout.of_type"
        return self.dtype


@dataclass(frozen=True, slots=True)
class CacheLayout:
    """Everything that one layer keeps for a page."""

    parts: tuple[CachePart, ...] = ()

    @classmethod
    def of_heads(
        cls, kv_heads: int, head_dim: int, dtype: torch.dtype | None = None
    ) -> CacheLayout:
        """The layout of keys and values; a page is [2 * kv_heads, page_size, head_dim]."""
        return cls((CachePart(KV, (2 * kv_heads, head_dim), dtype, heads=kv_heads),))

    @classmethod
    def of_latents(cls, width: int, index_width: int = 0) -> CacheLayout:
        """The layout of latent rows, and of index keys if they have a width; a page of either is
        [page_size, width]. Every later query reads all index keys, so they stay on the device."""
        index = (CachePart(INDEX, (index_width,), may_leave=False),) if index_width else ()
        return cls((CachePart(LATENT, (width,), own_scales=True), *index))

    def of_type(self, dtype: torch.dtype) -> CacheLayout:
        """The same layout with `dtype` for the parts that have no type."""
        return CacheLayout(
            tuple(part if part.dtype else replace(part, dtype=dtype) for part in self.parts)
        )

    def part(self, name: str) -> CachePart:
        for part in self.parts:
            if part.name == name:
                return part
        raise KeyError(f"the cache has no part {name!r}: {[part.name for part in self.parts]}")

    @property
    def leaving(self) -> CacheLayout:
        """The parts that may be only in host memory."""
        return CacheLayout(tuple(part for part in self.parts if part.may_leave))

    @property
    def staying(self) -> CacheLayout:
        """The parts that are always on the device."""
        return CacheLayout(tuple(part for part in self.parts if not part.may_leave))

    @property
    def heads(self) -> int:
        """Number of heads that select pages independently, in the parts that may leave."""
        (heads,) = {part.heads for part in self.leaving.parts}
        return heads

    def page_bytes(self, page_size: int) -> int:
        """Bytes of one page in one layer."""
        return sum(part.page_bytes(page_size) for part in self.parts)


NO_CACHE = CacheLayout()
