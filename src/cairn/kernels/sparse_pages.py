"""The later launches of a sparse decode layer: choosing the best pages, attention, the merge."""

from __future__ import annotations

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from cairn.kernels.fp8_tiles import (
    as_tile,
    fit_query,
    has_scales,
    inverse_of,
    load_scales,
    log2_of,
    reads_pairs,
    slice_size,
    unpack_pairs,
)
from cairn.kernels.launch import direct
from cairn.kernels.paged_decode import merge_splits
from cairn.kernels.softmax import LN2
from cairn.kernels.sparse_shape import SOFTMAX_HEAD, SUM_GROUP, candidate_limit
from cairn.kernels.top_pages import keep_best

FEW_CANDIDATES = tl.constexpr(256)
"""Up to this many candidates are ranked without the work for a whole chunk."""


@direct
@triton.jit(do_not_specialize=["table_stride", "strips"])
def topk_kernel(
    kv_lens,
    page_table,
    scores,
    score_lse,
    partial_lse,
    best_rank,
    best_index,
    best_page,
    table_stride: tl.int32,
    candidate_stride,
    best_stride,
    strips: tl.int32,
    HEADS: tl.constexpr,
    KV_HEADS: tl.constexpr,
    PAGE_SIZE: tl.constexpr,
    WINDOW: tl.constexpr,
    SINKS: tl.constexpr,
    STRATEGY: tl.constexpr,
    TOPK: tl.constexpr,
    CHUNK: tl.constexpr,
    MOST_STRIPS: tl.constexpr,  # a power of two
    WINDOW_PARTS: tl.constexpr,
    PARTS: tl.constexpr,
    PDL: tl.constexpr,
):
    if PDL:
        gdc_launch_dependents()
    chunk = tl.program_id(0)
    kv_head = tl.program_id(1)
    seq = tl.program_id(2)
    length = tl.load(kv_lens + seq, cache_modifier=".cg").to(tl.int32)
    if PDL:
        gdc_wait()
    limit = candidate_limit(length - 1, WINDOW, PAGE_SIZE)
    first = chunk * CHUNK
    if first >= limit:
        return
    pages = page_table + seq * table_stride
    base = (seq * KV_HEADS + kv_head).to(tl.int64) * best_stride + chunk * TOPK
    best = (best_rank + base, best_index + base, best_page + base)
    SMALL: tl.constexpr = min(CHUNK, FEW_CANDIDATES)
    if limit - first <= SMALL:
        _keep_chunk(
            pages, scores, score_lse, partial_lse, best, first, limit, seq, kv_head,
            candidate_stride, strips, HEADS, KV_HEADS, SINKS, STRATEGY, TOPK, SMALL, MOST_STRIPS,
            WINDOW_PARTS, PARTS,
        )  # fmt: skip
    else:
        _keep_chunk(
            pages, scores, score_lse, partial_lse, best, first, limit, seq, kv_head,
            candidate_stride, strips, HEADS, KV_HEADS, SINKS, STRATEGY, TOPK, CHUNK, MOST_STRIPS,
            WINDOW_PARTS, PARTS,
        )  # fmt: skip


