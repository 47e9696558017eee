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
    pool,  # [pages, PARTS, STRIDE], of which WORDS are copied
    pages,  # [n]
    out,  # [n // RATIO, PARTS, RATIO, WORDS]
    PARTS: tl.constexpr,
    STRIDE: tl.constexpr,
    WORDS: tl.constexpr,
    RATIO: tl.constexpr,
):
    item = tl.program_id(0)
    part = tl.program_id(1)
    page = tl.load(pages + item).to(tl.int64)
    word = tl.arange(0, triton.next_power_of_2(WORDS))
    there = word < WORDS
    value = tl.load(pool + (page * PARTS + part) * STRIDE + word, mask=there)
    place = ((item // RATIO).to(tl.int64) * PARTS + part) * RATIO + item % RATIO
    tl.store(out + place * WORDS + word, value, mask=there)


def gather_pages(
    pages: torch.Tensor,  # [pages, 2 * kv_heads, page_size, dim]; other rows may follow a slice
    which: torch.Tensor,  # [n] int32, n a multiple of ratio
    ratio: int,
    out: torch.Tensor,  # [n // ratio, 2 * kv_heads, ratio * page_size, dim]
) -> None:
    """Write every `ratio` consecutive entries of `which` to `out` as one page."""
    _, parts, page_size, dim = pages.shape
    word = 4 // pages.element_size()
    _gather_kernel[(len(which), parts)](
        pages.view(torch.int32),
        which,
        out.view(torch.int32),
        PARTS=parts,
        STRIDE=pages.stride(1) // word,
        WORDS=page_size * dim // word,
        RATIO=ratio,
        num_warps=4,
    )
