"""Scores of all rows that a query sees, by a layer's index: sum over heads of weight * relu(q . k).

It reads 256 bytes for each row of the past (128 columns of 16 bits), and each byte once per query
of a decode step. Queries of a prompt share a tile of keys. Keys are the rows of the product and
queries its columns, so that the sum over heads stays within a few lanes.

The queries of a step are a list. `items` cuts it into runs of queries of one sequence, at most
`rows_per_item` of them; the last items may be empty. As in `latent`, each program takes an equal
share of all tiles of keys, of whichever items they are. The device plans the shares:

    tiles: [items + 1] tiles of all items before each; [items + 1] holds the share
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np
import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait
from triton.tools.tensor_descriptor import TensorDescriptor

from cairn.kernels.fp8_rows import is_narrow, page_rows
from cairn.kernels.fp8_tiles import (
    as_tile,
    fit_query,
    has_scales,
    load_scales,
    reads_pairs,
    slice_size,
    unpack_pairs,
)
from cairn.kernels.launch import direct
from cairn.kernels.paged_extend import can_describe
from cairn.kernels.pdl import pdl_options
from cairn.kernels.processors import processors
from cairn.kernels.sizes import power_of_two

_TILE = 64  # keys at once; a product of tensor cores has 64 rows
_TILE_FLOAT32 = 32
_ROWS = 4  # queries of a prompt that share a tile of keys
_STAGES, _PROMPT_STAGES = 4, 2  # tiles in memory, beside one query and beside many
_PER_PROCESSOR = 2  # programs that fit
_ITEMS = 256  # items that a program looks at at once to find its own
_LEAST = 4  # tiles of a share: less is not worth loading the queries


@dataclass(frozen=True, slots=True)
class RowList:
    """Queries of a step, in order of their sequences and positions."""

    rows: torch.Tensor  # [n] int32, of the step
    seqs: torch.Tensor  # [n] int32
    limits: torch.Tensor  # [n] int32, rows that each sees
    items: torch.Tensor  # [items + 1] int32, first query of each item
    tiles: torch.Tensor  # [items + 2] int32, the plan
    per_item: int
    """Most queries of an item."""

    @property
    def num_items(self) -> int:
        return len(self.items) - 1


def rows_per_item(dtype: torch.dtype) -> int:
    """Queries of a prompt that share a tile of keys."""
    return _ROWS if dtype.itemsize == 2 else 1


def cut_items(counts: np.ndarray, per_item: int) -> np.ndarray:
    """First query of each item, and their number, for runs of `counts` queries."""
    firsts = np.concatenate(([0], np.cumsum(counts)))
    starts = [np.arange(begin, end, per_item) for begin, end in pairwise(firsts)]
    return np.concatenate([*starts, firsts[-1:]]).astype(np.int32)


def _padded(heads: int) -> int:
    return max(16, power_of_two(heads))


def _tile_size(dtype: torch.dtype) -> int:
    return _TILE if dtype.itemsize == 2 else _TILE_FLOAT32


def _stages(per_item: int, dtype: torch.dtype) -> int:
    if dtype.itemsize > 2:
        return 1
    return _STAGES if per_item == 1 else _PROMPT_STAGES


def _programs(device: torch.device) -> int:
    return _PER_PROCESSOR * processors(device)


@direct
@triton.jit(do_not_specialize=["num_items"])
def _scan_plan_kernel(
    items,  # [num_items + 1]
    limits,
    tiles,
    num_items: tl.int32,
    PROGRAMS: tl.constexpr,
    TILE: tl.constexpr,
    LEAST: tl.constexpr,
    BLOCK: tl.constexpr,
):
    total = 0
    for start in range(0, num_items, BLOCK):
        item = start + tl.arange(0, BLOCK)
        there = item < num_items
        begin = tl.load(items + item, mask=there, other=0)
        end = tl.load(items + item + 1, mask=there, other=0)
        seen = tl.load(limits + end - 1, mask=begin < end, other=0)
        own = (seen + TILE - 1) // TILE
        tl.store(tiles + item, total + tl.cumsum(own, 0) - own, mask=there)
        total += tl.sum(own)
    tl.store(tiles + num_items, total)
    tl.store(tiles + num_items + 1, tl.maximum((total + PROGRAMS - 1) // PROGRAMS, LEAST))


def plan_scan(listed: RowList, dtype: torch.dtype) -> None:
    """Plan the shares of these queries, for all layers. `dtype` is that of queries.

    The scan reads the plan before its PDL wait. A kernel launched without PDL must therefore run
    between the two; in a step, `known_tokens` does.
    """
    _scan_plan_kernel[(1,)](
        listed.items,
        listed.limits,
        listed.tiles,
        listed.num_items,
        PROGRAMS=_programs(listed.items.device),
        TILE=_tile_size(dtype),
        LEAST=_LEAST,
        BLOCK=1024,
    )


@triton.jit
def _item_of(tiles, num_items, tile, BLOCK: tl.constexpr):
    """The item that a tile belongs to."""
    item = -1
    for start in range(0, num_items, BLOCK):
        offs = start + tl.arange(0, BLOCK)
        begin = tl.load(tiles + offs, mask=offs < num_items, other=2**31 - 1, cache_modifier=".cg")
        item += tl.sum((begin <= tile).to(tl.int32))
    return item


@triton.jit
def _load_item(tiles, items, seqs, page_table, item, table_stride):
    """-> the first tile of an item, that of the next one, its first query, their number, and the
    page table's row of its sequence"""
    before = tl.load(tiles + item, cache_modifier=".cg")
    behind = tl.load(tiles + item + 1, cache_modifier=".cg")
    listed = tl.load(items + item, cache_modifier=".cg")
    count = tl.load(items + item + 1, cache_modifier=".cg") - listed
    seq = tl.load(seqs + listed, cache_modifier=".cg").to(tl.int64)
    return before, behind, listed, count, page_table + seq * table_stride