@triton.jit
def _keep_chunk(
    page_table,  # of the sequence
    scores,
    score_lse,
    partial_lse,
    best,  # of the chunk: ranks, places in the sequence and pages
    first,
    limit,
    seq,
    kv_head,
    candidate_stride,
    strips,
    HEADS: tl.constexpr,
    KV_HEADS: tl.constexpr,
    SINKS: tl.constexpr,
    STRATEGY: tl.constexpr,
    TOPK: tl.constexpr,
    CHUNK: tl.constexpr,
    MOST_STRIPS: tl.constexpr,
    WINDOW_PARTS: tl.constexpr,
    PARTS: tl.constexpr,
):
    """Write the best TOPK of up to CHUNK candidates, from `first` on."""
    GROUP: tl.constexpr = HEADS // KV_HEADS
    index = first + tl.arange(0, CHUNK)
    there = index < limit
    page = tl.load(page_table + index, mask=there, other=0)
    rank = tl.full((CHUNK,), 0.0 if STRATEGY == SUM_GROUP else float("-inf"), tl.float32)
    for g in range(GROUP):
        head = seq * HEADS + kv_head * GROUP + g
        score = tl.load(
            scores + head.to(tl.int64) * candidate_stride + index, mask=there, other=float("-inf")
        )
        if (STRATEGY == SOFTMAX_HEAD) and (GROUP > 1):
            # Rank by the page's share of the head's total attention, which includes the window.
            own = tl.arange(0, MOST_STRIPS)
            strip = tl.load(
                score_lse + head * MOST_STRIPS + own, mask=own < strips, other=float("-inf")
            )
            part = tl.arange(0, triton.next_power_of_2(WINDOW_PARTS))
            window = tl.load(
                partial_lse + (seq * PARTS + part) * HEADS + kv_head * GROUP + g,
                mask=part < WINDOW_PARTS,
                other=float("-inf"),
            )
            most = tl.maximum(tl.max(strip), tl.max(window))
            total = tl.sum(tl.exp(strip - most)) + tl.sum(tl.exp(window - most))
            score -= most + tl.log(total)
        if STRATEGY == SUM_GROUP:
            rank += score
        else:
            rank = tl.maximum(rank, score)
    rank = tl.where(there, rank, float("-inf"))
    if SINKS > 0:
        rank = tl.where((index < SINKS) & (rank > float("-inf")), float("inf"), rank)
    keep = keep_best(rank, TOPK)
    place = tl.cumsum(keep.to(tl.int32), 0) - 1
    best_rank, best_index, best_page = best
    tl.store(best_rank + place, rank, mask=keep)
    tl.store(best_index + place, index, mask=keep)
    tl.store(best_page + place, page, mask=keep)
    BLOCK_K: tl.constexpr = triton.next_power_of_2(TOPK)
    slot = tl.arange(0, BLOCK_K)
    empty = (slot >= tl.sum(keep.to(tl.int32))) & (slot < TOPK)
    tl.store(best_rank + slot, tl.full((BLOCK_K,), float("-inf"), tl.float32), mask=empty)
    tl.store(best_index + slot, tl.full((BLOCK_K,), -1, tl.int32), mask=empty)


@triton.jit
def _choose(
    best_rank,
    best_index,
    chosen,
    limit,
    store,
    TOPK: tl.constexpr,
    CHUNK: tl.constexpr,
    BEST: tl.constexpr,
):
    """Choose the best TOPK of the pages that the chunks kept.

    Returns each kept page's position among the chosen or -1, its place in the sequence or -1, and
    the number of chosen pages. Writes their places in the sequence to `chosen` if `store`.
    """
    chunks = tl.cdiv(limit, CHUNK)
    slot = tl.arange(0, BEST)
    in_chunks = slot < chunks * TOPK
    kept_index = tl.load(best_index + slot, mask=in_chunks, other=-1)
    count = tl.sum((kept_index >= 0).to(tl.int32))
    place = slot
    if chunks > 1:
        rank = tl.load(best_rank + slot, mask=in_chunks, other=float("-inf"))
        keep = keep_best(rank, TOPK)
        count = tl.sum(keep.to(tl.int32))
        place = tl.where(keep, tl.cumsum(keep.to(tl.int32), 0) - 1, -1)
    if store:
        tl.store(chosen + place, kept_index, mask=(place >= 0) & (place < TOPK))
        empty = tl.arange(0, triton.next_power_of_2(TOPK))
        tl.store(
            chosen + empty,
            tl.full(empty.shape, -1, tl.int32),
            mask=(empty >= count) & (empty < TOPK),
        )
    return place, kept_index, count


@direct
@triton.jit
def choose_kernel(
    kv_lens,
    best_rank,
    best_index,
    best_page,
    selected,
    chosen_page,  # [seqs, KV_HEADS, TOPK] written, unset where there is none
    best_stride,
    KV_HEADS: tl.constexpr,
    PAGE_SIZE: tl.constexpr,
    WINDOW: tl.constexpr,
    TOPK: tl.constexpr,
    CHUNK: tl.constexpr,
    BEST: tl.constexpr,
    PDL: tl.constexpr,
):
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    kv_head = tl.program_id(0)
    seq = tl.program_id(1)
    length = tl.load(kv_lens + seq).to(tl.int32)
    limit = candidate_limit(length - 1, WINDOW, PAGE_SIZE)
    base = (seq * KV_HEADS + kv_head).to(tl.int64) * best_stride
    chosen = selected + (seq * KV_HEADS + kv_head) * TOPK
    place, kept_index, _ = _choose(
        best_rank + base, best_index + base, chosen, limit, True, TOPK, CHUNK, BEST
    )
    there = (place >= 0) & (place < TOPK) & (kept_index >= 0)
    page = tl.load(best_page + base + tl.arange(0, BEST), mask=there, other=0)
    tl.store(chosen_page + (seq * KV_HEADS + kv_head) * TOPK + place, page, mask=there)


