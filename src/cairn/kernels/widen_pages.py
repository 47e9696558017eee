"""Widens the pages that some sequences read: rows of 8 bits become rows of 16, in larger pages.

Attention of many rows reads each page once for every block of rows and every query head. Widening
pages while reading them costs more than the bytes that it saves, so they are widened once before.
The result is a pool of tiles [tiles, 2 * kv_heads, tile rows, dim], and page tables of tiles.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from cairn.kernels.fp8_rows import page_rows
from cairn.kernels.fp8_tiles import load_scales, slice_size
from cairn.kernels.launch import direct
from cairn.kernels.processors import processors
from cairn.kernels.sizes import power_of_two

_PROGRAMS = 8  # per multiprocessor


@dataclass(frozen=True, slots=True)
class WideTiles:
    """Where the tiles of each sequence lie. Tile 0 is all zeros and belongs to no sequence."""

    table: torch.Tensor  # [seqs, tiles] int32, 0 for tiles that are not widened
    ends: torch.Tensor  # [seqs] int32, number of widened tiles of the sequences up to this one
    skipped: torch.Tensor  # [seqs] int32, tiles before a window

    @classmethod
    def of(
        cls,
        kv_lens: torch.Tensor,  # [seqs] int32
        query_lens: torch.Tensor,  # [seqs] int32
        widened: torch.Tensor,  # [seqs] bool, the sequences whose pages are widened
        tile: int,
        most: int,  # tiles of the longest sequence
        window: int | None,
        room: int,  # most tiles to widen
    ) -> WideTiles:
        """Only the device needs to know the lengths. The last tiles are not widened if there is no
        room for them."""
        skipped = torch.zeros_like(kv_lens)
        if window is not None:
            skipped = (kv_lens - query_lens - window + 1).clamp(min=0) // tile
        counts = torch.where(widened, (kv_lens + tile - 1) // tile - skipped, 0)
        ends = counts.cumsum(0).int()
        index = torch.arange(most, dtype=torch.int32, device=kv_lens.device) - skipped[:, None]
        there = (index >= 0) & (index < counts[:, None])
        table = 1 + (ends - counts)[:, None] + index
        table = torch.where(there & (table <= room), table, 0)
        return cls(table.int(), ends.clamp(max=room), skipped.int())


@direct
@triton.jit(do_not_specialize=["num_seqs", "table_stride", "width"])
def _widen_kernel(
    pool,  # [pages, PARTS, PAGE_SIZE, DIM], rows of 8 bits
    page_table,  # [seqs, width]
    ends,  # [seqs]
    skipped,  # [seqs]
    out,  # [tiles, PARTS, RATIO * PAGE_SIZE, DIM]
    num_seqs: tl.int32,
    table_stride: tl.int32,
    width: tl.int32,
    PARTS: tl.constexpr,
    DIM: tl.constexpr,
    PAGE_SIZE: tl.constexpr,
    RATIO: tl.constexpr,  # pages of a tile
    BLOCK: tl.constexpr,  # at least num_seqs of any step
):
    part = tl.program_id(1)
    seqs = tl.arange(0, BLOCK)
    end = tl.load(ends + seqs, mask=seqs < num_seqs, other=2**30)
    total = tl.load(ends + num_seqs - 1)
    row = tl.arange(0, triton.next_power_of_2(PAGE_SIZE))
    column = tl.arange(0, triton.next_power_of_2(DIM))
    in_page = row < PAGE_SIZE
    inside = in_page[:, None] & (column < DIM)[None, :]
    SLICE: tl.constexpr = slice_size(pool, PAGE_SIZE, DIM)
    for item in range(tl.program_id(0), total * RATIO, tl.num_programs(0)):
        tile = item // RATIO
        seq = tl.sum((end <= tile).to(tl.int32))
        begin = tl.load(ends + seq - 1, mask=seq > 0, other=0)
        place = (tile - begin + tl.load(skipped + seq)) * RATIO + item % RATIO
        page = tl.load(page_table + seq * table_stride + place, mask=place < width, other=0)
        rows = pool + (page.to(tl.int64) * PARTS + part) * SLICE
        x = tl.load(rows + row[:, None] * DIM + column[None, :], mask=inside, other=0.0)
        x = x.to(tl.float32) * load_scales(rows, row, in_page, PAGE_SIZE, DIM)[:, None]
        to = ((tile + 1).to(tl.int64) * PARTS + part) * RATIO + item % RATIO
        to = out + to * (PAGE_SIZE * DIM) + row[:, None] * DIM + column[None, :]
        tl.store(to, x.to(out.dtype.element_ty), mask=inside)


def widen_pages(
    pool: torch.Tensor,  # [pages, 2 * kv_heads, page_size, dim], rows of 8 bits
    page_table: torch.Tensor,  # [seqs, pages] int32
    tiles: WideTiles,
    out: torch.Tensor,  # [tiles, 2 * kv_heads, multiple of page_size, dim]
    max_seqs: int,  # of any step
) -> None:
    """Write the tiles of all sequences to `out`. A tile that ends behind its sequence's last page
    has whatever pages the table names there, or the null page."""
    parts, page_size, dim = pool.shape[1], page_rows(pool), pool.shape[3]
    programs = max(1, processors(pool.device) * _PROGRAMS // parts)
    _widen_kernel[(programs, parts)](
        pool,
        page_table,
        tiles.ends,
        tiles.skipped,
        out,
        len(tiles.ends),
        page_table.stride(0),
        page_table.shape[1],
        PARTS=parts,
        DIM=dim,
        PAGE_SIZE=page_size,
        RATIO=out.shape[2] // page_size,
        BLOCK=power_of_two(max_seqs),
        num_warps=4,
    )
