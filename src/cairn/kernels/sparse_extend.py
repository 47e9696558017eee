"""Sparse attention of many new rows per sequence over pages that `sparse_select` has selected.

    1. the union of the pages that neighbouring rows selected, with the rows that read each page
    2. attention over that union, page by page, and the merge with the window

Rows are cut into blocks, each of one sequence (`ExtendBlocks`).
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import triton
import triton.language as tl
from triton.tools.tensor_descriptor import TensorDescriptor

from cairn.kernels.fp8_tiles import (
    fit_query,
    has_scales,
    inverse_of,
    load_scales,
    log2_of,
    slice_size,
)
from cairn.kernels.launch import direct
from cairn.kernels.paged_extend import ExtendBlocks, can_describe
from cairn.kernels.sizes import power_of_two
from cairn.kernels.softmax import LOG2E
from cairn.kernels.sparse_shape import SparseShape, load_scoring
from cairn.kernels.workspace import Workspace


def union_rows(shape: SparseShape) -> int:
    """Number of neighbouring rows that share the union of their pages; a power of two."""
    rows = max(1, min(16, 64 // (shape.heads // shape.kv_heads)))
    return 1 << (rows.bit_length() - 1)


@direct
@triton.jit(do_not_specialize=["table_stride"])
def _union_kernel(
    selected,  # [rows, KV_HEADS, TOPK]
    page_table,
    cu_query,
    block_seq,
    block_begin,
    pages,  # [blocks, KV_HEADS, BLOCK_M * BLOCK_K]
    readers,  # same shape; bit r is set if row r of the block reads the page
    counts,  # [blocks, KV_HEADS]
    table_stride: tl.int32,
    KV_HEADS: tl.constexpr,
    TOPK: tl.constexpr,
    BLOCK_M: tl.constexpr,
):
    BLOCK_K: tl.constexpr = triton.next_power_of_2(TOPK)
    kv_head = tl.program_id(0)
    block = tl.program_id(1)
    seq = tl.load(block_seq + block)
    begin = tl.load(block_begin + block)
    if begin < 0:
        tl.store(counts + block * KV_HEADS + kv_head, 0)
        return
    first_row = tl.load(cu_query + seq).to(tl.int32)
    rows = tl.load(cu_query + seq + 1).to(tl.int32) - first_row - begin
    first = ((first_row + begin) * KV_HEADS + kv_head).to(tl.int64) * TOPK
    entry = tl.arange(0, BLOCK_M * BLOCK_K)
    owner = entry // BLOCK_K
    slot = entry % BLOCK_K
    index = tl.load(
        selected + first + owner * (KV_HEADS * TOPK) + slot,
        mask=(owner < rows) & (slot < TOPK),
        other=-1,
    )
    # Every entry is compared with the entries of all rows, COMPARED entries of one row at a time.
    # This makes at most 16,384 comparisons per step, 128 per thread. There are at most 16 rows of
    # 128 entries.
    COMPARED: tl.constexpr = min(BLOCK_K, 16384 // (BLOCK_M * BLOCK_K))
    reads = tl.zeros((BLOCK_M * BLOCK_K,), tl.int32)
    for start in range(0, BLOCK_M * BLOCK_K, COMPARED):
        other = start // BLOCK_K
        column = start % BLOCK_K + tl.arange(0, COMPARED)[:, None]
        listed = tl.load(
            selected + first + other * (KV_HEADS * TOPK) + column,
            mask=(other < rows) & (column < TOPK),
            other=-2,
        )
        reads |= tl.max((listed == index[None, :]).to(tl.int32), 0) << other
    first_seen = (index >= 0) & ((reads & ((1 << owner) - 1)) == 0)
    place = tl.cumsum(first_seen.to(tl.int32), 0) - 1
    base = (block * KV_HEADS + kv_head).to(tl.int64) * (BLOCK_M * BLOCK_K)
    page = tl.load(page_table + seq.to(tl.int64) * table_stride + index, mask=first_seen, other=0)
    tl.store(pages + base + place, page, mask=first_seen)
    tl.store(readers + base + place, reads, mask=first_seen)
    tl.store(counts + block * KV_HEADS + kv_head, tl.sum(first_seen.to(tl.int32)))


@triton.jit
def _or(x, missing, instead):
    return tl.where(x == missing, instead, x)


@direct
@triton.jit(do_not_specialize=["stage_shift"])
def _attend_kernel(
    query,
    scoring,
    pool,
    vectors,
    bias,
    cu_query,
    block_seq,
    block_begin,
    pages,
    kv_pages,  # if LOCATED: the pages in the pool or, if STAGED, -1 - page of the stage
    readers,
    counts,
    window_out,  # [rows, HEADS, DIM]
    window_lse,
    normalizer,  # [rows, HEADS], if BOUNDED: bounds the mass of every page and of the window
    tiles,  # if TMA: descriptor of the pool as [-1, DIM], for loads of pages
    landmarks,  # if TMA: descriptor of vectors as [-1, WIDTH], for loads of LANDMARK_PAD rows
    out,
    scale,
    query_stride,
    scoring_stride,
    stage_shift: tl.int64,  # offset of the stage from the pool, in units of 16 elements
    HEADS: tl.constexpr,
    KV_HEADS: tl.constexpr,
    DIM: tl.constexpr,
    PAGE_SIZE: tl.constexpr,
    LANDMARK_HEADS: tl.constexpr,
    WIDTH: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    SPLIT: tl.constexpr,
    HIDE_LAST: tl.constexpr,
    REACH: tl.constexpr,
    TILE_PAGES: tl.constexpr,  # pages that are read at once
    BY_LSE: tl.constexpr,
    NULL_SPLIT: tl.constexpr,
    BOUNDED: tl.constexpr,
    LOCATED: tl.constexpr,
    STAGED: tl.constexpr,
    TMA: tl.constexpr,
    UNION: tl.constexpr,
    ROWS: tl.constexpr,  # rows per block
    GROUP_PAD: tl.constexpr,  # power of two, at least the heads of a group
    LANDMARK_PAD: tl.constexpr,  # landmarks of a kv head, padded to the size that tl.dot needs
    BLOCK_M: tl.constexpr,  # ROWS * GROUP_PAD, or the least that tl.dot takes
):
    # Blocks vary fastest, so kv heads run one after another: the pages of one head fit in the cache
    # more often than those of all heads.
    tl.static_assert(BY_LSE or (TILE_PAGES == 1 and REACH == 0))
    block = tl.program_id(0)
    kv_head = tl.program_id(1)
    seq = tl.load(block_seq + block)
    begin = tl.load(block_begin + block)
    if begin < 0:
        return
    first_row = tl.load(cu_query + seq).to(tl.int32)
    rows = tl.load(cu_query + seq + 1).to(tl.int32) - first_row - begin
    GROUP: tl.constexpr = HEADS // KV_HEADS
    SHARED: tl.constexpr = HEADS // LANDMARK_HEADS
    offs_m = tl.arange(0, BLOCK_M)
    offs_d = tl.arange(0, DIM)
    offs_w = tl.arange(0, WIDTH)
    offs_n = tl.arange(0, TILE_PAGES * PAGE_SIZE)
    in_page = offs_n % PAGE_SIZE
    offs_l = tl.arange(0, LANDMARK_PAD)
    OF_KV: tl.constexpr = LANDMARK_HEADS // KV_HEADS
    own_row = offs_m // GROUP_PAD
    group = offs_m % GROUP_PAD
    head = kv_head * GROUP + group
    real = (own_row < tl.minimum(rows, ROWS)) & (group < GROUP)
    row = (first_row + begin + own_row).to(tl.int64)
    q = tl.load(
        query + (row * query_stride + head * DIM)[:, None] + offs_d[None, :],
        mask=real[:, None],
        other=0.0,
    )
    q = fit_query(q, pool)
    SLICE: tl.constexpr = slice_size(pool, PAGE_SIZE, DIM)
    if not BY_LSE:
        scores_with, _ = load_scoring(
            scoring,
            (row * scoring_stride)[:, None],
            head[:, None],
            real[:, None],
            scale,
            WIDTH,
            SPLIT,
            REACH,
        )
    # Start with the window and the null split. All logarithms are in base 2.
    scale_2 = scale * LOG2E
    window = tl.load(window_lse + row * HEADS + head, mask=real, other=0.0) * LOG2E
    acc = tl.load(
        window_out + (row * HEADS + head)[:, None] * DIM + offs_d[None, :],
        mask=real[:, None],
        other=0.0,
    ).to(tl.float32)
    most = window
    if BOUNDED:
        most = tl.load(normalizer + row * HEADS + head, mask=real, other=0.0) * LOG2E
    if NULL_SPLIT:
        most = tl.maximum(most, 0.0)
    total = tl.exp2(window - most)
    acc = acc * total[:, None]
    if NULL_SPLIT:
        total += tl.exp2(-most)
    base = (block * KV_HEADS + kv_head).to(tl.int64) * UNION
    count = tl.load(counts + block * KV_HEADS + kv_head)
    # Look up pages, their readers and biases one page ahead: a load that depends on another load
    # would stall the loop.
    nth = 0
    if TILE_PAGES > 1:
        nth = offs_n // PAGE_SIZE  # pages and readers are those of each row of a tile
    page = tl.load(pages + base + nth, mask=nth < count, other=0)
    bits = tl.load(readers + base + nth, mask=nth < count, other=0)
    at = page
    if LOCATED:
        at = tl.load(kv_pages + base + nth, mask=nth < count, other=0)
    own_bias = bias + kv_head * OF_KV + group // SHARED
    more = tl.zeros((BLOCK_M,), tl.float32)
    if HAS_BIAS and not BY_LSE:
        more = tl.load(own_bias + page.to(tl.int64) * LANDMARK_HEADS, mask=real, other=0.0)
    for i in range(0, count, TILE_PAGES):
        shift = tl.zeros((), tl.int64)
        if STAGED:
            shift = tl.where(at < 0, stage_shift, 0) * 16
            at = tl.where(at < 0, -1 - at, at)
        there = (offs_n >= 0) & (bits != 0)
        if TMA:
            first = (at * (2 * KV_HEADS) + kv_head) * PAGE_SIZE
            k = tiles.load([first, 0]).T
            v = tiles.load([first + KV_HEADS * PAGE_SIZE, 0])
        else:
            inside = pool + shift + (at.to(tl.int64) * (2 * KV_HEADS) + kv_head) * SLICE
            values = inside + KV_HEADS * SLICE
            key_rows, value_rows = inside + in_page * DIM, values + in_page * DIM
            if TILE_PAGES > 1:
                k = tl.load(key_rows[None, :] + offs_d[:, None], mask=there[None, :], other=0.0)
                v = tl.load(value_rows[:, None] + offs_d[None, :], mask=there[:, None], other=0.0)
            else:
                k = tl.load(key_rows[None, :] + offs_d[:, None])
                v = tl.load(value_rows[:, None] + offs_d[None, :])
        if has_scales(pool):
            key_scale = load_scales(inside, in_page, there, PAGE_SIZE, DIM)
            value_scale = load_scales(values, in_page, there, PAGE_SIZE, DIM)
        if TILE_PAGES > 1:
            reads = (((bits[None, :] >> own_row[:, None]) & 1) > 0) & real[:, None]
        else:
            reads = (((bits >> own_row) & 1) > 0) & real
        mass = more * LOG2E
        if not BY_LSE:
            # Multiply every row with all landmarks of the kv head, then pick its own head's.
            first = page * LANDMARK_HEADS + kv_head * OF_KV
            if TMA:
                landmark = landmarks.load([first, 0]).T
            else:
                landmark = tl.load(
                    vectors + (first.to(tl.int64) + offs_l)[None, :] * WIDTH + offs_w[:, None],
                    mask=(offs_l < OF_KV)[None, :],
                    other=0.0,
                )  # [WIDTH, LANDMARK_PAD]
            every = tl.dot(scores_with, landmark, input_precision="ieee")
            score = tl.sum(tl.where((group // SHARED)[:, None] == offs_l[None, :], every, 0.0), 1)
            mass += score * scale_2
        if TILE_PAGES > 1:
            following = i + TILE_PAGES + nth
            page = tl.load(pages + base + following, mask=following < count, other=0)
            bits = tl.load(readers + base + following, mask=following < count, other=0)
            at = page
            if LOCATED:
                at = tl.load(kv_pages + base + following, mask=following < count, other=0)
        else:
            following = tl.minimum(i + 1, count - 1)
            page = tl.load(pages + base + following)
            bits = tl.load(readers + base + following)
            at = page
            if LOCATED:
                at = tl.load(kv_pages + base + following)
        logits = tl.dot(q, k.to(q.dtype), input_precision="ieee")
        if has_scales(pool):
            logits *= key_scale[None, :]
        if HIDE_LAST:
            logits = tl.where((in_page < PAGE_SIZE - 1)[None, :], logits, float("-inf"))
        if TILE_PAGES > 1:
            logits = tl.where(reads, logits, float("-inf"))
        if has_scales(pool):  # as in `softmax_weights`: shares include the scales of values
            logits = logits * scale_2 + log2_of(value_scale)[None, :]
            inside_most = tl.max(logits, 1)
            if TILE_PAGES > 1:
                inside_most = _or(inside_most, float("-inf"), 0.0)
            shares = tl.exp2(logits - inside_most[:, None])
            inside_total = tl.sum(shares * inverse_of(value_scale)[None, :], 1)
        else:
            inside_most = tl.max(logits, 1) * scale_2
            if TILE_PAGES > 1:
                inside_most = _or(inside_most, float("-inf"), 0.0)
            shares = tl.exp2(logits * scale_2 - inside_most[:, None])
            inside_total = tl.sum(shares, 1)
        if TILE_PAGES > 1:  # a row may read none of the pages
            inside_total = _or(inside_total, 0.0, 1.0)
        if BY_LSE:
            mass = inside_most + tl.log2(inside_total)
        if TILE_PAGES > 1:
            mass = tl.where(tl.max(reads.to(tl.int32), 1) > 0, mass, float("-inf"))
        else:
            mass = tl.where(reads, mass, float("-inf"))
        if BOUNDED:
            weight = tl.exp2(mass - most)
        else:
            new_most = tl.maximum(most, mass)
            fade = tl.exp2(most - new_most)
            weight = tl.exp2(mass - new_most)
            acc = acc * fade[:, None]
            total = total * fade
            most = new_most
        if has_scales(pool):  # the product of both weights may be too small for float16
            read = tl.dot(shares.to(q.dtype), v.to(q.dtype), input_precision="ieee")
            acc += read * (weight / inside_total)[:, None]
        else:
            shares = shares * (weight / inside_total)[:, None]
            acc = tl.dot(shares.to(v.dtype), v, acc, input_precision="ieee")
        total += weight
        if HAS_BIAS and not BY_LSE:
            more = tl.load(own_bias + page.to(tl.int64) * LANDMARK_HEADS, mask=real, other=0.0)
    result = acc * (1.0 / total)[:, None]
    tl.store(
        out + (row * HEADS + head)[:, None] * DIM + offs_d[None, :],
        result.to(out.dtype.element_ty),
        mask=real[:, None],
    )


def attend_selected(
    shape: SparseShape,
    selected: torch.Tensor,  # [rows, kv_heads, topk] int32
    query: torch.Tensor,  # [rows, heads, dim]
    scoring: torch.Tensor,  # [rows, heads, width]
    pool: torch.Tensor,  # [pages, 2 * kv_heads, page_size, dim]
    vectors: torch.Tensor,
    bias: torch.Tensor | None,
    page_table: torch.Tensor,  # [seqs, pages] int32
    cu_query: torch.Tensor,
    blocks: ExtendBlocks,  # union_rows(shape) rows each
    window_out: torch.Tensor,  # [rows, heads, dim]
    window_lse: torch.Tensor,  # [rows, heads] float32
    out: torch.Tensor,  # [rows, heads, dim]; may be window_out
    workspace: Workspace,
    *,
    normalizer: torch.Tensor | None = None,  # [rows, heads], from `select_pages`
    locate: Callable[[torch.Tensor, torch.Tensor], torch.Tensor] | None = None,
    stage: torch.Tensor | None = None,  # more pages, of the pool's page shape and type
) -> torch.Tensor:
    """Write attention over window and selected pages to `out`.

    Returns the number of pages that each block and kv head read, [blocks, kv_heads]. If page ids
    are not pages of the pool, `locate` maps ids and these counts to locations: a page of the pool
    or, as -1 - page, a page of the stage.
    """
    heads, dim = query.shape[1:]
    group_pad = power_of_two(heads // shape.kv_heads)
    block_k = power_of_two(shape.topk)
    size = (len(blocks.seq), shape.kv_heads)
    union = blocks.block_m * block_k
    pages, readers = (
        workspace.take(name, *size, union, dtype=torch.int32) for name in ("pages", "readers")
    )
    counts = torch.empty(size, dtype=torch.int32, device=query.device)
    grid = (shape.kv_heads, len(blocks.seq))
    _union_kernel[grid](
        selected,
        page_table,
        cu_query,
        blocks.seq,
        blocks.begin,
        pages,
        readers,
        counts,
        page_table.stride(0),
        **shape.of(_union_kernel),
        BLOCK_M=blocks.block_m,
        num_warps=4,
    )
    kv_pages, shift = pages, 0
    if locate is not None:
        kv_pages = locate(pages, counts)
    if stage is not None:
        shift, rest = divmod(stage.data_ptr() - pool.data_ptr(), 16 * pool.element_size())
        assert rest == 0, "tensors lie on whole cache lines"
    padded = max(16, power_of_two(vectors.shape[1] // shape.kv_heads))
    block_m = max(16, blocks.block_m * group_pad)
    tma = stage is None and shape.tile_pages == 1 and _worth_describing(pool, block_m)
    tiles, landmarks = pool, vectors
    if tma:
        tiles = TensorDescriptor.from_tensor(pool.view(-1, dim), [shape.page_size, dim])
        width = shape.landmark_width
        landmarks = TensorDescriptor.from_tensor(vectors.view(-1, width), [padded, width])
    _attend_kernel[grid[::-1]](
        query,
        scoring,
        pool,
        vectors,
        vectors if bias is None else bias,
        cu_query,
        blocks.seq,
        blocks.begin,
        pages,
        kv_pages,
        readers,
        counts,
        window_out,
        window_lse,
        window_lse if normalizer is None else normalizer,
        tiles,
        landmarks,
        out,
        shape.scale,
        query.stride(0),
        scoring.stride(0),
        shift,
        **shape.of(_attend_kernel),
        HAS_BIAS=bias is not None,
        BOUNDED=normalizer is not None and not shape.by_lse,
        LOCATED=locate is not None,
        STAGED=stage is not None,
        TMA=tma,
        UNION=union,
        ROWS=blocks.block_m,
        GROUP_PAD=group_pad,
        LANDMARK_PAD=padded,
        BLOCK_M=block_m,
        num_warps=4,
        num_stages=2,
    )
    return counts


def _worth_describing(pool: torch.Tensor, block_m: int) -> bool:
    """Whether loads through descriptors (TMA) pay off, as measured on an H200.

    They help with heads of 64 and hurt with heads of 128, unless products are as small as they are
    with one kv head per query head.
    """
    widths = (16, 32, 64, 128) if block_m == 16 else (16, 32, 64)
    return can_describe(pool.device, pool.dtype) and pool.shape[3] in widths
