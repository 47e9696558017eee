"""The parameters and helpers that all sparse attention kernels share."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Any, Literal

import triton
import triton.language as tl

from cairn.kernels.launch import DirectKernel

SUM_GROUP = tl.constexpr(1)
SOFTMAX_HEAD = tl.constexpr(2)
STRATEGIES = {"head": 0, "group": 1, "softmax_head": 2}

SIGNS = tl.constexpr(1)
SQUARES = tl.constexpr(2)
SPLITS = {None: 0, "signs": 1, "squares": 2}

_TILE_ROWS = 64  # rows of small pages that a program reads at once
LEAST_TILE = 16
"""Fewest rows that a product can have, and so that a program can read at once."""


@dataclass(frozen=True)
class SparseShape:
    """Parameters that all sparse layers of a model share."""

    heads: int
    kv_heads: int
    head_dim: int
    page_size: int
    landmark_heads: int
    landmark_width: int
    topk: int
    window: int
    scale: float
    strategy: str  # a key of STRATEGIES
    by_lse: bool
    """Weight pages by their log-sum-exp, not by their landmark's score."""
    sinks: int
    null_split: bool
    hide_last: bool
    """The last row of a page is a landmark row."""
    split_query: Literal["signs", "squares"] | None = None
    """Kernels make both halves of scoring queries: their positive and their negative part, or
    themselves and their squares, with the scale of attention."""
    reach: float = 0.0
    """See `Policy.reach`."""

    def of(self, kernel: DirectKernel) -> dict[str, Any]:
        """The constants of a kernel that this shape determines, found once for each kernel."""
        found = self._of_kernels.get(kernel)
        if found is None:
            names = kernel.jit.arg_names
            found = {name: value for name, value in self._constants.items() if name in names}
            self._of_kernels[kernel] = found
        return found

    @cached_property
    def _of_kernels(self) -> dict[DirectKernel, dict[str, Any]]:
        return {}

    @cached_property
    def _constants(self) -> dict[str, Any]:
        return {
            "HEADS": self.heads,
            "KV_HEADS": self.kv_heads,
            "DIM": self.head_dim,
            "PAGE_SIZE": self.page_size,
            "LANDMARK_HEADS": self.landmark_heads,
            "WIDTH": self.landmark_width,
            "TOPK": self.topk,
            "WINDOW": self.window,
            "STRATEGY": STRATEGIES[self.strategy],
            "NORMALIZE": self.normalized,
            "BY_LSE": self.by_lse,
            "SINKS": self.sinks,
            "NULL_SPLIT": self.null_split,
            "HIDE_LAST": self.hide_last,
            "SPLIT": SPLITS[self.split_query],
            "REACH": self.reach,
            "TILE_PAGES": self.tile_pages,
            "WINDOW_PARTS": self.window_parts,
            "PARTS": self.parts,
        }

    @property
    def normalized(self) -> bool:
        """Whether selection computes a normalizer: a bound on the mass of every page and window."""
        return self.strategy == "softmax_head" and self.heads > self.kv_heads

    @property
    def tile_pages(self) -> int:
        """Number of pages that a program reads at once: several if they are small."""
        return 1 if self.page_size >= LEAST_TILE else _TILE_ROWS // self.page_size

    @property
    def window_parts(self) -> int:
        """Number of programs that share a window: about three pages each, or one tile of them."""
        rows = self.window + self.page_size
        each = self.page_size * (3 if self.tile_pages == 1 else self.tile_pages)
        return max(1, min(16, -(-rows // each)))

    @property
    def page_parts(self) -> int:
        """Number of programs that share the selected pages: about two each, or one tile."""
        each = 2 if self.tile_pages == 1 else self.tile_pages
        return max(1, min(16, self.topk // each))

    @property
    def parts(self) -> int:
        return self.window_parts + self.page_parts


@triton.jit
def whole_16(number):
    """Return `number`, a multiple of 16, in a form that tells the compiler so.

    For numbers that change from step to step, which kernels are not specialized on.
    """
    return number // 16 * 16


@triton.jit
def candidate_limit(position, WINDOW: tl.constexpr, PAGE_SIZE: tl.constexpr):
    """Number of candidate pages of the query at `position`; its window starts at this page."""
    return tl.maximum(position - WINDOW + 1, 0) // PAGE_SIZE


@triton.constexpr_function
def half_width(width, reach):
    """Width of what one product multiplies: with a reach, half of a landmark."""
    return width // 2 if reach > 0 else width


@triton.jit
def load_scoring(
    scoring,
    row_offset,
    head,
    mask,
    scale,
    WIDTH: tl.constexpr,
    SPLIT: tl.constexpr,
    REACH: tl.constexpr,
):
    """-> scoring queries [n, half_width], twice: the first halves, and the second if REACH.

    row_offset and head are [n, 1], or scalars for all rows.
    """
    HALF: tl.constexpr = half_width(WIDTH, REACH)
    OWN: tl.constexpr = WIDTH // 2 if SPLIT > 0 else WIDTH
    offs_w = tl.arange(0, HALF)[None, :]
    own = scoring + row_offset + head * OWN
    q = tl.load(own + offs_w % OWN, mask=mask, other=0.0)
    second = q
    if SPLIT == SIGNS:
        wide = q.to(tl.float32)
        part = tl.where(offs_w < OWN, tl.maximum(wide, 0.0), tl.minimum(wide, 0.0))
        q = part.to(q.dtype)
    elif SPLIT == SQUARES:
        wide = q.to(tl.float32) * scale
        second = (wide * wide).to(q.dtype)
    elif REACH > 0:
        second = tl.load(own + HALF + offs_w, mask=mask, other=0.0)
    return q, second


@triton.jit
def load_landmarks(
    place, mask, WIDTH: tl.constexpr, REACH: tl.constexpr, PAST_L1: tl.constexpr = False
):
    """-> landmarks at the pointers `place`, twice: first halves, and the second if REACH. If
    PAST_L1, loads bypass the L1 cache."""
    first = _load(place, mask, PAST_L1)
    second = first
    if REACH > 0:
        second = _load(place + WIDTH // 2, mask, PAST_L1)
    return first, second


@triton.jit
def _load(place, mask, PAST_L1: tl.constexpr):
    if PAST_L1:
        loaded = tl.load(place, mask=mask, other=0.0, cache_modifier=".cg")
    else:
        loaded = tl.load(place, mask=mask, other=0.0)
    return loaded


@triton.jit
def score_of(queries, landmarks, scale, more, REACH: tl.constexpr):
    """-> scores of queries [n, w] and landmarks [w, pages], with `more` [1, pages] added"""
    q, second_q = queries
    landmark, second = landmarks
    product = tl.dot(q, landmark, input_precision="ieee")
    if REACH > 0:
        deviation = tl.sqrt(tl.dot(second_q, second, input_precision="ieee"))
        more = tl.fma(deviation, tl.full(deviation.shape, REACH, tl.float32), more)
    return tl.fma(product, tl.full(product.shape, scale, tl.float32), more)
