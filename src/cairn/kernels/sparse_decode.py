"""Sparse attention of one query row per sequence, in three launches per layer.

    1. landmark scores of all candidate pages, attention in the window, and the landmark of the
       page that this row completes, if it does: nothing of this depends on anything else here
    2. the best k pages of every chunk of candidates
    3. of those the best k, attention inside them, and one merge: by the program that comes last

Where pages live in host memory, the third launch is cut in two, and what was selected is brought
in between them (see `swap_in`); unless all pages of a step are on the device, which its host knows.

Before the first layer `begin` notes which pages may be candidates. Programs share the work by
striding over pages, so that the cost follows the lengths that are there, also in a recorded graph.

    part:  a split (output, log-sum-exp) of the past; first the window's, then the pages'
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from cairn.kernels.interface import Pooling
from cairn.kernels.landmark import POOLINGS, pool_page
from cairn.kernels.paged_decode import merge_splits
from cairn.kernels.pdl import pdl_options
from cairn.kernels.softmax import LOG2E, softmax_result, softmax_step
from cairn.kernels.top_pages import keep_best

SUM_GROUP = tl.constexpr(1)
SOFTMAX_HEAD = tl.constexpr(2)
STRATEGIES = {"head": 0, "group": 1, "softmax_head": 2}

_CHUNK = 1024  # candidates that one program of the second launch chooses from


@dataclass(frozen=True, slots=True)
class SparseShape:
    """What all sparse layers of a model have in common."""

    heads: int
    kv_heads: int
    head_dim: int
    page_size: int
    landmark_heads: int
    landmark_width: int
    topk: int
    window: int
    scale: float
    strategy: str  # of STRATEGIES
    by_lse: bool
    """Pages weigh as much as their log-sum-exp, not as their landmark's score."""
    sinks: int
    null_split: bool
    hide_last: bool
    """The last row of a page is a landmark row."""
    dense_below: int
    split_query: bool = False
    """Scoring queries come as they are; kernels take their positive and their negative part."""

    @property
    def block_g(self) -> int:
        return max(16, int(triton.next_power_of_2(self.heads // self.kv_heads)))

    @property
    def window_parts(self) -> int:
        """Programs that share a window, of three pages each."""
        rows = max(self.window, self.dense_below) + self.page_size
        return max(1, min(16, -(-rows // (3 * self.page_size))))

    @property
    def page_parts(self) -> int:
        """Programs that share the selected pages, of two each."""
        return max(1, min(16, self.topk // 2))

    @property
    def parts(self) -> int:
        return self.window_parts + self.page_parts


@dataclass(frozen=True, slots=True)
class SparseScratch:
    """Memory that the launches of a layer hand on to each other; all layers use the same."""

    candidates: torch.Tensor  # [seqs, pages] int32 page id, -1 where it must not be read
    scores: torch.Tensor  # [seqs, heads, pages] float32
    score_lse: torch.Tensor  # [seqs, heads, strips] float32
    best_rank: torch.Tensor  # [seqs, kv_heads, chunks * topk] float32
    best_index: torch.Tensor  # [seqs, kv_heads, chunks * topk] int32, -1 for none
    selected: torch.Tensor  # [seqs, kv_heads, topk] int32 place in the sequence, -1 for none
    partial: torch.Tensor  # [seqs, parts, heads, dim] float32
    partial_lse: torch.Tensor  # [seqs, parts, heads] float32
    arrivals: torch.Tensor  # [seqs, kv_heads] int32
    launches: torch.Tensor  # [1] int64, layers that were attended to, counted by the device

    @classmethod
    def empty(
        cls, shape: SparseShape, max_seqs: int, max_pages: int, device: torch.device
    ) -> SparseScratch:
        def floats(*size: int) -> torch.Tensor:
            return torch.empty(size, dtype=torch.float32, device=device)

        def ints(*size: int) -> torch.Tensor:
            return torch.zeros(size, dtype=torch.int32, device=device)

        best = triton.cdiv(max_pages, _CHUNK) * shape.topk
        return cls(
            ints(max_seqs, max_pages),
            floats(max_seqs, shape.heads, max_pages),
            floats(max_seqs, shape.heads, _strips(shape, 1)),
            floats(max_seqs, shape.kv_heads, best),
            ints(max_seqs, shape.kv_heads, best),
            ints(max_seqs, shape.kv_heads, shape.topk),
            floats(max_seqs, shape.parts, shape.heads, shape.head_dim),
            floats(max_seqs, shape.parts, shape.heads),
            ints(max_seqs, shape.kv_heads),
            torch.zeros(1, dtype=torch.int64, device=device),
        )


@dataclass(frozen=True, slots=True)
class Homes:
    """Pages of host memory, where those of all sequences of a step are on the device too."""

    frame_of: torch.Tensor  # [page ids] int32, where each is in the pool
    table: torch.Tensor  # [seqs, pages] int32, the same by sequence; `begin` fills it in
    reads: torch.Tensor  # [1] int64, counts pages that were read


def _strips(shape: SparseShape, seqs: int) -> int:
    """Programs that share the candidates of one sequence and landmark head."""
    # Measured on an H200: two for every processor are best for one sequence, four for more.
    programs = max(1, min(64, (264 if seqs == 1 else 528) // (seqs * shape.landmark_heads)))
    return int(triton.next_power_of_2(programs))


@triton.jit
def candidate_limit(position, WINDOW: tl.constexpr, PAGE_SIZE: tl.constexpr, dense_until):
    """Pages before it are candidates of the query at `position`; its window starts there."""
    limit = tl.maximum(position - WINDOW + 1, 0) // PAGE_SIZE
    return tl.where(position < dense_until, 0, limit)


@triton.jit
def load_scoring(scoring, row_offset, head, mask, WIDTH: tl.constexpr, SPLIT: tl.constexpr):
    """[n, WIDTH] scoring queries; row_offset and head are [n, 1], or one for all rows"""
    OWN: tl.constexpr = WIDTH // 2 if SPLIT else WIDTH
    offs_w = tl.arange(0, WIDTH)[None, :]
    q = tl.load(scoring + row_offset + head * OWN + offs_w % OWN, mask=mask, other=0.0)
    if SPLIT:
        wide = q.to(tl.float32)
        part = tl.where(offs_w < OWN, tl.maximum(wide, 0.0), tl.minimum(wide, 0.0))
        q = part.to(q.dtype)
    return q


@triton.jit
def _begin_kernel(
    page_table,  # [seqs, ...]
    generations,  # [seqs, ...]
    sealed,  # [pages] generation that each page's landmark belongs to
    kv_lens,  # [seqs]
    candidates,
    frame_of,
    homes,  # [seqs, ...], filled in if AT_HOME
    table_stride,
    candidate_stride,
    homes_stride,
    seal,
    AT_HOME: tl.constexpr,
    PAGE_SIZE: tl.constexpr,
    BLOCK: tl.constexpr,
    PROGRAMS: tl.constexpr,
):
    seq = tl.program_id(1)
    length = tl.load(kv_lens + seq).to(tl.int32)
    complete = length // PAGE_SIZE
    for start in range(tl.program_id(0) * BLOCK, complete, PROGRAMS * BLOCK):
        index = start + tl.arange(0, BLOCK)
        there = index < complete
        page = tl.load(page_table + seq * table_stride + index, mask=there, other=0)
        generation = tl.load(generations + seq * table_stride + index, mask=there, other=0)
        own = tl.load(sealed + page, mask=there, other=-1)
        tl.store(
            candidates + seq * candidate_stride + index,
            tl.where(own == generation, page, -1),
            mask=there,
        )
        if AT_HOME:
            frame = tl.load(frame_of + page, mask=there, other=0)
            tl.store(homes + seq * homes_stride + index, frame, mask=there)
    if (seal > 0) & (tl.program_id(0) == 0) & (length % PAGE_SIZE == 0):
        last = seq * table_stride + complete - 1
        page = tl.load(page_table + last)
        # Rows that only pad a batch are on page 0, which has no landmark.
        tl.store(sealed + page, tl.load(generations + last), mask=page > 0)


def begin(
    scratch: SparseScratch,
    page_table: torch.Tensor,  # [seqs, pages] int32
    generations: torch.Tensor,  # [seqs, pages] int32, of the same stride
    sealed: torch.Tensor,  # [pages] int32
    kv_lens: torch.Tensor,  # [seqs] int32
    *,
    page_size: int,
    seal: bool,  # every sequence adds one row, and pages that it completes are sealed here
    homes: Homes | None = None,
) -> None:
    seqs = len(kv_lens)
    programs = 8 if seqs < 32 else 1
    table = scratch.candidates if homes is None else homes.table
    _begin_kernel[(programs, seqs)](
        page_table,
        generations,
        sealed,
        kv_lens,
        scratch.candidates,
        sealed if homes is None else homes.frame_of,
        table,
        page_table.stride(0),
        scratch.candidates.stride(0),
        table.stride(0),
        int(seal),
        AT_HOME=homes is not None,
        PAGE_SIZE=page_size,
        BLOCK=512,
        PROGRAMS=programs,
        num_warps=4,
    )


@triton.jit
def _score_kernel(
    query,  # [rows, HEADS, DIM]
    scoring,  # [rows, HEADS, WIDTH], mapped by the policy
    prior,  # [rows, HEADS, DIM], for landmarks
    pool,  # [pages, 2 * KV_HEADS, PAGE_SIZE, DIM]
    vectors,  # [pages, LANDMARK_HEADS, WIDTH]
    bias,  # [pages, LANDMARK_HEADS]
    page_table,  # page ids, of landmarks
    kv_table,  # pages of the pool
    kv_lens,
    rows,  # [seqs] row of each sequence's query
    candidates,
    scores,
    score_lse,
    partial,
    partial_lse,
    scale,
    query_stride,
    scoring_stride,
    prior_stride,
    table_stride,
    candidate_stride,
    HEADS: tl.constexpr,
    KV_HEADS: tl.constexpr,
    DIM: tl.constexpr,
    PAGE_SIZE: tl.constexpr,
    LANDMARK_HEADS: tl.constexpr,
    WIDTH: tl.constexpr,
    WINDOW: tl.constexpr,
    DENSE_BELOW: tl.constexpr,
    HIDE_LAST: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    SPLIT: tl.constexpr,
    POOLING: tl.constexpr,  # -1 where landmarks are made elsewhere
    STRIPS: tl.constexpr,
    WINDOW_PARTS: tl.constexpr,
    PARTS: tl.constexpr,
    BLOCK_P: tl.constexpr,
    BLOCK_G: tl.constexpr,
    BLOCK_S: tl.constexpr,  # queries that share a landmark, padded to what a product takes
    PDL: tl.constexpr,
):
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    task = tl.program_id(0)
    seq = tl.program_id(1)
    GROUP: tl.constexpr = HEADS // KV_HEADS
    SHARED: tl.constexpr = HEADS // LANDMARK_HEADS
    length = tl.load(kv_lens + seq).to(tl.int32)
    row = tl.load(rows + seq).to(tl.int64)
    limit = candidate_limit(length - 1, WINDOW, PAGE_SIZE, DENSE_BELOW)
    if task < STRIPS * LANDMARK_HEADS:
        strip = task % STRIPS
        own = task // STRIPS  # landmark head
        offs_w = tl.arange(0, WIDTH)
        offs_s = tl.arange(0, BLOCK_S)
        head = own * SHARED + offs_s
        in_group = (offs_s < SHARED)[:, None]
        q = load_scoring(scoring, row * scoring_stride, head[:, None], in_group, WIDTH, SPLIT)
        most = tl.full((BLOCK_S,), float("-inf"), tl.float32)
        total = tl.zeros((BLOCK_S,), tl.float32)
        table = candidates + seq.to(tl.int64) * candidate_stride
        for start in range(strip * BLOCK_P, limit, STRIPS * BLOCK_P):
            index = start + tl.arange(0, BLOCK_P)
            there = index < limit
            page = tl.load(table + index, mask=there, other=-1).to(tl.int64)
            landmark = tl.load(
                vectors + (page * LANDMARK_HEADS + own)[:, None] * WIDTH + offs_w[None, :],
                mask=(page >= 0)[:, None],
                other=0.0,
            )  # [BLOCK_P, WIDTH]
            if SHARED == 1:
                product = tl.sum(q.to(tl.float32) * landmark.to(tl.float32), 1)[None, :]
            else:
                product = tl.dot(q, tl.trans(landmark), input_precision="ieee")
            product = product * scale  # [BLOCK_S, BLOCK_P]
            if HAS_BIAS:
                more = tl.load(bias + page * LANDMARK_HEADS + own, mask=page >= 0, other=0.0)
                product += more[None, :]
            product = tl.where((page >= 0)[None, :], product, float("-inf"))
            place = (seq.to(tl.int64) * HEADS + head)[:, None] * candidate_stride + index[None, :]
            tl.store(scores + place, product, mask=(offs_s < SHARED)[:, None] & there[None, :])
            new_most = tl.maximum(most, tl.max(product, 1))
            safe = tl.where(new_most == float("-inf"), 0.0, new_most)
            total = total * tl.exp(most - safe) + tl.sum(tl.exp(product - safe[:, None]), 1)
            most = new_most
        lse = tl.where(total > 0, most + tl.log(total), float("-inf"))
        tl.store(score_lse + (seq * HEADS + head) * STRIPS + strip, lse, mask=offs_s < SHARED)
    elif task < STRIPS * LANDMARK_HEADS + WINDOW_PARTS * KV_HEADS:
        task -= STRIPS * LANDMARK_HEADS
        part = task % WINDOW_PARTS
        kv_head = task // WINDOW_PARTS
        offs_g = tl.arange(0, BLOCK_G)
        offs_d = tl.arange(0, DIM)
        offs_n = tl.arange(0, PAGE_SIZE)
        in_group = offs_g < GROUP
        head = kv_head * GROUP + offs_g
        q = tl.load(
            query + row * query_stride + head[:, None] * DIM + offs_d[None, :],
            mask=in_group[:, None],
            other=0.0,
        )
        most = tl.full((BLOCK_G,), float("-inf"), tl.float32)
        total = tl.zeros((BLOCK_G,), tl.float32)
        acc = tl.zeros((BLOCK_G, DIM), tl.float32)
        for index in range(limit + part, tl.cdiv(length, PAGE_SIZE), WINDOW_PARTS):
            page = tl.load(kv_table + seq * table_stride + index).to(tl.int64)
            base = pool + (page * (2 * KV_HEADS) + kv_head) * (PAGE_SIZE * DIM)
            there = index * PAGE_SIZE + offs_n < length
            k = tl.load(
                base + offs_n[None, :] * DIM + offs_d[:, None], mask=there[None, :], other=0.0
            )
            v = tl.load(
                base + (KV_HEADS * PAGE_SIZE * DIM) + offs_n[:, None] * DIM + offs_d[None, :],
                mask=there[:, None],
                other=0.0,
            )
            logits = tl.dot(q, k, input_precision="ieee") * (scale * LOG2E)
            if HIDE_LAST:
                there = there & (offs_n < PAGE_SIZE - 1)
            logits = tl.where(there[None, :], logits, float("-inf"))
            most, total, acc = softmax_step(logits, v, most, total, acc, False)
        place = (seq * PARTS + part).to(tl.int64) * HEADS + head
        out, lse = softmax_result(most, total, acc)
        tl.store(partial + place[:, None] * DIM + offs_d[None, :], out, mask=in_group[:, None])
        tl.store(partial_lse + place, lse, mask=in_group)
    elif POOLING >= 0:
        kv_head = task - STRIPS * LANDMARK_HEADS - WINDOW_PARTS * KV_HEADS
        if length % PAGE_SIZE == 0:
            last = seq * table_stride + length // PAGE_SIZE - 1
            page = tl.load(page_table + last).to(tl.int64)
            kv_page = tl.load(kv_table + last).to(tl.int64)
            pool_page(
                pool + (kv_page * (2 * KV_HEADS) + kv_head) * (PAGE_SIZE * DIM),
                prior + row * prior_stride,
                vectors + page * (LANDMARK_HEADS * WIDTH),
                bias + page * LANDMARK_HEADS,
                kv_head,
                scale,
                GROUP,
                DIM,
                PAGE_SIZE,
                POOLING,
                BLOCK_G,
            )


@triton.jit
def _topk_kernel(
    kv_lens,
    scores,
    score_lse,
    partial_lse,
    best_rank,
    best_index,
    candidate_stride,
    best_stride,
    HEADS: tl.constexpr,
    KV_HEADS: tl.constexpr,
    PAGE_SIZE: tl.constexpr,
    WINDOW: tl.constexpr,
    DENSE_BELOW: tl.constexpr,
    SINKS: tl.constexpr,
    STRATEGY: tl.constexpr,
    TOPK: tl.constexpr,
    BLOCK_K: tl.constexpr,
    CHUNK: tl.constexpr,
    STRIPS: tl.constexpr,
    WINDOW_PARTS: tl.constexpr,
    BLOCK_PARTS: tl.constexpr,
    PARTS: tl.constexpr,
    PDL: tl.constexpr,
):
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    chunk = tl.program_id(0)
    kv_head = tl.program_id(1)
    seq = tl.program_id(2)
    length = tl.load(kv_lens + seq).to(tl.int32)
    limit = candidate_limit(length - 1, WINDOW, PAGE_SIZE, DENSE_BELOW)
    if chunk * CHUNK >= limit:
        return
    GROUP: tl.constexpr = HEADS // KV_HEADS
    index = chunk * CHUNK + tl.arange(0, CHUNK)
    there = index < limit
    rank = tl.full((CHUNK,), 0.0 if STRATEGY == SUM_GROUP else float("-inf"), tl.float32)
    for g in range(GROUP):
        head = seq * HEADS + kv_head * GROUP + g
        score = tl.load(
            scores + head.to(tl.int64) * candidate_stride + index, mask=there, other=float("-inf")
        )
        if (STRATEGY == SOFTMAX_HEAD) and (GROUP > 1):
            # A page's share of the head's whole attention: the window counts too.
            strip = tl.load(score_lse + head * STRIPS + tl.arange(0, STRIPS))
            part = tl.arange(0, BLOCK_PARTS)
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
    base = (seq * KV_HEADS + kv_head).to(tl.int64) * best_stride + chunk * TOPK
    tl.store(best_rank + base + place, rank, mask=keep)
    tl.store(best_index + base + place, index, mask=keep)
    slot = tl.arange(0, BLOCK_K)
    empty = (slot >= tl.sum(keep.to(tl.int32))) & (slot < TOPK)
    tl.store(best_rank + base + slot, tl.full((BLOCK_K,), float("-inf"), tl.float32), mask=empty)
    tl.store(best_index + base + slot, tl.full((BLOCK_K,), -1, tl.int32), mask=empty)


@triton.jit
def _choose(
    best_rank,
    best_index,
    chosen,
    limit,
    store,
    TOPK: tl.constexpr,
    BLOCK_K: tl.constexpr,
    CHUNK: tl.constexpr,
    BEST: tl.constexpr,
):
    """Of what the chunks kept the best: each one's number among them or -1, its place in the
    sequence, and how many there are. Kept in `chosen` if `store`."""
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
        empty = tl.arange(0, BLOCK_K)
        tl.store(
            chosen + empty,
            tl.full((BLOCK_K,), -1, tl.int32),
            mask=(empty >= count) & (empty < TOPK),
        )
    return place, kept_index, count


@triton.jit
def _choose_kernel(
    kv_lens,
    best_rank,
    best_index,
    selected,
    best_stride,
    KV_HEADS: tl.constexpr,
    PAGE_SIZE: tl.constexpr,
    WINDOW: tl.constexpr,
    DENSE_BELOW: tl.constexpr,
    TOPK: tl.constexpr,
    BLOCK_K: tl.constexpr,
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
    limit = candidate_limit(length - 1, WINDOW, PAGE_SIZE, DENSE_BELOW)
    base = (seq * KV_HEADS + kv_head).to(tl.int64) * best_stride
    chosen = selected + (seq * KV_HEADS + kv_head) * TOPK
    _choose(best_rank + base, best_index + base, chosen, limit, True, TOPK, BLOCK_K, CHUNK, BEST)


@triton.jit
def _pages_kernel(
    query,
    pool,
    page_table,
    located,  # [seqs, KV_HEADS, TOPK] where selected pages are in the pool, if LOCATED
    kv_lens,
    rows,
    scores,
    best_rank,
    best_index,
    selected,
    partial,
    partial_lse,
    arrivals,
    launches,
    reads,  # counts pages if COUNTED
    out,  # [rows, HEADS, DIM]
    scale,
    query_stride,
    table_stride,
    candidate_stride,
    best_stride,
    HEADS: tl.constexpr,
    KV_HEADS: tl.constexpr,
    DIM: tl.constexpr,
    PAGE_SIZE: tl.constexpr,
    WINDOW: tl.constexpr,
    DENSE_BELOW: tl.constexpr,
    HIDE_LAST: tl.constexpr,
    BY_LSE: tl.constexpr,
    NULL_SPLIT: tl.constexpr,
    LOCATED: tl.constexpr,  # pages have been chosen and brought in
    COUNTED: tl.constexpr,
    TOPK: tl.constexpr,
    BLOCK_K: tl.constexpr,
    CHUNK: tl.constexpr,
    BEST: tl.constexpr,  # power of two, at least what all chunks together keep
    WINDOW_PARTS: tl.constexpr,
    PAGE_PARTS: tl.constexpr,
    BLOCK_G: tl.constexpr,
    MERGE_G: tl.constexpr,
    PDL: tl.constexpr,
):
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    part = tl.program_id(0)
    kv_head = tl.program_id(1)
    seq = tl.program_id(2)
    if (part == 0) & (kv_head == 0) & (seq == 0):
        tl.store(launches, tl.load(launches) + 1)
    GROUP: tl.constexpr = HEADS // KV_HEADS
    PARTS: tl.constexpr = WINDOW_PARTS + PAGE_PARTS
    length = tl.load(kv_lens + seq).to(tl.int32)
    row = tl.load(rows + seq).to(tl.int64)
    limit = candidate_limit(length - 1, WINDOW, PAGE_SIZE, DENSE_BELOW)
    base = (seq * KV_HEADS + kv_head).to(tl.int64) * best_stride
    chosen = selected + (seq * KV_HEADS + kv_head) * TOPK

    offs_g = tl.arange(0, BLOCK_G)
    offs_d = tl.arange(0, DIM)
    offs_n = tl.arange(0, PAGE_SIZE)
    in_group = offs_g < GROUP
    head = kv_head * GROUP + offs_g
    q = tl.load(
        query + row * query_stride + head[:, None] * DIM + offs_d[None, :],
        mask=in_group[:, None],
        other=0.0,
    )
    most = tl.full((BLOCK_G,), float("-inf"), tl.float32)
    total = tl.zeros((BLOCK_G,), tl.float32)
    acc = tl.zeros((BLOCK_G, DIM), tl.float32)

    if LOCATED:
        slot = tl.arange(0, BLOCK_K)
        kept_index = tl.load(chosen + slot, mask=slot < TOPK, other=-1)
        place = slot
        count = tl.sum((kept_index >= 0).to(tl.int32))
    else:
        # What the chunks kept is short: every program chooses from it for itself.
        place, kept_index, count = _choose(
            best_rank + base,
            best_index + base,
            chosen,
            limit,
            part == 0,
            TOPK,
            BLOCK_K,
            CHUNK,
            BEST,
        )

    if COUNTED:
        tl.atomic_add(reads, tl.where(part == 0, count, 0))

    for wanted in range(part, count, PAGE_PARTS):
        index = tl.max(tl.where(place == wanted, kept_index, -1))
        if LOCATED:
            page = tl.load(located + (seq * KV_HEADS + kv_head) * TOPK + wanted).to(tl.int64)
        else:
            page = tl.load(page_table + seq * table_stride + index).to(tl.int64)
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
            mass = tl.load(
                scores + (seq.to(tl.int64) * HEADS + head) * candidate_stride + index,
                mask=in_group,
                other=0.0,
            )
        new_most = tl.maximum(most, mass)
        safe = tl.where(new_most == float("-inf"), 0.0, new_most)
        fade = tl.exp(most - safe)
        weight = tl.exp(mass - safe)
        shares = shares * (weight / inside_total)[:, None]
        acc = tl.dot(shares.to(v.dtype), v, acc * fade[:, None], input_precision="ieee")
        total = total * fade + weight
        most = new_most

    own = (seq * PARTS + WINDOW_PARTS + part).to(tl.int64) * HEADS + head
    tl.store(
        partial + own[:, None] * DIM + offs_d[None, :],
        acc / tl.where(total > 0, total, 1.0)[:, None],
        mask=in_group[:, None],
    )
    lse = tl.where(total > 0, most + tl.log(total), float("-inf"))
    tl.store(partial_lse + own, lse, mask=in_group)
    tl.debug_barrier()  # all of the program's stores come before its arrival
    counter = arrivals + seq * KV_HEADS + kv_head
    if tl.atomic_add(counter, 1, sem="acq_rel") == PAGE_PARTS - 1:
        tl.store(counter, 0)
        merge_splits(
            partial,
            partial_lse,
            out + row * (HEADS * DIM),
            partial_lse,
            seq * PARTS,
            PARTS,
            kv_head,
            HEADS,
            GROUP,
            DIM,
            DIM,
            1,
            NULL_SPLIT,
            False,
            MERGE_G,
        )


def sparse_decode(
    shape: SparseShape,
    scratch: SparseScratch,  # after `begin`
    query: torch.Tensor,  # [rows, heads, dim]
    scoring: torch.Tensor,  # [rows, heads, landmark width], or half of it where they are split
    prior: torch.Tensor,  # [rows, heads, dim]
    pool: torch.Tensor,  # [pages, 2 * kv_heads, page_size, dim]
    vectors: torch.Tensor,  # [pages, landmark heads, landmark width]
    bias: torch.Tensor | None,  # [pages, landmark heads] float32
    page_table: torch.Tensor,  # [seqs, pages] int32
    kv_lens: torch.Tensor,  # [seqs] int32
    rows: torch.Tensor,  # [seqs] int32
    out: torch.Tensor,  # [rows, heads, dim], contiguous
    *,
    pooling: Pooling | None,  # None where the caller saves landmarks of completed pages
    kv_table: torch.Tensor | None = None,  # of the same stride, where pages live in host memory
    locate: Callable[[torch.Tensor], torch.Tensor] | None = None,  # likewise: brings pages in
    homes: Homes | None = None,  # or all of them are there, as `begin` was told
) -> None:
    seqs = len(kv_lens)
    group = shape.heads // shape.kv_heads
    shared = shape.heads // shape.landmark_heads
    strips = _strips(shape, seqs)
    pooled = 0 if pooling is None else shape.kv_heads
    sizes = {"HEADS": shape.heads, "KV_HEADS": shape.kv_heads, "PAGE_SIZE": shape.page_size}
    sizes |= {"WINDOW": shape.window, "DENSE_BELOW": shape.dense_below}
    tasks = strips * shape.landmark_heads + shape.window_parts * shape.kv_heads + pooled
    half = query.dtype.itemsize == 2
    _score_kernel[(tasks, seqs)](
        query,
        scoring,
        prior,
        pool,
        vectors,
        vectors if bias is None else bias,
        page_table,
        page_table if kv_table is None else kv_table,
        kv_lens,
        rows,
        scratch.candidates,
        scratch.scores,
        scratch.score_lse,
        scratch.partial,
        scratch.partial_lse,
        shape.scale,
        query.stride(0),
        scoring.stride(0),
        prior.stride(0),
        page_table.stride(0),
        scratch.candidates.stride(0),
        **sizes,
        DIM=shape.head_dim,
        LANDMARK_HEADS=shape.landmark_heads,
        WIDTH=shape.landmark_width,
        HIDE_LAST=shape.hide_last,
        HAS_BIAS=bias is not None,
        SPLIT=shape.split_query,
        POOLING=-1 if pooling is None else POOLINGS[pooling],
        STRIPS=strips,
        WINDOW_PARTS=shape.window_parts,
        PARTS=shape.parts,
        BLOCK_P=max(16, min(64, 8192 // shape.landmark_width)),
        BLOCK_G=shape.block_g,
        BLOCK_S=1 if shared == 1 else max(16, triton.next_power_of_2(shared)),
        num_warps=4,
        num_stages=3 if half else 2,
        **pdl_options(query),
    )
    chunks = triton.cdiv(scratch.candidates.shape[1], _CHUNK)
    block_k = triton.next_power_of_2(shape.topk)
    best_stride = scratch.best_rank.stride(1)
    _topk_kernel[(chunks, shape.kv_heads, seqs)](
        kv_lens,
        scratch.scores,
        scratch.score_lse,
        scratch.partial_lse,
        scratch.best_rank,
        scratch.best_index,
        scratch.candidates.stride(0),
        best_stride,
        **sizes,
        SINKS=shape.sinks,
        STRATEGY=STRATEGIES[shape.strategy],
        TOPK=shape.topk,
        BLOCK_K=block_k,
        CHUNK=_CHUNK,
        STRIPS=strips,
        WINDOW_PARTS=shape.window_parts,
        BLOCK_PARTS=triton.next_power_of_2(shape.window_parts),
        PARTS=shape.parts,
        num_warps=4,
        **pdl_options(query),
    )
    best = triton.next_power_of_2(chunks * shape.topk)
    located = scratch.selected
    if locate is not None:
        _choose_kernel[(shape.kv_heads, seqs)](
            kv_lens,
            scratch.best_rank,
            scratch.best_index,
            scratch.selected,
            best_stride,
            KV_HEADS=shape.kv_heads,
            PAGE_SIZE=shape.page_size,
            WINDOW=shape.window,
            DENSE_BELOW=shape.dense_below,
            TOPK=shape.topk,
            BLOCK_K=block_k,
            CHUNK=_CHUNK,
            BEST=best,
            num_warps=4,
            **pdl_options(query),
        )
        located = locate(scratch.selected[:seqs])
    table = page_table if homes is None else homes.table
    _pages_kernel[(shape.page_parts, shape.kv_heads, seqs)](
        query,
        pool,
        table,
        located,
        kv_lens,
        rows,
        scratch.scores,
        scratch.best_rank,
        scratch.best_index,
        scratch.selected,
        scratch.partial,
        scratch.partial_lse,
        scratch.arrivals,
        scratch.launches,
        scratch.launches if homes is None else homes.reads,
        out,
        shape.scale,
        query.stride(0),
        table.stride(0),
        scratch.candidates.stride(0),
        best_stride,
        **sizes,
        DIM=shape.head_dim,
        HIDE_LAST=shape.hide_last,
        BY_LSE=shape.by_lse,
        NULL_SPLIT=shape.null_split,
        LOCATED=locate is not None,
        COUNTED=homes is not None,
        TOPK=shape.topk,
        BLOCK_K=block_k,
        CHUNK=_CHUNK,
        BEST=best,
        WINDOW_PARTS=shape.window_parts,
        PAGE_PARTS=shape.page_parts,
        BLOCK_G=shape.block_g,
        MERGE_G=triton.next_power_of_2(group),
        num_warps=4,
        num_stages=2,
        **pdl_options(query),
    )
