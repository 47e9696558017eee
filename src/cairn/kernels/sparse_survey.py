"""First pass of page selection for prompts: lay out landmarks contiguously and survey them."""

from __future__ import annotations

import triton
import triton.language as tl

from cairn.kernels.launch import direct
from cairn.kernels.softmax import LN2, LOG2E
from cairn.kernels.sparse_shape import (
    candidate_limit,
    half_width,
    load_scoring,
    score_of,
    whole_16,
)


@direct
@triton.jit(do_not_specialize=["count", "room"])
def lay_out_kernel(
    vectors,  # [pages, LANDMARK_HEADS, WIDTH]
    bias,  # [pages, LANDMARK_HEADS]
    pages,  # [count]
    flat,  # [LANDMARK_HEADS * room, WIDTH] written
    flat_bias,  # [LANDMARK_HEADS, room] written, -inf for pages that must not be read
    count: tl.int32,
    room: tl.int32,
    LANDMARK_HEADS: tl.constexpr,
    WIDTH: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    head = tl.program_id(1).to(tl.int64)
    index = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    offs_w = tl.arange(0, WIDTH)
    page = tl.load(pages + index, mask=index < count, other=-1).to(tl.int64)
    there = page >= 0
    vector = tl.load(
        vectors + (page * LANDMARK_HEADS + head)[:, None] * WIDTH + offs_w[None, :],
        mask=there[:, None],
        other=0.0,
    )
    more = tl.where(there, 0.0, float("-inf"))
    if HAS_BIAS:
        more = tl.load(bias + page * LANDMARK_HEADS + head, mask=there, other=float("-inf"))
    place = head * room + index
    tl.store(flat + place[:, None] * WIDTH + offs_w[None, :], vector, mask=(index < room)[:, None])
    tl.store(flat_bias + place, more, mask=index < room)


@triton.jit
def rows_and_limits(
    block_seq,
    block_begin,
    kv_lens,
    cu_query,
    dense_until,
    WINDOW: tl.constexpr,
    PAGE_SIZE: tl.constexpr,
    BLOCK_M: tl.constexpr,
):
    """-> of this program's block: its sequence, its rows of the step, a mask of those that exist,
    and the number of candidates of each"""
    block = tl.program_id(1)
    seq = tl.load(block_seq + block)
    first_row = tl.load(cu_query + seq).to(tl.int32)
    query_len = tl.load(cu_query + seq + 1).to(tl.int32) - first_row
    past = tl.load(kv_lens + seq).to(tl.int32) - query_len
    new = tl.load(block_begin + block) + tl.arange(0, BLOCK_M)
    in_rows = new < query_len
    until = tl.load(dense_until + seq).to(tl.int32)
    limit = candidate_limit(past + new, WINDOW, PAGE_SIZE)
    limit = tl.where(in_rows & (past + new >= until), limit, 0)
    return seq, (first_row + new).to(tl.int64), in_rows, limit


@triton.jit
def scores_of_tile(
    queries,
    flat,
    flat_bias,
    first,
    scale,
    WIDTH: tl.constexpr,
    REACH: tl.constexpr,
    TILE: tl.constexpr,
    TMA: tl.constexpr,
):
    """-> scores [rows, TILE] of the landmarks from `first` on. All kernels that call this compute
    bit-identical sums."""
    place = first + tl.arange(0, TILE)
    HALF: tl.constexpr = half_width(WIDTH, REACH)
    if TMA:
        landmark = flat.load([first, 0]).T
        landmarks = (landmark, flat.load([first, HALF]).T if REACH > 0 else landmark)
    else:
        own = flat + place.to(tl.int64)[None, :] * WIDTH + tl.arange(0, HALF)[:, None]
        landmark = tl.load(own)
        landmarks = (landmark, tl.load(own + HALF) if REACH > 0 else landmark)
    more = tl.load(flat_bias + place)
    return score_of(queries, landmarks, scale, more[None, :], REACH)


@direct
@triton.jit(do_not_specialize=["room", "groups"])
def survey_kernel(
    scoring,  # [rows, HEADS, WIDTH]
    flat,  # [LANDMARK_HEADS * room, WIDTH], a descriptor if TMA
    flat_bias,
    offsets,
    kv_lens,
    cu_query,
    dense_until,  # [seqs] rows at positions below it attend densely
    block_seq,
    block_begin,
    window_lse,  # [rows, HEADS]
    normalizer,  # [rows, HEADS] written if NORMALIZE
    maxima,  # [rows, HEADS, groups] written
    limits,  # [rows] written: number of candidates of each row
    scale,
    scoring_stride,
    room: tl.int32,
    groups: tl.int32,  # a multiple of 16
    HEADS: tl.constexpr,
    LANDMARK_HEADS: tl.constexpr,
    WIDTH: tl.constexpr,
    PAGE_SIZE: tl.constexpr,
    WINDOW: tl.constexpr,
    SPLIT: tl.constexpr,
    REACH: tl.constexpr,
    NORMALIZE: tl.constexpr,
    GROUP_PAGES: tl.constexpr,
    BLOCK_M: tl.constexpr,
    TILE: tl.constexpr,
    TMA: tl.constexpr,
):
    head = tl.program_id(0)
    seq, row, in_rows, limit = rows_and_limits(
        block_seq, block_begin, kv_lens, cu_query, dense_until, WINDOW, PAGE_SIZE, BLOCK_M
    )
    if head == 0:
        tl.store(limits + row, limit, mask=in_rows)
    queries = load_scoring(
        scoring, row[:, None] * scoring_stride, head, in_rows[:, None], scale, WIDTH, SPLIT, REACH
    )
    most = tl.load(window_lse + row * HEADS + head, mask=in_rows, other=0.0)
    total = tl.full((BLOCK_M,), 1.0, tl.float32)
    first = head // (HEADS // LANDMARK_HEADS) * room + tl.load(offsets + seq)
    own = maxima + ((row * HEADS + head) * whole_16(groups))[:, None]
    GROUPS: tl.constexpr = TILE // GROUP_PAGES
    # Tiles whose pages are candidates of all rows need no mask.
    clear = tl.min(tl.where(in_rows, limit, 0x7FFFFFFF)) // TILE * TILE
    for masked in tl.static_range(2):
        begin, end = (clear, tl.max(limit)) if masked else (0, clear)
        for start in range(begin, end, TILE):
            score = scores_of_tile(
                queries, flat, flat_bias, first + start, scale, WIDTH, REACH, TILE, TMA
            )
            if masked:
                index = start + tl.arange(0, TILE)
                score = tl.where(index[None, :] < limit[:, None], score, float("-inf"))
            best = tl.max(tl.reshape(score, (BLOCK_M, GROUP_PAGES, GROUPS)), 1)
            group = start // GROUP_PAGES + tl.arange(0, GROUPS)
            tl.store(own + group[None, :], best, mask=in_rows[:, None])
            if NORMALIZE:
                new_most = tl.maximum(most, tl.max(best, 1))
                scaled = new_most * LOG2E
                total = total * tl.exp2(most * LOG2E - scaled)
                total += tl.sum(tl.exp2(score * LOG2E - scaled[:, None]), 1)
                most = new_most
    if NORMALIZE:
        lse = most + tl.log2(total) * LN2
        tl.store(normalizer + row * HEADS + head, lse, mask=in_rows)