@triton.jit
def _read_pages(
    queries,  # [BLOCK_G, DIM]; if PAIRS, even and odd columns
    pool,  # at the kv head's keys of page 0
    page,  # if TILE_PAGES > 1: of each row of the tile
    there,  # likewise; if false, the page is skipped
    score,  # [BLOCK_G] pointers to the heads' scores of the page, if there is one
    in_group,
    scale,
    most,
    total,
    accs,  # like `queries`
    KV_HEADS: tl.constexpr,
    DIM: tl.constexpr,
    PAGE_SIZE: tl.constexpr,
    HIDE_LAST: tl.constexpr,
    BY_LSE: tl.constexpr,
    PAIRS: tl.constexpr,
    TILE_PAGES: tl.constexpr,
):
    """Add a page to most, total and accs, weighted by its score or, if BY_LSE, log-sum-exp.
    Several pages are added as one, which is the same if BY_LSE."""
    tl.static_assert(BY_LSE or TILE_PAGES == 1)
    EACH: tl.constexpr = 2 if PAIRS else 1
    q, odd_q = queries
    acc, odd_acc = accs
    offs_d = tl.arange(0, DIM // EACH)
    offs_n = tl.arange(0, TILE_PAGES * PAGE_SIZE)
    in_page = offs_n % PAGE_SIZE
    SLICE: tl.constexpr = slice_size(pool, PAGE_SIZE, DIM)
    keys = pool + page * (2 * KV_HEADS * SLICE)
    values = keys + KV_HEADS * SLICE
    read = (offs_n >= 0) & there
    key_rows = as_tile(keys, PAIRS) + in_page * (DIM // EACH)
    value_rows = as_tile(values, PAIRS) + in_page * (DIM // EACH)
    k = tl.load(key_rows[None, :] + offs_d[:, None], mask=read[None, :], other=0.0)
    v = tl.load(value_rows[:, None] + offs_d[None, :], mask=read[:, None], other=0.0)
    if PAIRS:
        k, odd_k = unpack_pairs(k, pool)
        v, odd_v = unpack_pairs(v, pool)
    logits = tl.dot(q, k.to(q.dtype), input_precision="ieee")
    if PAIRS:
        logits = tl.dot(odd_q, odd_k, logits)
    logits *= scale
    if has_scales(pool):
        logits *= load_scales(keys, in_page, read, PAGE_SIZE, DIM)[None, :]
    if HIDE_LAST:
        logits = tl.where((in_page < PAGE_SIZE - 1)[None, :], logits, float("-inf"))
    # As in `softmax_weights`: shares include the scales of values.
    if has_scales(pool):
        value_scale = load_scales(values, in_page, read, PAGE_SIZE, DIM)
        logits += log2_of(value_scale)[None, :] * LN2
    if TILE_PAGES > 1:  # a tile may have no page that is there
        logits = tl.where(read[None, :], logits, -3.0e38)
    inside_most = tl.max(logits, 1)
    shares = tl.exp(logits - inside_most[:, None])
    if has_scales(pool):
        inside_total = tl.sum(shares * inverse_of(value_scale)[None, :], 1)
    else:
        inside_total = tl.sum(shares, 1)
    if BY_LSE:
        mass = inside_most + tl.log(inside_total)
    else:
        mass = tl.load(score, mask=in_group, other=0.0, cache_modifier=".cg")
    if TILE_PAGES > 1:
        there = tl.max(read.to(tl.int32)) > 0
    mass = tl.where(there, mass, float("-inf"))
    new_most = tl.maximum(most, mass)
    safe = tl.where(new_most == float("-inf"), 0.0, new_most)
    fade = tl.exp(most - safe)
    weight = tl.exp(mass - safe)
    acc = acc * fade[:, None]
    if has_scales(pool):  # the product of both weights may be too small for float16
        shares = shares.to(q.dtype)
        inside = tl.dot(shares, v.to(q.dtype), input_precision="ieee")
        acc += inside * (weight / inside_total)[:, None]
        if PAIRS:
            inside = tl.dot(shares, odd_v)
            odd_acc = odd_acc * fade[:, None] + inside * (weight / inside_total)[:, None]
    else:
        shares = shares * (weight / inside_total)[:, None]
        acc = tl.dot(shares.to(v.dtype), v, acc, input_precision="ieee")
    return new_most, total * fade + weight, (acc, odd_acc)


@direct
@triton.jit
def pages_kernel(
    query,
    pool,
    located,  # [seqs, KV_HEADS, TOPK] if CHOSEN: selected pages in the pool, negated if the
    #           previous launch is still bringing them in
    arrived,  # [KV_HEADS, slots] how many of a page's PIECES have arrived
    kv_lens,
    rows,
    scores,
    best_rank,
    best_index,
    best_page,
    selected,
    partial,
    partial_lse,
    arrivals,
    launches,
    reads,  # if COUNTED: the number of pages read is added
    out,  # [rows, HEADS, DIM]
    scale,
    query_stride,
    candidate_stride,
    best_stride,
    first_slot,  # the page of the pool that is slot 0
    slots,
    HEADS: tl.constexpr,
    KV_HEADS: tl.constexpr,
    DIM: tl.constexpr,
    PAGE_SIZE: tl.constexpr,
    WINDOW: tl.constexpr,
    HIDE_LAST: tl.constexpr,
    BY_LSE: tl.constexpr,
    NULL_SPLIT: tl.constexpr,
    CHOSEN: tl.constexpr,  # an earlier launch chose the pages, which are `located`
    LOCATED: tl.constexpr,  # the previous launch brings them in
    PIECES: tl.constexpr,
    COUNTED: tl.constexpr,
    TOPK: tl.constexpr,
    CHUNK: tl.constexpr,
    BEST: tl.constexpr,  # power of two, at least the pages that all chunks keep
    WINDOW_PARTS: tl.constexpr,
    PAGE_PARTS: tl.constexpr,
    PARTS: tl.constexpr,  # parts allocated per sequence
    TILE_PAGES: tl.constexpr,  # pages that are read at once; more than one only if CHOSEN
    PDL: tl.constexpr,
):
    if PDL:
        gdc_launch_dependents()
        # If LOCATED, the previous launch brings pages in. It lets this one start only after its own
        # wait, so everything before it is complete. Data that this layer's kernels wrote is read
        # bypassing the L1 cache, which may be stale until the wait. Pipelined loads of few bytes do
        # not bypass it; this is safe, because no kernel since the last layer has cached those
        # lines. Pages that are present were written in earlier steps.
    part = tl.program_id(0)
    kv_head = tl.program_id(1)
    seq = tl.program_id(2)
    GROUP: tl.constexpr = HEADS // KV_HEADS
    BLOCK_G: tl.constexpr = max(16, triton.next_power_of_2(GROUP))
    length = tl.load(kv_lens + seq, cache_modifier=".cg").to(tl.int32)
    row = tl.load(rows + seq, cache_modifier=".cg").to(tl.int64)
    if not LOCATED:
        if PDL:
            gdc_wait()
        if row < 0:
            return
    limit = candidate_limit(length - 1, WINDOW, PAGE_SIZE)
    base = (seq * KV_HEADS + kv_head).to(tl.int64) * best_stride
    chosen = selected + (seq * KV_HEADS + kv_head) * TOPK

    offs_g = tl.arange(0, BLOCK_G)
    offs_d = tl.arange(0, DIM)
    in_group = offs_g < GROUP
    head = kv_head * GROUP + offs_g
    PAIRS: tl.constexpr = reads_pairs(pool, query)
    EACH: tl.constexpr = 2 if PAIRS else 1
    own_query = query + row * query_stride + head[:, None] * DIM
    own_query += EACH * tl.arange(0, DIM // EACH)[None, :]
    q = tl.load(own_query, mask=in_group[:, None], other=0.0, cache_modifier=".cg")
    queries = (fit_query(q, pool), fit_query(q, pool))
    if PAIRS:
        odd = tl.load(own_query + 1, mask=in_group[:, None], other=0.0, cache_modifier=".cg")
        queries = (fit_query(q, pool), fit_query(odd, pool))
    most = tl.full((BLOCK_G,), float("-inf"), tl.float32)
    total = tl.zeros((BLOCK_G,), tl.float32)
    nothing = tl.zeros((BLOCK_G, DIM // EACH), tl.float32)
    accs = (nothing, nothing)

    if CHOSEN:
        slot = tl.arange(0, triton.next_power_of_2(TOPK))
        kept_index = tl.load(chosen + slot, mask=slot < TOPK, other=-1, cache_modifier=".cg")
        count = tl.sum((kept_index >= 0).to(tl.int32))
    else:
        # The chunks keep few pages, so every program repeats the choice.
        place, kept_index, count = _choose(
            best_rank + base, best_index + base, chosen, limit, part == 0, TOPK, CHUNK, BEST
        )
        kept_page = tl.load(best_page + base + tl.arange(0, BEST), mask=kept_index >= 0, other=0)

    if COUNTED:
        tl.atomic_add(reads, tl.where(part == 0, count, 0))

    own_scores = scores + (seq.to(tl.int64) * HEADS + head) * candidate_stride
    own_pool = pool + kv_head * slice_size(pool, PAGE_SIZE, DIM)
    if CHOSEN:
        # Read the pages that are present first. The loop masks out the others without a branch, so
        # that its loads can be pipelined.
        own_located = located + (seq * KV_HEADS + kv_head) * TOPK
        nth = 0
        if TILE_PAGES > 1:
            nth = tl.arange(0, TILE_PAGES * PAGE_SIZE) // PAGE_SIZE
        for tile in range(part, tl.cdiv(count, TILE_PAGES), PAGE_PARTS):
            wanted = tile * TILE_PAGES + nth
            index = tl.load(chosen + tile * TILE_PAGES, cache_modifier=".cg")
            page = tl.load(
                own_located + wanted, mask=wanted < count, other=-1, cache_modifier=".cg"
            ).to(tl.int64)
            most, total, accs = _read_pages(
                queries, own_pool, tl.abs(page), page >= 0, own_scores + index,
                in_group, scale, most, total, accs,
                KV_HEADS, DIM, PAGE_SIZE, HIDE_LAST, BY_LSE, PAIRS, TILE_PAGES,
            )  # fmt: skip
    if LOCATED:
        # Distribute the remaining pages anew; read each once all of its pieces have arrived.
        page = tl.load(own_located + slot, mask=slot < count, other=0, cache_modifier=".cg")
        late = page < 0
        turn = tl.cumsum(late.to(tl.int32), 0) - 1
        for wanted in range(part, tl.sum(late.to(tl.int32)), PAGE_PARTS):
            mine = late & (turn == wanted)
            index = tl.sum(tl.where(mine, kept_index, 0))
            coming = -tl.sum(tl.where(mine, page, 0))
            pieces = arrived + kv_head * slots + coming - first_slot
            seen = tl.atomic_add(pieces, 0, sem="acquire")
            while seen < PIECES:
                seen = tl.atomic_add(pieces, 0, sem="acquire")
            most, total, accs = _read_pages(
                queries, own_pool, coming.to(tl.int64), nth == 0, own_scores + index,
                in_group, scale, most, total, accs,
                KV_HEADS, DIM, PAGE_SIZE, HIDE_LAST, BY_LSE, PAIRS, TILE_PAGES,
            )  # fmt: skip
    if not CHOSEN:
        for wanted in range(part, count, PAGE_PARTS):
            index = tl.max(tl.where(place == wanted, kept_index, -1))
            page = tl.max(tl.where(place == wanted, kept_page, -1)).to(tl.int64)
            most, total, accs = _read_pages(
                queries, own_pool, page, True, own_scores + index, in_group, scale,
                most, total, accs, KV_HEADS, DIM, PAGE_SIZE, HIDE_LAST, BY_LSE, PAIRS, TILE_PAGES,
            )  # fmt: skip

    acc, odd_acc = accs
    if PAIRS:
        acc = tl.interleave(acc, odd_acc)
    if (part == 0) & (kv_head == 0) & (seq == 0):
        tl.store(launches, tl.load(launches, cache_modifier=".cg") + 1)
    own = (seq * PARTS + WINDOW_PARTS + part).to(tl.int64) * HEADS + head
    tl.store(
        partial + own[:, None] * DIM + offs_d[None, :],
        acc / tl.where(total > 0, total, 1.0)[:, None],
        mask=in_group[:, None],
    )
    lse = tl.where(total > 0, most + tl.log(total), float("-inf"))
    tl.store(partial_lse + own, lse, mask=in_group)
    tl.debug_barrier()  # the program's stores complete before it reports its arrival
    counter = arrivals + seq * KV_HEADS + kv_head
    if tl.atomic_add(counter, 1, sem="acq_rel") == PAGE_PARTS - 1:
        tl.store(counter, 0)
        parts, to = (partial, partial_lse), (out + row * (HEADS * DIM), partial_lse)
        SPLITS: tl.constexpr = WINDOW_PARTS + PAGE_PARTS
        merge_splits(
            parts, to, seq * PARTS, SPLITS, kv_head, HEADS, KV_HEADS, DIM, False, 1, NULL_SPLIT
        )
    if PDL and LOCATED:
        gdc_wait()  # so that the next kernel may rely on the copies, too