@triton.jit
def _scales(pool, page, start, offs_n, PAGE_SIZE: tl.constexpr, WIDTH: tl.constexpr):
    """-> scales of the keys of a tile that begins at row `start` and lies in one page"""
    rows = pool + page.to(tl.int64) * slice_size(pool, PAGE_SIZE, WIDTH)
    return load_scales(rows, start % PAGE_SIZE + offs_n, offs_n >= 0, PAGE_SIZE, WIDTH)


@direct
@triton.jit(do_not_specialize=["num_items", "table_stride", "score_blocks"])
def _scan_kernel(
    query,  # [rows of the step, HEADS, WIDTH], contiguous
    weights,  # [rows of the step, HEADS] float32
    pool,  # [pages, PAGE_SIZE, WIDTH], or rows of 8 bits, followed by their scales
    keys,  # if TMA: descriptor of the pool as [-1, WIDTH], or as pairs, for loads of TILE rows
    page_table,  # [seqs, ...]
    rows,
    seqs,
    limits,
    items,
    tiles,
    scores,  # [listed rows, 128 * score_blocks] float32
    num_items: tl.int32,
    table_stride: tl.int32,
    score_blocks: tl.int32,
    HEADS: tl.constexpr,
    WIDTH: tl.constexpr,
    PAGE_SIZE: tl.constexpr,
    ROWS: tl.constexpr,  # most queries of an item
    BLOCK_I: tl.constexpr,  # items that are looked at at once
    BLOCK_H: tl.constexpr,  # at least HEADS
    BLOCK_W: tl.constexpr,  # at least WIDTH
    TILE: tl.constexpr,
    TMA: tl.constexpr,
    PDL: tl.constexpr,
):
    if PDL:
        gdc_launch_dependents()
    # What is constant within a step is read before the wait, bypassing the L1 cache.
    BLOCK_Q: tl.constexpr = ROWS * BLOCK_H
    SLICE: tl.constexpr = slice_size(pool, PAGE_SIZE, WIDTH)
    # Rows of 8 bits are read as pairs of columns: 0, 2, 4... with `q`, and 1, 3, 5... with `q_odd`.
    # Two such products with many queries do not fit into registers.
    PAIRS: tl.constexpr = reads_pairs(pool, query) and ROWS == 1
    STEP: tl.constexpr = 2 if PAIRS else 1
    program = tl.program_id(0)
    total = tl.load(tiles + num_items, cache_modifier=".cg")
    share = tl.load(tiles + num_items + 1, cache_modifier=".cg")
    first = program * share
    last = tl.minimum(first + share, total)
    item = _item_of(tiles, num_items, first, BLOCK_I)
    item = tl.minimum(item, num_items - 1)  # a program may have nothing to do
    before, behind, listed, count, table = _load_item(
        tiles, items, seqs, page_table, item, table_stride
    )
    if PDL:
        gdc_wait()
    if first >= total:
        return
    offs_q = tl.arange(0, BLOCK_Q)
    offs_w = tl.arange(0, BLOCK_W // STEP)
    offs_n = tl.arange(0, TILE)
    offs_r = tl.arange(0, ROWS)
    head = offs_q % BLOCK_H
    while first < last:
        until = tl.minimum(behind, last)
        there = (offs_q // BLOCK_H < count) & (head < HEADS)
        row = tl.load(rows + listed + offs_q // BLOCK_H, mask=there, other=0).to(tl.int64)
        place = row * HEADS + head
        own = query + place[:, None] * WIDTH + STEP * offs_w[None, :]
        known = there[:, None] & (offs_w < WIDTH // STEP)[None, :]
        q = fit_query(tl.load(own, mask=known, other=0.0), pool)
        if PAIRS:
            q_odd = fit_query(tl.load(own + 1, mask=known, other=0.0), pool)
        w = tl.load(weights + place, mask=there, other=0.0)
        limit = tl.load(limits + listed + offs_r, mask=offs_r < count, other=0)
        end = tl.load(limits + listed + count - 1)
        last_page = (end - 1) // PAGE_SIZE
        out = scores + (listed + offs_r).to(tl.int64)[None, :] * (128 * score_blocks)
        begin = (first - before) * TILE
        # Look up pages one tile ahead: a load that depends on another load would stall the loop.
        following = tl.load(table + begin // PAGE_SIZE)
        if TMA and has_scales(pool):
            ahead = _scales(pool, following, begin, offs_n, PAGE_SIZE, WIDTH)
        for start in range(begin, (until - before) * TILE, TILE):
            n = start + offs_n
            if TMA:
                page_row = following * (SLICE // WIDTH) + start % PAGE_SIZE
                following = tl.load(table + tl.minimum((start + TILE) // PAGE_SIZE, last_page))
                k = keys.load([page_row, 0])
                if has_scales(pool):
                    scale = ahead
                    ahead = _scales(pool, following, start + TILE, offs_n, PAGE_SIZE, WIDTH)
            else:
                page = tl.load(table + n // PAGE_SIZE, mask=n < end, other=0).to(tl.int64)
                slot = page * (SLICE // STEP) + n % PAGE_SIZE * (WIDTH // STEP)
                k = tl.load(
                    as_tile(pool, PAIRS) + slot[:, None] + offs_w[None, :],
                    mask=(n < end)[:, None] & (offs_w < WIDTH // STEP)[None, :],
                    other=0.0,
                )
                if has_scales(pool):
                    scale = load_scales(
                        pool + page * SLICE, n % PAGE_SIZE, n < end, PAGE_SIZE, WIDTH
                    )
            # [TILE, BLOCK_Q]
            if PAIRS:
                even, odd = unpack_pairs(k, pool)
                products = tl.dot(even, q.T)
                products = tl.dot(odd, q_odd.T, products)
            else:
                products = tl.dot(k.to(q.dtype), q.T, input_precision="ieee")
            products = tl.maximum(products, 0.0) * w[None, :]
            # Keys behind the last row may be anything, and nothing is stored for them.
            if ROWS == 1:
                score = tl.sum(products, 1)[:, None]
            else:
                score = tl.sum(tl.reshape(products, (TILE, ROWS, BLOCK_H)), 2)
            if has_scales(pool):
                # Scales are positive, so that they can be multiplied to the sum of relus.
                score = score * scale[:, None]
            tl.store(out + n[:, None], score, mask=n[:, None] < limit[None, :])
        first = until
        item = tl.minimum(item + 1, num_items - 1)
        before, behind, listed, count, table = _load_item(
            tiles, items, seqs, page_table, item, table_stride
        )


def index_scan(
    query: torch.Tensor,  # [rows of the step, heads, width], contiguous
    weights: torch.Tensor,  # [rows of the step, heads] float32, contiguous
    pool: torch.Tensor,  # [pages, page_size, width], or more rows of 8 bits
    page_table: torch.Tensor,  # [seqs, pages] int32
    listed: RowList,
    scores: torch.Tensor,  # [listed rows, length] float32; length is a multiple of 128
) -> None:
    """Score all rows that each listed query sees. Places behind these are left as they are."""
    _, heads, width = query.shape
    page_size = page_rows(pool)
    tile = _tile_size(query.dtype)
    tma = (
        can_describe(pool.device, query.dtype)
        and page_size % tile == 0
        and width in (64, 128)
        and (query.dtype == pool.dtype or is_narrow(pool.dtype))
    )
    keys: Any = pool
    if tma:
        pairs = is_narrow(pool.dtype) and query.dtype.itemsize == 2 and listed.per_item == 1
        flat = pool.view(torch.int16 if pairs else pool.dtype).flatten(0, 1)
        keys = TensorDescriptor.from_tensor(flat, [tile, flat.shape[1]])
    assert scores.shape[1] % 128 == 0
    _scan_kernel[(_programs(pool.device),)](
        query, weights, pool, keys, page_table, listed.rows, listed.seqs, listed.limits,
        listed.items, listed.tiles, scores, listed.num_items, page_table.stride(0),
        scores.shape[1] // 128,
        HEADS=heads, WIDTH=width, PAGE_SIZE=page_size, ROWS=listed.per_item, BLOCK_I=_ITEMS,
        BLOCK_H=_padded(heads), BLOCK_W=max(32, power_of_two(width)), TILE=tile, TMA=tma,
        num_warps=4, num_stages=_stages(listed.per_item, query.dtype),
        **pdl_options(pool),
    )  # fmt: skip
