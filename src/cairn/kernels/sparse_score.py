"""First launch of a sparse decode layer: landmark scores, the window, the completed page.

These tasks do not depend on each other, so they are one kernel, and each program does one task.
"""

from __future__ import annotations

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from cairn.kernels.fp8_tiles import (
    as_tile,
    fit_query,
    has_scales,
    load_scales,
    reads_pairs,
    slice_size,
    unpack_pairs,
)
from cairn.kernels.landmark import pool_page
from cairn.kernels.launch import direct
from cairn.kernels.softmax import LOG2E, softmax_result, softmax_weights
from cairn.kernels.sparse_shape import candidate_limit, half_width, load_landmarks, load_scoring


@triton.jit
def _product(q, landmark, SHARED: tl.constexpr):
    if SHARED == 1:
        product = tl.sum(q.to(tl.float32) * landmark.to(tl.float32), 1)[None, :]
    else:
        product = tl.dot(q, tl.trans(landmark), input_precision="ieee")
    return product


@triton.jit
def _score_pages(
    queries,  # [BLOCK_S, half_width], twice
    landmarks,  # [BLOCK_P, half_width], twice
    page,  # [BLOCK_P], -1 for none
    bias,  # of the landmark head
    scale,
    place,  # [BLOCK_S, BLOCK_P] pointers to the scores
    there,  # [BLOCK_S, BLOCK_P] which of them exist
    most,  # [BLOCK_S]
    total,  # [BLOCK_S]
    LANDMARK_HEADS: tl.constexpr,
    SHARED: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    REACH: tl.constexpr,
):
    """Store the scores of pages, and add them to the log-sum-exp in most and total."""
    product = _product(queries[0], landmarks[0], SHARED) * scale
    if REACH > 0:
        product += REACH * tl.sqrt(_product(queries[1], landmarks[1], SHARED))
    if HAS_BIAS:
        product += tl.load(bias + page * LANDMARK_HEADS, mask=page >= 0, other=0.0)[None, :]
    product = tl.where((page >= 0)[None, :], product, float("-inf"))
    tl.store(place, product, mask=there)
    new_most = tl.maximum(most, tl.max(product, 1))
    safe = tl.where(new_most == float("-inf"), 0.0, new_most)
    total = total * tl.exp(most - safe) + tl.sum(tl.exp(product - safe[:, None]), 1)
    return new_most, total


