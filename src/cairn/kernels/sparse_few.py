"""Selects pages for rows that have few candidates, in one launch.

The scores of all candidates of a row fit in one tile, so no survey or collection pass is needed.
`sparse_select` makes these passes if there are more candidates.
"""

from __future__ import annotations

import triton
import triton.language as tl

from cairn.kernels.launch import direct
from cairn.kernels.softmax import LN2, LOG2E
from cairn.kernels.sparse_shape import (
    SUM_GROUP,
    half_width,
    load_landmarks,
    load_scoring,
    score_of,
)
from cairn.kernels.sparse_survey import rows_and_limits
from cairn.kernels.top_pages import order_key, threshold_of_rows

FEW_TILES = 64, 128
"""Candidates per row that a tile holds. Each size is compiled separately."""


@direct
@triton.jit
def few_kernel(
    scoring,  # [rows, HEADS, WIDTH]
    vectors,  # [pages, LANDMARK_HEADS, WIDTH]
    bias,  # [pages, LANDMARK_HEADS]
    pages,  # candidates of all sequences, -1 for pages that must not be read
    offsets,  # [seqs] first candidate of each sequence
    kv_lens,
    cu_query,
    dense_until,  # [seqs] rows at positions below it attend densely
    block_seq,
    block_begin,
    window_lse,  # [rows, HEADS] read if NORMALIZE
    normalizer,  # [rows, HEADS] written if NORMALIZE
    out,  # [rows, KV_HEADS, TOPK]
    scale,
    scoring_stride,
    HEADS: tl.constexpr,
    KV_HEADS: tl.constexpr,
    LANDMARK_HEADS: tl.constexpr,
    WIDTH: tl.constexpr,
    PAGE_SIZE: tl.constexpr,
    WINDOW: tl.constexpr,
    SPLIT: tl.constexpr,
    REACH: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    SINKS: tl.constexpr,
    STRATEGY: tl.constexpr,
    NORMALIZE: tl.constexpr,
    TOPK: tl.constexpr,
    BLOCK_M: tl.constexpr,
    TILE: tl.constexpr,  # at least the candidates of any row
):
    kv_head = tl.program_id(0)
    if tl.load(block_begin + tl.program_id(1)) < 0:
        return
    seq, row, in_rows, limit = rows_and_limits(
        block_seq, block_begin, kv_lens, cu_query, dense_until, WINDOW, PAGE_SIZE, BLOCK_M
    )
    HEADS_OF_KV: tl.constexpr = HEADS // KV_HEADS
    SHARED: tl.constexpr = HEADS // LANDMARK_HEADS
    index = tl.arange(0, TILE)
    offs_w = tl.arange(0, half_width(WIDTH, REACH))
    page = tl.load(pages + tl.load(offsets + seq) + index, mask=index < tl.max(limit), other=-1)
    page = page.to(tl.int64)
    there = (page >= 0)[None, :] & (index[None, :] < limit[:, None])
    NOTHING: tl.constexpr = 0.0 if STRATEGY == SUM_GROUP else float("-inf")
    rank = tl.full((BLOCK_M, TILE), NOTHING, tl.float32)
    for g in range(HEADS_OF_KV):
        head = kv_head * HEADS_OF_KV + g
        own = page * LANDMARK_HEADS + head // SHARED
        queries = load_scoring(
            scoring,
            row[:, None] * scoring_stride,
            head,
            in_rows[:, None],
            scale,
            WIDTH,
            SPLIT,
            REACH,
        )
        landmarks = load_landmarks(
            vectors + own[None, :] * WIDTH + offs_w[:, None], (page >= 0)[None, :], WIDTH, REACH
        )
        more = tl.zeros((TILE,), tl.float32)
        if HAS_BIAS:
            more = tl.load(bias + own, mask=page >= 0, other=0.0)
        score = score_of(queries, landmarks, scale, more[None, :], REACH)
        score = tl.where(there, score, float("-inf"))
        if NORMALIZE:
            most = tl.load(window_lse + row * HEADS + head, mask=in_rows, other=0.0)
            best = tl.maximum(most, tl.max(score, 1))
            total = tl.exp2((most - best) * LOG2E)
            total += tl.sum(tl.exp2((score - best[:, None]) * LOG2E), 1)
            lse = best + tl.log2(total) * LN2
            tl.store(normalizer + row * HEADS + head, lse, mask=in_rows)
            score -= lse[:, None]
        if STRATEGY == SUM_GROUP:
            rank += score
        else:
            rank = tl.maximum(rank, score)
    rank = tl.where(there, rank, float("-inf"))
    if SINKS > 0:
        rank = tl.where((index < SINKS)[None, :] & (rank > float("-inf")), float("inf"), rank)
    least = threshold_of_rows(rank, TOPK)
    valid = rank > float("-inf")
    key, bound = order_key(rank), order_key(least)[:, None]
    above = valid & (key > bound)
    equal = (valid & (key == bound)).to(tl.int32)
    room = TOPK - tl.sum(above.to(tl.int32), 1)
    # Ties go to the earlier page.
    take = above | ((equal > 0) & (tl.cumsum(equal, 1) <= room[:, None]))
    place = tl.cumsum(take.to(tl.int32), 1) - 1
    chosen = out + (row * KV_HEADS + kv_head)[:, None] * TOPK
    tl.store(chosen + place, tl.broadcast_to(index[None, :], (BLOCK_M, TILE)), mask=take)
    taken = tl.sum(take.to(tl.int32), 1)
    BLOCK_K: tl.constexpr = triton.next_power_of_2(TOPK)
    slot = tl.arange(0, BLOCK_K)[None, :]
    tl.store(
        chosen + slot,
        tl.full((BLOCK_M, BLOCK_K), -1, tl.int32),
        mask=in_rows[:, None] & (slot >= taken[:, None]) & (slot < TOPK),
    )
