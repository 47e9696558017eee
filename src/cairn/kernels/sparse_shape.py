"""The parameters and helpers that all sparse attention kernels share."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Any

import triton
import triton.language as tl

from cairn.kernels.launch import DirectKernel

SUM_GROUP = tl.constexpr(1)
SOFTMAX_HEAD = tl.constexpr(2)
STRATEGIES = {"head": 0, "group": 1, "softmax_head": 2}


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
    split_query: bool = False
    """Kernels split scoring queries into their positive and their negative part."""

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
            "SPLIT": self.split_query,
            "WINDOW_PARTS": self.window_parts,
            "PARTS": self.parts,
        }

    @property
    def normalized(self) -> bool:
        """Whether selection computes a normalizer: a bound on the mass of every page and window."""
        return self.strategy == "softmax_head" and self.heads > self.kv_heads

    @property
    def window_parts(self) -> int:
        """Number of programs that share a window, about three pages each."""
        rows = self.window + self.page_size
        return max(1, min(16, -(-rows // (3 * self.page_size))))

    @property
    def page_parts(self) -> int:
        """Number of programs that share the selected pages, about two each."""
        return max(1, min(16, self.topk // 2))

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


@triton.jit
def load_scoring(scoring, row_offset, head, mask, WIDTH: tl.constexpr, SPLIT: tl.constexpr):
    """-> scoring queries [n, WIDTH]; row_offset and head are [n, 1], or scalars for all rows"""
    OWN: tl.constexpr = WIDTH // 2 if SPLIT else WIDTH
    offs_w = tl.arange(0, WIDTH)[None, :]
    q = tl.load(scoring + row_offset + head * OWN + offs_w % OWN, mask=mask, other=0.0)
    if SPLIT:
        wide = q.to(tl.float32)
        part = tl.where(offs_w < OWN, tl.maximum(wide, 0.0), tl.minimum(wide, 0.0))
        q = part.to(q.dtype)
    return q