@direct
@triton.jit(do_not_specialize=["table_stride", "strips"])
def score_kernel(
    query,  # [rows, HEADS, DIM]
    scoring,  # [rows, HEADS, WIDTH], mapped by the policy
    prior,  # [rows, HEADS, DIM], queries for landmarks
    pool,  # [pages, 2 * KV_HEADS, PAGE_SIZE, DIM]
    vectors,  # [pages, LANDMARK_HEADS, WIDTH]
    bias,  # [pages, LANDMARK_HEADS]
    page_table,  # page ids, which index landmarks
    kv_table,  # the same pages in the pool
    kv_lens,
    rows,  # [seqs] query row of each sequence, negative for none
    candidates,
    scores,
    score_lse,
    partial,
    partial_lse,
    scale,
    query_stride,
    scoring_stride,
    prior_stride,
    table_stride: tl.int32,
    candidate_stride,
    strips: tl.int32,  # programs that share the candidates of a sequence and landmark head
    HEADS: tl.constexpr,
    KV_HEADS: tl.constexpr,
    DIM: tl.constexpr,
    PAGE_SIZE: tl.constexpr,
    LANDMARK_HEADS: tl.constexpr,
    WIDTH: tl.constexpr,
    WINDOW: tl.constexpr,
    HIDE_LAST: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    SPLIT: tl.constexpr,
    REACH: tl.constexpr,
    TILE_PAGES: tl.constexpr,
    POOLING: tl.constexpr,  # -1 if landmarks are made elsewhere
    MOST_STRIPS: tl.constexpr,
    WINDOW_PARTS: tl.constexpr,
    PARTS: tl.constexpr,
    BLOCK_P: tl.constexpr,
    WINDOW_STAGES: tl.constexpr,  # of the loop over the window
    PDL: tl.constexpr,
):
    if PDL:
        gdc_launch_dependents()
    task = tl.program_id(0)
    seq = tl.program_id(1)
    GROUP: tl.constexpr = HEADS // KV_HEADS
    SHARED: tl.constexpr = HEADS // LANDMARK_HEADS  # queries that share a landmark
    BLOCK_S: tl.constexpr = 1 if SHARED == 1 else max(16, triton.next_power_of_2(SHARED))
    BLOCK_G: tl.constexpr = max(16, triton.next_power_of_2(GROUP))
    SLICE: tl.constexpr = slice_size(pool, PAGE_SIZE, DIM)
    PAIRS: tl.constexpr = reads_pairs(pool, query)
    # What no kernel of this layer writes is read before the wait, bypassing the L1 cache: the first
    # candidates and their landmarks, and the window's first page id. A page that this row completes
    # is no candidate.
    length = tl.load(kv_lens + seq, cache_modifier=".cg").to(tl.int32)
    row = tl.load(rows + seq, cache_modifier=".cg").to(tl.int64)
    limit = candidate_limit(length - 1, WINDOW, PAGE_SIZE)
    strip = task % strips
    own = task // strips  # landmark head
    of_window = task - strips * LANDMARK_HEADS
    part = of_window % WINDOW_PARTS
    pages = tl.cdiv(length, PAGE_SIZE)
    offs_w = tl.arange(0, half_width(WIDTH, REACH))
    table = candidates + seq.to(tl.int64) * candidate_stride
    first = strip * BLOCK_P + tl.arange(0, BLOCK_P)
    first_page = tl.load(
        table + first, mask=(first < limit) & (of_window < 0), other=-1, cache_modifier=".cg"
    ).to(tl.int64)
    first_landmarks = load_landmarks(
        vectors + (first_page * LANDMARK_HEADS + own)[:, None] * WIDTH + offs_w[None, :],
        (first_page >= 0)[:, None],
        WIDTH,
        REACH,
        True,
    )
    # The window is read in tiles of TILE_PAGES pages, which `nth` numbers for each row.
    nth = 0
    if TILE_PAGES > 1:
        nth = tl.arange(0, TILE_PAGES * PAGE_SIZE) // PAGE_SIZE
    ahead = limit + part * TILE_PAGES + nth
    following = tl.load(
        kv_table + seq * table_stride + ahead,
        mask=(of_window >= 0) & (ahead < pages),
        other=0,
        cache_modifier=".cg",
    )
    if PDL:
        gdc_wait()
    if row < 0:
        return
    if of_window < 0:
        offs_s = tl.arange(0, BLOCK_S)
        head = own * SHARED + offs_s
        in_group = (offs_s < SHARED)[:, None]
        queries = load_scoring(
            scoring, row * scoring_stride, head[:, None], in_group, scale, WIDTH, SPLIT, REACH
        )
        own_scores = scores + (seq.to(tl.int64) * HEADS + head)[:, None] * candidate_stride
        most = tl.full((BLOCK_S,), float("-inf"), tl.float32)
        total = tl.zeros((BLOCK_S,), tl.float32)
        most, total = _score_pages(
            queries, first_landmarks, first_page, bias + own, scale, own_scores + first[None, :],
            in_group & (first < limit)[None, :], most, total, LANDMARK_HEADS, SHARED, HAS_BIAS,
            REACH,
        )  # fmt: skip
        for start in range((strip + strips) * BLOCK_P, limit, strips * BLOCK_P):
            index = start + tl.arange(0, BLOCK_P)
            page = tl.load(table + index, mask=index < limit, other=-1).to(tl.int64)
            landmarks = load_landmarks(
                vectors + (page * LANDMARK_HEADS + own)[:, None] * WIDTH + offs_w[None, :],
                (page >= 0)[:, None],
                WIDTH,
                REACH,
            )  # [BLOCK_P, half_width], twice
            most, total = _score_pages(
                queries, landmarks, page, bias + own, scale, own_scores + index[None, :],
                in_group & (index < limit)[None, :], most, total, LANDMARK_HEADS, SHARED, HAS_BIAS,
                REACH,
            )  # fmt: skip
        lse = tl.where(total > 0, most + tl.log(total), float("-inf"))
        tl.store(score_lse + (seq * HEADS + head) * MOST_STRIPS + strip, lse, mask=offs_s < SHARED)
    elif of_window < WINDOW_PARTS * KV_HEADS:
        kv_head = of_window // WINDOW_PARTS
        offs_g = tl.arange(0, BLOCK_G)
        offs_d = tl.arange(0, DIM)
        offs_n = tl.arange(0, TILE_PAGES * PAGE_SIZE)
        in_group = offs_g < GROUP
        head = kv_head * GROUP + offs_g
        EACH: tl.constexpr = 2 if PAIRS else 1
        offs_p = tl.arange(0, DIM // EACH)
        own_query = query + row * query_stride + head[:, None] * DIM + EACH * offs_p[None, :]
        q = fit_query(tl.load(own_query, mask=in_group[:, None], other=0.0), pool)
        if PAIRS:
            odd_q = fit_query(tl.load(own_query + 1, mask=in_group[:, None], other=0.0), pool)
        most = tl.full((BLOCK_G,), float("-inf"), tl.float32)
        total = tl.zeros((BLOCK_G,), tl.float32)
        acc = tl.zeros((BLOCK_G, DIM // EACH), tl.float32)
        odd_acc = acc
        STEP: tl.constexpr = WINDOW_PARTS * TILE_PAGES
        begin = limit + part * TILE_PAGES
        for index in tl.range(begin, pages, STEP, num_stages=WINDOW_STAGES):
            page = following.to(tl.int64)
            after = index + STEP + nth
            following = tl.load(kv_table + seq * table_stride + after, mask=after < pages, other=0)
            keys = pool + (page * (2 * KV_HEADS) + kv_head) * SLICE
            values = keys + KV_HEADS * SLICE
            there = index * PAGE_SIZE + offs_n < length
            in_page = offs_n % PAGE_SIZE
            key_rows = as_tile(keys, PAIRS) + in_page * (DIM // EACH)
            value_rows = as_tile(values, PAIRS) + in_page * (DIM // EACH)
            k = tl.load(key_rows[None, :] + offs_p[:, None], mask=there[None, :], other=0.0)
            v = tl.load(value_rows[:, None] + offs_p[None, :], mask=there[:, None], other=0.0)
            if PAIRS:
                k, odd_k = unpack_pairs(k, pool)
                v, odd_v = unpack_pairs(v, pool)
            logits = tl.dot(q, k.to(q.dtype), input_precision="ieee")
            if PAIRS:
                logits = tl.dot(odd_q, odd_k, logits)
            logits *= scale * LOG2E
            value_scale = None
            if has_scales(pool):
                logits *= load_scales(keys, in_page, there, PAGE_SIZE, DIM)[None, :]
                value_scale = load_scales(values, in_page, there, PAGE_SIZE, DIM)
            if HIDE_LAST:
                there = there & (in_page < PAGE_SIZE - 1)
            logits = tl.where(there[None, :], logits, float("-inf"))
            weights, fade, most, total = softmax_weights(logits, most, total, False, value_scale)
            weights = weights.to(q.dtype)
            acc = tl.dot(weights, v.to(q.dtype), acc * fade[:, None], input_precision="ieee")
            if PAIRS:
                odd_acc = tl.dot(weights, odd_v, odd_acc * fade[:, None])
        if PAIRS:
            acc = tl.interleave(acc, odd_acc)
        place = (seq * PARTS + part).to(tl.int64) * HEADS + head
        out, lse = softmax_result(most, total, acc)
        tl.store(partial + place[:, None] * DIM + offs_d[None, :], out, mask=in_group[:, None])
        tl.store(partial_lse + place, lse, mask=in_group)
    elif POOLING >= 0:
        kv_head = of_window - WINDOW_PARTS * KV_HEADS
        if length % PAGE_SIZE == 0:
            last = seq * table_stride + length // PAGE_SIZE - 1
            page = tl.load(page_table + last).to(tl.int64)
            kv_page = tl.load(kv_table + last).to(tl.int64)
            pool_page(
                pool + (kv_page * (2 * KV_HEADS) + kv_head) * SLICE,
                prior + row * prior_stride,
                vectors + page * (LANDMARK_HEADS * WIDTH),
                bias + page * LANDMARK_HEADS,
                kv_head,
                scale,
                GROUP,
                DIM,
                PAGE_SIZE,
                POOLING,
            )
