"""Sparse attention of many new rows per sequence: selection, then attention page by page.

    1. the normalizer: every head's log-sum-exp over its window and all landmarks
    2. selection, streaming over landmarks twice: first the best page of every few, of which the
       k-th best is a threshold; then the pages that reach it, and of those the best k
    3. the union of the pages that neighbouring rows selected, with the rows that read each
    4. attention over that union, and the merge with the window

Rows are cut into blocks of one sequence each (`ExtendBlocks`); landmarks of the pages that these
rows complete are in place before. Scores of rows x pages x heads are never in memory.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import triton
import triton.language as tl

from cairn.kernels.paged_extend import ExtendBlocks
from cairn.kernels.sparse_decode import (
    SOFTMAX_HEAD,
    STRATEGIES,
    SUM_GROUP,
    SparseShape,
    candidate_limit,
    load_scoring,
)
from cairn.kernels.top_pages import keep_best_of_rows

SELECT_ROWS = 64
"""Rows that one program ranks pages for."""
_ROWS = 4  # that one program picks from at once
_GROUPS = 512  # of pages, about, whose best pages make a threshold


def union_rows(shape: SparseShape) -> int:
    """Neighbouring rows that read the union of their pages together."""
    return max(1, min(16, 64 // (shape.heads // shape.kv_heads)))


@triton.jit
def _rows_and_limits(
    block_seq,
    block_begin,
    kv_lens,
    cu_query,
    dense_until,
    WINDOW: tl.constexpr,
    PAGE_SIZE: tl.constexpr,
    BLOCK_M: tl.constexpr,
):
    """Of this program's block: its sequence, rows of the step, which of them are there, and how
    many candidates each has."""
    block = tl.program_id(1)
    seq = tl.load(block_seq + block)
    first_row = tl.load(cu_query + seq).to(tl.int32)
    query_len = tl.load(cu_query + seq + 1).to(tl.int32) - first_row
    past = tl.load(kv_lens + seq).to(tl.int32) - query_len
    new = tl.load(block_begin + block) + tl.arange(0, BLOCK_M)
    in_rows = new < query_len
    until = tl.load(dense_until + seq).to(tl.int32)
    limit = tl.where(in_rows, candidate_limit(past + new, WINDOW, PAGE_SIZE, until), 0)
    return seq, (first_row + new).to(tl.int64), in_rows, limit


@triton.jit
def _normalizer_kernel(
    scoring,  # [rows, HEADS, WIDTH]
    vectors,  # [pages, LANDMARK_HEADS, WIDTH]
    bias,
    candidates,  # [seqs, ...]
    kv_lens,
    cu_query,
    dense_until,  # [seqs] rows before it see everything
    block_seq,
    block_begin,
    window_lse,  # [rows, HEADS]
    normalizer,  # [rows, HEADS]
    scale,
    scoring_stride,
    candidate_stride,
    HEADS: tl.constexpr,
    LANDMARK_HEADS: tl.constexpr,
    WIDTH: tl.constexpr,
    PAGE_SIZE: tl.constexpr,
    WINDOW: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    SPLIT: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_P: tl.constexpr,
):
    head = tl.program_id(0)
    seq, row, in_rows, limit = _rows_and_limits(
        block_seq, block_begin, kv_lens, cu_query, dense_until, WINDOW, PAGE_SIZE, BLOCK_M
    )
    own = head // (HEADS // LANDMARK_HEADS)
    offs_w = tl.arange(0, WIDTH)
    q = load_scoring(scoring, row[:, None] * scoring_stride, head, in_rows[:, None], WIDTH, SPLIT)
    most = tl.load(window_lse + row * HEADS + head, mask=in_rows, other=0.0)
    total = tl.full((BLOCK_M,), 1.0, tl.float32)
    table = candidates + seq.to(tl.int64) * candidate_stride
    last = tl.max(limit)
    for start in range(0, last, BLOCK_P):
        index = start + tl.arange(0, BLOCK_P)
        page = tl.load(table + index, mask=index < last, other=-1).to(tl.int64)
        landmark = tl.load(
            vectors + (page * LANDMARK_HEADS + own)[None, :] * WIDTH + offs_w[:, None],
            mask=(page >= 0)[None, :],
            other=0.0,
        )  # [WIDTH, BLOCK_P]
        score = tl.dot(q, landmark, input_precision="ieee") * scale
        if HAS_BIAS:
            more = tl.load(bias + page * LANDMARK_HEADS + own, mask=page >= 0, other=0.0)
            score += more[None, :]
        seen = (index[None, :] < limit[:, None]) & (page >= 0)[None, :]
        score = tl.where(seen, score, float("-inf"))
        new_most = tl.maximum(most, tl.max(score, 1))
        total = total * tl.exp(most - new_most) + tl.sum(tl.exp(score - new_most[:, None]), 1)
        most = new_most
    tl.store(normalizer + row * HEADS + head, most + tl.log(total), mask=in_rows)


@triton.jit
def _rank_kernel(
    scoring,
    vectors,
    bias,
    candidates,
    kv_lens,
    cu_query,
    dense_until,
    block_seq,
    block_begin,
    normalizer,
    limits,  # [rows] candidates of each row, written before and read after
    maxima,  # [rows, KV_HEADS, groups] written unless COLLECT
    thresholds,  # [rows, KV_HEADS] read if COLLECT, and likewise all below
    counts,  # [rows, KV_HEADS] written
    kept_rank,  # [rows, KV_HEADS, capacity] written
    kept_index,
    scale,
    scoring_stride,
    candidate_stride,
    groups,
    capacity,
    HEADS: tl.constexpr,
    KV_HEADS: tl.constexpr,
    LANDMARK_HEADS: tl.constexpr,
    WIDTH: tl.constexpr,
    PAGE_SIZE: tl.constexpr,
    WINDOW: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    SPLIT: tl.constexpr,
    SINKS: tl.constexpr,
    STRATEGY: tl.constexpr,
    TOPK: tl.constexpr,
    COLLECT: tl.constexpr,
    GROUP_PAGES: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_P: tl.constexpr,
):
    kv_head = tl.program_id(0)
    seq, row, in_rows, limit = _rows_and_limits(
        block_seq, block_begin, kv_lens, cu_query, dense_until, WINDOW, PAGE_SIZE, BLOCK_M
    )
    HEADS_OF_KV: tl.constexpr = HEADS // KV_HEADS
    SHARED: tl.constexpr = HEADS // LANDMARK_HEADS
    offs_w = tl.arange(0, WIDTH)
    own = row * KV_HEADS + kv_head
    table = candidates + seq.to(tl.int64) * candidate_stride
    last = tl.max(limit)
    count = tl.zeros((BLOCK_M,), tl.int32)
    equals = tl.zeros((BLOCK_M,), tl.int32)
    threshold = tl.zeros((BLOCK_M,), tl.float32)
    if COLLECT:
        threshold = tl.load(thresholds + own, mask=in_rows, other=float("inf"))
    else:
        tl.store(limits + row, limit, mask=in_rows)
    rank = tl.zeros((BLOCK_M, BLOCK_P), tl.float32)
    # One loop over tiles of pages and, within each, heads: loads run ahead across tiles.
    for step in range(0, tl.cdiv(last, BLOCK_P) * HEADS_OF_KV):
        g = step % HEADS_OF_KV
        start = step // HEADS_OF_KV * BLOCK_P
        head = kv_head * HEADS_OF_KV + g
        index = start + tl.arange(0, BLOCK_P)
        page = tl.load(table + index, mask=index < last, other=-1).to(tl.int64)
        q = load_scoring(
            scoring, row[:, None] * scoring_stride, head, in_rows[:, None], WIDTH, SPLIT
        )
        landmark = tl.load(
            vectors + (page * LANDMARK_HEADS + head // SHARED)[None, :] * WIDTH + offs_w[:, None],
            mask=(page >= 0)[None, :],
            other=0.0,
        )
        score = tl.dot(q, landmark, input_precision="ieee") * scale
        if HAS_BIAS:
            own_bias = bias + page * LANDMARK_HEADS + head // SHARED
            score += tl.load(own_bias, mask=page >= 0, other=0.0)[None, :]
        if (STRATEGY == SOFTMAX_HEAD) and (HEADS_OF_KV > 1):
            whole = tl.load(normalizer + row * HEADS + head, mask=in_rows, other=0.0)
            score -= whole[:, None]
        if STRATEGY == SUM_GROUP:
            rank = tl.where(g == 0, score, rank + score)
        else:
            rank = tl.where(g == 0, score, tl.maximum(rank, score))
        if g == HEADS_OF_KV - 1:
            seen = (index[None, :] < limit[:, None]) & (page >= 0)[None, :]
            final = rank
            if SINKS > 0:
                final = tl.where((index < SINKS)[None, :], float("inf"), final)
            final = tl.where(seen, final, float("-inf"))
            if COLLECT:
                # What beats the threshold, and of its equals as many as could matter: one scan
                # for both, with the equals in the upper half.
                more = final > threshold[:, None]
                equal = seen & (final == threshold[:, None])
                both = tl.cumsum(more.to(tl.int32) + (equal.to(tl.int32) << 16), 1)
                equal_before = (both >> 16) + equals[:, None]
                take = more | (equal & (equal_before <= TOPK))
                taken_equals = tl.minimum(equal_before, TOPK) - tl.minimum(equals, TOPK)[:, None]
                place = count[:, None] + (both & 0xFFFF) + taken_equals - 1
                at = own[:, None] * capacity + place
                tl.store(kept_rank + at, final, mask=take)
                tl.store(
                    kept_index + at,
                    tl.broadcast_to(index[None, :], (BLOCK_M, BLOCK_P)),
                    mask=take,
                )
                count += tl.sum(take.to(tl.int32), 1)
                equals += tl.sum(equal.to(tl.int32), 1)
            else:
                grouped = tl.reshape(final, (BLOCK_M, BLOCK_P // GROUP_PAGES, GROUP_PAGES))
                group = start // GROUP_PAGES + tl.arange(0, BLOCK_P // GROUP_PAGES)
                tl.store(
                    maxima + own[:, None] * groups + group[None, :],
                    tl.max(grouped, 2),
                    mask=in_rows[:, None] & (group < groups)[None, :],
                )
    if COLLECT:
        tl.store(counts + own, count, mask=in_rows)


@triton.jit
def _rows_of(block_seq, block_begin, cu_query, ROWS: tl.constexpr):
    """Some rows of a block, and which of them are there."""
    block = tl.program_id(1)
    seq = tl.load(block_seq + block)
    first_row = tl.load(cu_query + seq).to(tl.int32)
    query_len = tl.load(cu_query + seq + 1).to(tl.int32) - first_row
    new = tl.load(block_begin + block) + tl.program_id(2) * ROWS + tl.arange(0, ROWS)
    return (first_row + new).to(tl.int64), new < query_len


@triton.jit
def _threshold_kernel(
    cu_query,
    block_seq,
    block_begin,
    limits,
    maxima,
    thresholds,
    groups,
    KV_HEADS: tl.constexpr,
    TOPK: tl.constexpr,
    GROUP_PAGES: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,  # at least groups
):
    """The k-th best group maximum: at least k pages are as good, few are better."""
    row, in_rows = _rows_of(block_seq, block_begin, cu_query, ROWS)
    own = row * KV_HEADS + tl.program_id(0)
    limit = tl.load(limits + row, mask=in_rows, other=0)
    group = tl.arange(0, BLOCK)[None, :]
    best = tl.load(
        maxima + own[:, None] * groups + group,
        mask=group * GROUP_PAGES < limit[:, None],
        other=float("-inf"),
    )
    keep = keep_best_of_rows(best, TOPK)
    least = tl.min(tl.where(keep, best, float("inf")), 1)
    enough = tl.sum(keep.to(tl.int32), 1) == TOPK
    tl.store(thresholds + own, tl.where(enough, least, float("-inf")), mask=in_rows)


@triton.jit
def _choose_kernel(
    cu_query,
    block_seq,
    block_begin,
    counts,
    kept_rank,
    kept_index,
    out,  # [rows, KV_HEADS, TOPK]
    capacity,
    KV_HEADS: tl.constexpr,
    TOPK: tl.constexpr,
    BLOCK_K: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,  # at least capacity
):
    row, in_rows = _rows_of(block_seq, block_begin, cu_query, ROWS)
    own = row * KV_HEADS + tl.program_id(0)
    count = tl.load(counts + own, mask=in_rows, other=0)
    column = tl.arange(0, BLOCK)[None, :]
    there = column < count[:, None]
    rank = tl.load(kept_rank + own[:, None] * capacity + column, mask=there, other=float("-inf"))
    index = tl.load(kept_index + own[:, None] * capacity + column, mask=there, other=-1)
    keep = keep_best_of_rows(rank, TOPK)
    place = tl.cumsum(keep.to(tl.int32), 1) - 1
    tl.store(out + own[:, None] * TOPK + place, index, mask=keep)
    slot = tl.arange(0, BLOCK_K)[None, :]
    left = tl.sum(keep.to(tl.int32), 1)[:, None]
    tl.store(
        out + own[:, None] * TOPK + slot,
        tl.full((ROWS, BLOCK_K), -1, tl.int32),
        mask=in_rows[:, None] & (slot >= left) & (slot < TOPK),
    )


def select_pages(
    shape: SparseShape,
    scoring: torch.Tensor,  # [rows, heads, width], mapped by the policy, or to be split
    vectors: torch.Tensor,  # [pages, landmark heads, width]
    bias: torch.Tensor | None,
    candidates: torch.Tensor,  # [seqs, pages] int32, -1 where a page must not be read
    kv_lens: torch.Tensor,  # [seqs] int32
    cu_query: torch.Tensor,  # [seqs + 1] int32
    dense_until: torch.Tensor,  # [seqs] int32, rows before it see everything
    blocks: ExtendBlocks,  # of SELECT_ROWS rows
    window_lse: torch.Tensor,  # [rows, heads] float32
) -> torch.Tensor:
    """-> place in the sequence [rows, kv_heads, topk] int32, ascending, -1 for none; rows of no
    block are left unset."""
    rows, heads, _ = scoring.shape
    width = shape.landmark_width
    device, kv_heads, topk = scoring.device, shape.kv_heads, shape.topk
    sizes = {"HEADS": heads, "LANDMARK_HEADS": vectors.shape[1], "WIDTH": width}
    sizes |= {"PAGE_SIZE": shape.page_size, "WINDOW": shape.window, "HAS_BIAS": bias is not None}
    sizes |= {"SPLIT": shape.split_query}
    biases = vectors if bias is None else bias
    block_m, half = blocks.block_m, scoring.dtype.itemsize == 2
    block_p = 128 if width <= 128 and half else 64
    normalizer = window_lse
    if shape.strategy == "softmax_head" and heads > kv_heads:
        normalizer = torch.empty_like(window_lse)
        _normalizer_kernel[(heads, len(blocks.seq))](
            scoring,
            vectors,
            biases,
            candidates,
            kv_lens,
            cu_query,
            dense_until,
            blocks.seq,
            blocks.begin,
            window_lse,
            normalizer,
            shape.scale,
            scoring.stride(0),
            candidates.stride(0),
            **sizes,
            BLOCK_M=block_m,
            BLOCK_P=64 if width <= 128 else 32,
            num_warps=4,
            num_stages=3 if half else 1,
        )

    def floats(*size: int) -> torch.Tensor:
        return torch.empty(size, dtype=torch.float32, device=device)

    def ints(*size: int) -> torch.Tensor:
        return torch.empty(size, dtype=torch.int32, device=device)

    # A group's best page stands for it: the k-th best of these is a threshold that at least k pages
    # reach, and no more than k groups can hold a better one.
    pages = candidates.shape[1]
    group_pages = min(block_p, max(8, triton.next_power_of_2(triton.cdiv(pages, _GROUPS))))
    groups = triton.cdiv(pages, group_pages)
    capacity = topk * group_pages + topk
    limits, thresholds = ints(rows), floats(rows, kv_heads)
    maxima, counts = floats(rows, kv_heads, groups), ints(rows, kv_heads)
    kept_rank, kept_index = floats(rows, kv_heads, capacity), ints(rows, kv_heads, capacity)
    out = ints(rows, kv_heads, topk)
    block_k = triton.next_power_of_2(topk)
    some = {"KV_HEADS": kv_heads, "TOPK": topk, "ROWS": _ROWS}
    grid = (kv_heads, len(blocks.seq))
    for collect in (False, True):
        _rank_kernel[grid](
            scoring,
            vectors,
            biases,
            candidates,
            kv_lens,
            cu_query,
            dense_until,
            blocks.seq,
            blocks.begin,
            normalizer,
            limits,
            maxima,
            thresholds,
            counts,
            kept_rank,
            kept_index,
            shape.scale,
            scoring.stride(0),
            candidates.stride(0),
            groups,
            capacity,
            **sizes,
            KV_HEADS=kv_heads,
            SINKS=shape.sinks,
            STRATEGY=STRATEGIES[shape.strategy],
            TOPK=topk,
            COLLECT=collect,
            GROUP_PAGES=group_pages,
            BLOCK_M=block_m,
            BLOCK_P=64 if collect else block_p,  # collecting holds more of every page
            num_warps=8,
            num_stages=2 if half else 1,
        )
        if not collect:
            _threshold_kernel[(*grid, block_m // _ROWS)](
                cu_query,
                blocks.seq,
                blocks.begin,
                limits,
                maxima,
                thresholds,
                groups,
                **some,
                GROUP_PAGES=group_pages,
                BLOCK=triton.next_power_of_2(groups),
                num_warps=4,
            )
    _choose_kernel[(*grid, block_m // _ROWS)](
        cu_query,
        blocks.seq,
        blocks.begin,
        counts,
        kept_rank,
        kept_index,
        out,
        capacity,
        **some,
        BLOCK_K=block_k,
        BLOCK=triton.next_power_of_2(capacity),
        num_warps=4,
    )
    return out


@triton.jit
def _union_kernel(
    selected,  # [rows, KV_HEADS, TOPK]
    page_table,
    cu_query,
    block_seq,
    block_begin,
    pages,  # [blocks, KV_HEADS, BLOCK_M * BLOCK_K]
    readers,  # the same, bit r for row r of the block
    counts,  # [blocks, KV_HEADS]
    table_stride,
    KV_HEADS: tl.constexpr,
    TOPK: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BLOCK_M: tl.constexpr,
):
    kv_head = tl.program_id(0)
    block = tl.program_id(1)
    seq = tl.load(block_seq + block)
    begin = tl.load(block_begin + block)
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
    reads = tl.zeros((BLOCK_M * BLOCK_K,), tl.int32)
    first_seen = index >= 0
    offs_k = tl.arange(0, BLOCK_K)
    for r in range(0, tl.minimum(rows, BLOCK_M)):
        other = tl.load(
            selected + first + r * (KV_HEADS * TOPK) + offs_k, mask=offs_k < TOPK, other=-2
        )
        hit = tl.max((index[:, None] == other[None, :]).to(tl.int32), 1)
        reads |= hit << r
        first_seen = first_seen & ((hit == 0) | (r >= owner))
    place = tl.cumsum(first_seen.to(tl.int32), 0) - 1
    base = (block * KV_HEADS + kv_head).to(tl.int64) * (BLOCK_M * BLOCK_K)
    page = tl.load(page_table + seq.to(tl.int64) * table_stride + index, mask=first_seen, other=0)
    tl.store(pages + base + place, page, mask=first_seen)
    tl.store(readers + base + place, reads, mask=first_seen)
    tl.store(counts + block * KV_HEADS + kv_head, tl.sum(first_seen.to(tl.int32)))


@triton.jit
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
    kv_pages,  # where they are, if STAGED: a page of the pool, or -1 - a page of the stage
    readers,
    counts,
    window_out,  # [rows, HEADS, DIM]
    window_lse,
    out,
    scale,
    query_stride,
    scoring_stride,
    stage_shift,  # of the stage behind the pool, in sixteen elements
    HEADS: tl.constexpr,
    KV_HEADS: tl.constexpr,
    DIM: tl.constexpr,
    PAGE_SIZE: tl.constexpr,
    LANDMARK_HEADS: tl.constexpr,
    WIDTH: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    SPLIT: tl.constexpr,
    HIDE_LAST: tl.constexpr,
    BY_LSE: tl.constexpr,
    NULL_SPLIT: tl.constexpr,
    STAGED: tl.constexpr,
    UNION: tl.constexpr,
    ROWS: tl.constexpr,  # of a block
    GROUP_PAD: tl.constexpr,  # power of two, at least the heads of a group
    LANDMARK_PAD: tl.constexpr,  # landmarks of a kv head, padded to what a product takes
    BLOCK_M: tl.constexpr,  # ROWS * GROUP_PAD, or what a product takes at least
):
    kv_head = tl.program_id(0)
    block = tl.program_id(1)
    seq = tl.load(block_seq + block)
    begin = tl.load(block_begin + block)
    first_row = tl.load(cu_query + seq).to(tl.int32)
    rows = tl.load(cu_query + seq + 1).to(tl.int32) - first_row - begin
    GROUP: tl.constexpr = HEADS // KV_HEADS
    SHARED: tl.constexpr = HEADS // LANDMARK_HEADS
    offs_m = tl.arange(0, BLOCK_M)
    offs_d = tl.arange(0, DIM)
    offs_w = tl.arange(0, WIDTH)
    offs_n = tl.arange(0, PAGE_SIZE)
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
    if not BY_LSE:
        scores_with = load_scoring(
            scoring, (row * scoring_stride)[:, None], head[:, None], real[:, None], WIDTH, SPLIT
        )
    # The window and the null split are there from the start.
    most = tl.load(window_lse + row * HEADS + head, mask=real, other=0.0)
    acc = tl.load(
        window_out + (row * HEADS + head)[:, None] * DIM + offs_d[None, :],
        mask=real[:, None],
        other=0.0,
    ).to(tl.float32)
    total = tl.full((BLOCK_M,), 1.0, tl.float32)
    if NULL_SPLIT:
        new_most = tl.maximum(most, 0.0)
        share = tl.exp(most - new_most)
        total = share + tl.exp(-new_most)
        acc = acc * share[:, None]
        most = new_most
    base = (block * KV_HEADS + kv_head).to(tl.int64) * UNION
    for i in range(0, tl.load(counts + block * KV_HEADS + kv_head)):
        page = tl.load(pages + base + i).to(tl.int64)
        bits = tl.load(readers + base + i)
        if STAGED:
            at = tl.load(kv_pages + base + i).to(tl.int64)
            staged = at < 0
            at = tl.where(staged, -1 - at, at)
            shift = tl.where(staged, stage_shift.to(tl.int64), 0) * 16
            inside = pool + shift + (at * (2 * KV_HEADS) + kv_head) * (PAGE_SIZE * DIM)
        else:
            inside = pool + (page * (2 * KV_HEADS) + kv_head) * (PAGE_SIZE * DIM)
        k = tl.load(inside + offs_n[None, :] * DIM + offs_d[:, None])
        v = tl.load(inside + (KV_HEADS * PAGE_SIZE * DIM) + offs_n[:, None] * DIM + offs_d[None, :])
        logits = tl.dot(q, k, input_precision="ieee") * scale
        if HIDE_LAST:
            logits = tl.where((offs_n < PAGE_SIZE - 1)[None, :], logits, float("-inf"))
        inside_most = tl.max(logits, 1)
        shares = tl.exp(logits - inside_most[:, None])
        inside_total = tl.sum(shares, 1)
        if BY_LSE:
            mass = inside_most + tl.log(inside_total)
        else:
            # Every row against all landmarks of the kv head; each takes that of its own head.
            landmark = tl.load(
                vectors
                + (page * LANDMARK_HEADS + kv_head * OF_KV + offs_l)[None, :] * WIDTH
                + offs_w[:, None],
                mask=(offs_l < OF_KV)[None, :],
                other=0.0,
            )  # [WIDTH, LANDMARK_PAD]
            every = tl.dot(scores_with, landmark, input_precision="ieee") * scale
            if HAS_BIAS:
                every += tl.load(
                    bias + page * LANDMARK_HEADS + kv_head * OF_KV + offs_l,
                    mask=offs_l < OF_KV,
                    other=0.0,
                )[None, :]
            mass = tl.sum(tl.where((group // SHARED)[:, None] == offs_l[None, :], every, 0.0), 1)
        reads = ((bits >> own_row) & 1) > 0
        mass = tl.where(reads & real, mass, float("-inf"))
        new_most = tl.maximum(most, mass)
        fade = tl.exp(most - new_most)
        weight = tl.exp(mass - new_most)
        shares = shares * (weight / inside_total)[:, None]
        acc = tl.dot(shares.to(v.dtype), v, acc * fade[:, None], input_precision="ieee")
        total = total * fade + weight
        most = new_most
    result = acc / total[:, None]
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
    blocks: ExtendBlocks,  # of union_rows(shape) rows
    window_out: torch.Tensor,  # [rows, heads, dim]
    window_lse: torch.Tensor,  # [rows, heads] float32
    out: torch.Tensor,  # [rows, heads, dim]; may be window_out
    *,
    stage: torch.Tensor | None = None,  # pages beside the pool, of its shape and type
    fill_stage: Callable[[torch.Tensor, torch.Tensor], torch.Tensor] | None = None,
) -> torch.Tensor:
    """Attention over window and pages into `out`; returns how many pages each block and kv head
    read, [blocks, kv_heads]."""
    heads, dim = query.shape[1:]
    group_pad = triton.next_power_of_2(heads // shape.kv_heads)
    block_k = triton.next_power_of_2(shape.topk)
    size = (len(blocks.seq), shape.kv_heads)
    union = blocks.block_m * block_k
    pages = torch.empty(*size, union, dtype=torch.int32, device=query.device)
    readers = torch.empty_like(pages)
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
        KV_HEADS=shape.kv_heads,
        TOPK=shape.topk,
        BLOCK_K=block_k,
        BLOCK_M=blocks.block_m,
        num_warps=4,
    )
    kv_pages, shift = pages, 0
    if stage is not None and fill_stage is not None:
        kv_pages = fill_stage(pages, counts)
        shift, rest = divmod(stage.data_ptr() - pool.data_ptr(), 16 * pool.element_size())
        assert rest == 0, "tensors lie on whole cache lines"
    _attend_kernel[grid](
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
        out,
        shape.scale,
        query.stride(0),
        scoring.stride(0),
        shift,
        HEADS=heads,
        KV_HEADS=shape.kv_heads,
        DIM=dim,
        PAGE_SIZE=shape.page_size,
        LANDMARK_HEADS=vectors.shape[1],
        WIDTH=shape.landmark_width,
        HAS_BIAS=bias is not None,
        SPLIT=shape.split_query,
        HIDE_LAST=shape.hide_last,
        BY_LSE=shape.by_lse,
        NULL_SPLIT=shape.null_split,
        STAGED=stage is not None,
        UNION=union,
        ROWS=blocks.block_m,
        GROUP_PAD=group_pad,
        LANDMARK_PAD=max(16, triton.next_power_of_2(vectors.shape[1] // shape.kv_heads)),
        BLOCK_M=max(16, blocks.block_m * group_pad),
        num_warps=4,
        num_stages=3 if query.dtype.itemsize == 2 and dim <= 64 else 2,
    )
    return counts
