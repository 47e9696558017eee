"""Sparse attention of many new rows per sequence: selection, then attention page by page.

    1. the normalizer: every head's log-sum-exp over its window and all landmarks
    2. selection, streaming over landmarks: a row keeps what beats its k-th best page so far
    3. the union of the pages that neighbouring rows selected, with the rows that read each
    4. attention over that union, and the merge with the window

Rows are cut into blocks of one sequence each (`ExtendBlocks`); landmarks of the pages that these
rows complete are in place before. Nothing of rows x pages x heads is ever in memory.
"""

from __future__ import annotations

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
)
from cairn.kernels.top_pages import keep_best_of_rows

SELECT_ROWS = 64
"""Rows that one program selects pages for."""


def union_rows(shape: SparseShape) -> int:
    """Neighbouring rows that read the union of their pages together."""
    return max(1, min(16, 64 // (shape.heads // shape.kv_heads)))


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
    BLOCK_M: tl.constexpr,
    BLOCK_P: tl.constexpr,
):
    head = tl.program_id(0)
    block = tl.program_id(1)
    seq = tl.load(block_seq + block)
    begin = tl.load(block_begin + block)
    first_row = tl.load(cu_query + seq).to(tl.int32)
    query_len = tl.load(cu_query + seq + 1).to(tl.int32) - first_row
    past = tl.load(kv_lens + seq).to(tl.int32) - query_len
    own = head // (HEADS // LANDMARK_HEADS)
    offs_m = begin + tl.arange(0, BLOCK_M)
    offs_w = tl.arange(0, WIDTH)
    in_rows = offs_m < query_len
    row = (first_row + offs_m).to(tl.int64)
    until = tl.load(dense_until + seq).to(tl.int32)
    limit = tl.where(in_rows, candidate_limit(past + offs_m, WINDOW, PAGE_SIZE, until), 0)
    q = tl.load(
        scoring + row[:, None] * scoring_stride + head * WIDTH + offs_w[None, :],
        mask=in_rows[:, None],
        other=0.0,
    )
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
def _compact(
    rank_at,  # [BLOCK_M, CAPACITY] ranks kept so far, in the order of their pages
    index_at,
    count_at,  # [BLOCK_M] of them
    cutoff_at,  # [BLOCK_M]
    TOPK: tl.constexpr,
    BLOCK_M: tl.constexpr,
    CAPACITY: tl.constexpr,
    ROWS: tl.constexpr,  # that are in registers at once
):
    """Keep the best k of every row, still in the order of their pages; the least of them is what
    a page must beat from now on."""
    tl.debug_barrier()  # what other threads appended is there
    for first in range(0, BLOCK_M, ROWS):
        row = first + tl.arange(0, ROWS)
        count = tl.load(count_at + row)
        column = tl.arange(0, CAPACITY)[None, :]
        there = column < count[:, None]
        place = row[:, None] * CAPACITY
        rank = tl.load(rank_at + place + column, mask=there, other=float("-inf"))
        index = tl.load(index_at + place + column, mask=there, other=-1)
        keep = keep_best_of_rows(rank, TOPK)
        to = place + tl.cumsum(keep.to(tl.int32), 1) - 1
        least = tl.min(tl.where(keep, rank, float("inf")), 1)
        tl.debug_barrier()  # all is read before anything is overwritten
        tl.store(rank_at + to, rank, mask=keep)
        tl.store(index_at + to, index, mask=keep)
        tl.store(count_at + row, tl.minimum(count, TOPK))
        tl.store(cutoff_at + row, tl.where(count >= TOPK, least, float("-inf")))
    tl.debug_barrier()


@triton.jit
def _select_kernel(
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
    kept_rank,  # [programs, BLOCK_M, CAPACITY]
    kept_index,
    kept_count,  # [programs, BLOCK_M]
    kept_cutoff,
    out,  # [rows, KV_HEADS, TOPK]
    scale,
    scoring_stride,
    candidate_stride,
    HEADS: tl.constexpr,
    KV_HEADS: tl.constexpr,
    LANDMARK_HEADS: tl.constexpr,
    WIDTH: tl.constexpr,
    PAGE_SIZE: tl.constexpr,
    WINDOW: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    SINKS: tl.constexpr,
    STRATEGY: tl.constexpr,
    TOPK: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_P: tl.constexpr,
    CAPACITY: tl.constexpr,
    COMPACT_ROWS: tl.constexpr,
):
    kv_head = tl.program_id(0)
    block = tl.program_id(1)
    seq = tl.load(block_seq + block)
    begin = tl.load(block_begin + block)
    first_row = tl.load(cu_query + seq).to(tl.int32)
    query_len = tl.load(cu_query + seq + 1).to(tl.int32) - first_row
    past = tl.load(kv_lens + seq).to(tl.int32) - query_len
    GROUP: tl.constexpr = HEADS // KV_HEADS
    SHARED: tl.constexpr = HEADS // LANDMARK_HEADS
    offs_m = begin + tl.arange(0, BLOCK_M)
    offs_w = tl.arange(0, WIDTH)
    in_rows = offs_m < query_len
    row = (first_row + offs_m).to(tl.int64)
    until = tl.load(dense_until + seq).to(tl.int32)
    limit = tl.where(in_rows, candidate_limit(past + offs_m, WINDOW, PAGE_SIZE, until), 0)
    table = candidates + seq.to(tl.int64) * candidate_stride
    program = (block * KV_HEADS + kv_head).to(tl.int64)
    rank_at = kept_rank + program * (BLOCK_M * CAPACITY)
    index_at = kept_index + program * (BLOCK_M * CAPACITY)
    count_at = kept_count + program * BLOCK_M
    cutoff_at = kept_cutoff + program * BLOCK_M
    offs = tl.arange(0, BLOCK_M)
    mine = offs[:, None] * CAPACITY
    count = tl.zeros((BLOCK_M,), tl.int32)
    cutoff = tl.full((BLOCK_M,), float("-inf"), tl.float32)
    last = tl.max(limit)
    for start in range(0, last, BLOCK_P):
        index = start + tl.arange(0, BLOCK_P)
        page = tl.load(table + index, mask=index < last, other=-1).to(tl.int64)
        rank = tl.full(
            (BLOCK_M, BLOCK_P), 0.0 if STRATEGY == SUM_GROUP else float("-inf"), tl.float32
        )
        for g in range(GROUP):
            head = kv_head * GROUP + g
            own = head // SHARED
            q = tl.load(
                scoring + row[:, None] * scoring_stride + head * WIDTH + offs_w[None, :],
                mask=in_rows[:, None],
                other=0.0,
            )
            landmark = tl.load(
                vectors + (page * LANDMARK_HEADS + own)[None, :] * WIDTH + offs_w[:, None],
                mask=(page >= 0)[None, :],
                other=0.0,
            )
            score = tl.dot(q, landmark, input_precision="ieee") * scale
            if HAS_BIAS:
                more = tl.load(bias + page * LANDMARK_HEADS + own, mask=page >= 0, other=0.0)
                score += more[None, :]
            if (STRATEGY == SOFTMAX_HEAD) and (GROUP > 1):
                whole = tl.load(normalizer + row * HEADS + head, mask=in_rows, other=0.0)
                score -= whole[:, None]
            if STRATEGY == SUM_GROUP:
                rank += score
            else:
                rank = tl.maximum(rank, score)
        seen = (index[None, :] < limit[:, None]) & (page >= 0)[None, :]
        if SINKS > 0:
            rank = tl.where((index < SINKS)[None, :], float("inf"), rank)
        rank = tl.where(seen, rank, float("-inf"))
        # An equal rank further on loses to the earlier page.
        new = rank > cutoff[:, None]
        place = mine + count[:, None] + tl.cumsum(new.to(tl.int32), 1) - 1
        tl.store(rank_at + place, rank, mask=new)
        tl.store(index_at + place, index[None, :].broadcast_to(BLOCK_M, BLOCK_P), mask=new)
        count += tl.sum(new.to(tl.int32), 1)
        # The last time comes after the last page.
        if (tl.max(count) > CAPACITY - BLOCK_P) | (start + BLOCK_P >= last):
            tl.store(count_at + offs, count)
            _compact(
                rank_at,
                index_at,
                count_at,
                cutoff_at,
                TOPK,
                BLOCK_M,
                CAPACITY,
                COMPACT_ROWS,
            )
            count = tl.load(count_at + offs)
            cutoff = tl.load(cutoff_at + offs)
    slot = tl.arange(0, BLOCK_K)
    there = slot[None, :] < count[:, None]
    chosen = tl.load(index_at + mine + slot[None, :], mask=there, other=-1)
    tl.store(
        out + (row * KV_HEADS + kv_head)[:, None] * TOPK + slot[None, :],
        chosen,
        mask=in_rows[:, None] & (slot < TOPK)[None, :],
    )


def select_pages(
    shape: SparseShape,
    scoring: torch.Tensor,  # [rows, heads, width], mapped by the policy
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
    rows, heads, width = scoring.shape
    device = scoring.device
    sizes = {"HEADS": heads, "LANDMARK_HEADS": vectors.shape[1], "WIDTH": width}
    sizes |= {"PAGE_SIZE": shape.page_size, "WINDOW": shape.window, "HAS_BIAS": bias is not None}
    biases = vectors if bias is None else bias
    normalizer = window_lse
    block_p = 64 if width <= 128 else 32
    stages = 3 if scoring.dtype.itemsize == 2 else 1
    if shape.strategy == "softmax_head" and heads > shape.kv_heads:
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
            BLOCK_M=blocks.block_m,
            BLOCK_P=block_p,
            num_warps=4,
            num_stages=stages,
        )
    block_k = triton.next_power_of_2(shape.topk)
    capacity = 2 * max(block_k, block_p)
    programs = len(blocks.seq) * shape.kv_heads
    kept = torch.empty(2, programs, blocks.block_m, capacity, dtype=torch.int32, device=device)
    state = torch.empty(2, programs, blocks.block_m, dtype=torch.int32, device=device)
    out = torch.empty(rows, shape.kv_heads, shape.topk, dtype=torch.int32, device=device)
    _select_kernel[(shape.kv_heads, len(blocks.seq))](
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
        kept[0].view(torch.float32),
        kept[1],
        state[0],
        state[1].view(torch.float32),
        out,
        shape.scale,
        scoring.stride(0),
        candidates.stride(0),
        **sizes,
        KV_HEADS=shape.kv_heads,
        SINKS=shape.sinks,
        STRATEGY=STRATEGIES[shape.strategy],
        TOPK=shape.topk,
        BLOCK_K=block_k,
        BLOCK_M=blocks.block_m,
        BLOCK_P=block_p,
        CAPACITY=capacity,
        COMPACT_ROWS=16,
        num_warps=4,
        num_stages=2 if stages > 1 else 1,
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
    readers,
    counts,
    window_out,  # [rows, HEADS, DIM]
    window_lse,
    out,
    scale,
    query_stride,
    scoring_stride,
    HEADS: tl.constexpr,
    KV_HEADS: tl.constexpr,
    DIM: tl.constexpr,
    PAGE_SIZE: tl.constexpr,
    LANDMARK_HEADS: tl.constexpr,
    WIDTH: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    HIDE_LAST: tl.constexpr,
    BY_LSE: tl.constexpr,
    NULL_SPLIT: tl.constexpr,
    UNION: tl.constexpr,
    ROWS: tl.constexpr,  # of a block
    GROUP_PAD: tl.constexpr,  # power of two, at least the heads of a group
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
        scores_with = tl.load(
            scoring + (row * scoring_stride + head * WIDTH)[:, None] + offs_w[None, :],
            mask=real[:, None],
            other=0.0,
        ).to(tl.float32)
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
            place = page * LANDMARK_HEADS + head // SHARED
            landmark = tl.load(
                vectors + place[:, None] * WIDTH + offs_w[None, :], mask=real[:, None], other=0.0
            )
            mass = tl.sum(scores_with * landmark.to(tl.float32), 1) * scale
            if HAS_BIAS:
                mass += tl.load(bias + place, mask=real, other=0.0)
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
        readers,
        counts,
        window_out,
        window_lse,
        out,
        shape.scale,
        query.stride(0),
        scoring.stride(0),
        HEADS=heads,
        KV_HEADS=shape.kv_heads,
        DIM=dim,
        PAGE_SIZE=shape.page_size,
        LANDMARK_HEADS=vectors.shape[1],
        WIDTH=scoring.shape[2],
        HAS_BIAS=bias is not None,
        HIDE_LAST=shape.hide_last,
        BY_LSE=shape.by_lse,
        NULL_SPLIT=shape.null_split,
        UNION=union,
        ROWS=blocks.block_m,
        GROUP_PAD=group_pad,
        BLOCK_M=max(16, blocks.block_m * group_pad),
        num_warps=4,
        num_stages=3 if query.dtype.itemsize == 2 and dim <= 64 else 2,
    )
    return counts
