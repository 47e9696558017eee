"""Gathers the pages of one layer into larger pages.

Attention kernels that load whole tiles by TMA need pages at least as large as a tile.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from cairn.kernels.launch import direct


@direct
@triton.jit
def _gather_kernel(
    pool,  # [pages, PARTS, WORDS]
    pages,  # [n]
    out,  # [n // RATIO, PARTS, RATIO, WORDS]
    PARTS: tl.constexpr,
    WORDS: tl.constexpr,
    RATIO: tl.constexpr,
):
    item = tl.program_id(0)
    part = tl.program_id(1)
    page = tl.load(pages + item).to(tl.int64)
    word = tl.arange(0, triton.next_power_of_2(WORDS))
    there = word < WORDS
    value = tl.load(pool + (page * PARTS + part) * WORDS + word, mask=there)
    place = ((item // RATIO).to(tl.int64) * PARTS + part) * RATIO + item % RATIO
    tl.store(out + place * WORDS + word, value, mask=there)


def gather_pages(
    pool: torch.Tensor,  # [pages, 2 * kv_heads, page_size, dim]
    pages: torch.Tensor,  # [n] int32, n a multiple of ratio
    ratio: int,
    out: torch.Tensor,  # [n // ratio, 2 * kv_heads, ratio * page_size, dim]
) -> None:
    """Write every `ratio` consecutive entries of `pages` to `out` as one page."""
    _gather_kernel[(len(pages), pool.shape[1])](
        pool.view(torch.int32),
        pages,
        out.view(torch.int32),
        PARTS=pool.shape[1],
        WORDS=pool.shape[2] * pool.shape[3] * pool.element_size() // 4,
        RATIO=ratio,
        num_warps=4,
    )
