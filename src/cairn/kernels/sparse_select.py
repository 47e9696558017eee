"""Selects pages for many new rows per sequence, in two passes over the landmarks.

    1. lay out the landmarks of all candidates contiguously
    2. survey: compute every head's log-sum-exp over its window and all landmarks, and the best
       score of every group of pages
    3. find a threshold for each row, which its best k groups reach
    4. collect the pages that reach it, and choose the best k of them

The ranks of all pages are never stored. A row has at most a few hundred groups up to some million
tokens; beyond that it has one group per tile of pages.

Each group is represented by its best page. At least k pages therefore reach the threshold, and at
most k + k / 8 groups hold a better page. The pages of a group are spread out, because good pages
come in clusters. If rows have few candidates, `few_kernel` does all the steps in one launch.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from triton.tools.tensor_descriptor import TensorDescriptor

from cairn.kernels.launch import direct
from cairn.kernels.paged_extend import ExtendBlocks, can_describe
from cairn.kernels.sizes import blocks_of, power_of_two
from cairn.kernels.sparse_few import FEW_TILES, few_kernel
from cairn.kernels.sparse_shape import SUM_GROUP, SparseShape, load_scoring, whole_16
from cairn.kernels.sparse_survey import (
    lay_out_kernel,
    rows_and_limits,
    scores_of_tile,
    survey_kernel,
)
from cairn.kernels.top_pages import (
    MOST_FEW,
    entry_key,
    order_key,
    order_key_rank,
    threshold_in_memory,
    threshold_of_rows,
)
from cairn.kernels.workspace import Workspace

SELECT_ROWS = 64
"""Number of rows for which one program ranks pages."""

_TILE = 128  # pages that the survey reads at once
_COLLECT_TILE = 32  # pages that the collection reads at once; it holds more data per page
_GROUPS = 256  # most groups per row, if tiles are large enough
_GROUP_PAGES = (2, 8, 32, 128)  # few sizes, because each is compiled separately
_THRESHOLD_ROWS = 1  # rows per program of the threshold kernel
_CHOOSE_ROWS = 4  # rows per program of the choose kernel
_BLOCK = 32  # collected pages that the choose kernel reads at once
_FEW = 128  # most candidates per row for which `few_kernel` is used


@dataclass(frozen=True, slots=True)
class CandidatePages:
    """The complete pages of some sequences, concatenated."""

    pages: torch.Tensor  # [n] int32 page id, -1 if the page must not be read
    offsets: torch.Tensor  # [seqs] int32, first entry of each sequence; 0 for other sequences
    longest: int
    """Number of pages of the longest sequence."""


@direct
@triton.jit(do_not_specialize=["room", "groups", "capacity"])
def _rank_kernel(
    scoring,
    queries,  # if TMA: descriptor of scoring as [rows, HEADS * WIDTH]
    flat,
    flat_bias,
    offsets,
    kv_lens,
    cu_query,
    dense_until,
    block_seq,
    block_begin,
    normalizer,  # [rows, HEADS] read if NORMALIZE
    maxima,  # [rows, KV_HEADS, groups] written unless COLLECT
    limits,  # [rows] written unless COLLECT
    thresholds,  # [rows, KV_HEADS] read if COLLECT
    counts,  # [rows, KV_HEADS] written if COLLECT
    kept,  # [rows, KV_HEADS, capacity] written if COLLECT: rank bits << 32 | place of the page
    scale,
    scoring_stride,
    room: tl.int32,
    groups: tl.int32,  # a multiple of 16
    capacity: tl.int32,  # a multiple of 16
    HEADS: tl.constexpr,
    KV_HEADS: tl.constexpr,
    LANDMARK_HEADS: tl.constexpr,
    WIDTH: tl.constexpr,
    PAGE_SIZE: tl.constexpr,
    WINDOW: tl.constexpr,
    SPLIT: tl.constexpr,
    REACH: tl.constexpr,
    SINKS: tl.constexpr,
    STRATEGY: tl.constexpr,
    NORMALIZE: tl.constexpr,
    TOPK: tl.constexpr,
    COLLECT: tl.constexpr,
    GROUP_PAGES: tl.constexpr,
    BLOCK_M: tl.constexpr,
    TILE: tl.constexpr,
    TMA: tl.constexpr,
):
    """Rank pages over all heads of a kv head.

    If COLLECT, keep the pages that reach the threshold. Otherwise write the best rank of every
    group; this is for strategies where no single head decides the rank.
    """
    kv_head = tl.program_id(0)
    seq, row, in_rows, limit = rows_and_limits(
        block_seq, block_begin, kv_lens, cu_query, dense_until, WINDOW, PAGE_SIZE, BLOCK_M
    )
    HEADS_OF_KV: tl.constexpr = HEADS // KV_HEADS
    SHARED: tl.constexpr = HEADS // LANDMARK_HEADS
    own = row * KV_HEADS + kv_head
    first = tl.load(offsets + seq)
    first_row = tl.load(cu_query + seq) + tl.load(block_begin + tl.program_id(1))
    count = tl.zeros((BLOCK_M,), tl.int32)
    least = tl.zeros((BLOCK_M,), tl.float32)
    above = least
    if COLLECT:
        least = tl.load(thresholds + own, mask=in_rows, other=float("inf"))
        least = tl.maximum(least, -3.4028234663852886e38)  # a rank of -inf means no page
        above = order_key_rank(order_key(least) + 1)
    elif kv_head == 0:
        tl.store(limits + row, limit, mask=in_rows)
    NOTHING: tl.constexpr = 0.0 if STRATEGY == SUM_GROUP else float("-inf")
    rank = tl.full((BLOCK_M, TILE), NOTHING, tl.float32)
    # One loop over tiles and, within a tile, heads, so that loads are pipelined across tiles.
    for step in range(0, tl.cdiv(tl.max(limit), TILE) * HEADS_OF_KV):
        g = step % HEADS_OF_KV
        start = step // HEADS_OF_KV * TILE
        head = kv_head * HEADS_OF_KV + g
        if TMA and SPLIT == 0 and REACH == 0:
            q = queries.load([first_row, head * WIDTH])
            both = (q, q)
        else:
            both = load_scoring(
                scoring,
                row[:, None] * scoring_stride,
                head,
                in_rows[:, None],
                scale,
                WIDTH,
                SPLIT,
                REACH,
            )
        tile = head // SHARED * room + first + start
        score = scores_of_tile(both, flat, flat_bias, tile, scale, WIDTH, REACH, TILE, TMA)
        if NORMALIZE:
            whole = tl.load(normalizer + row * HEADS + head, mask=in_rows, other=0.0)
            score -= whole[:, None]
        if STRATEGY == SUM_GROUP:
            rank += score
        else:
            rank = tl.maximum(rank, score)
        if g == HEADS_OF_KV - 1:
            index = start + tl.arange(0, TILE)
            final = tl.where(index[None, :] < limit[:, None], rank, float("-inf"))
            if COLLECT:
                if SINKS > 0:
                    sink = (index < SINKS)[None, :] & (final > float("-inf"))
                    final = tl.where(sink, float("inf"), final)
                # Take all that reach the threshold; once there are k, only those that exceed it.
                take = final >= tl.where(count < TOPK, least, above)[:, None]
                place = count[:, None] + tl.cumsum(take.to(tl.int32), 1) - 1
                bits = final.to(tl.int32, bitcast=True).to(tl.int64)
                tl.store(
                    kept + own[:, None] * capacity + place, (bits << 32) | index[None, :], mask=take
                )
                count += tl.sum(take.to(tl.int32), 1)
            else:
                GROUPS: tl.constexpr = TILE // GROUP_PAGES
                best = tl.max(tl.reshape(final, (BLOCK_M, GROUP_PAGES, GROUPS)), 1)
                group = start // GROUP_PAGES + tl.arange(0, GROUPS)
                place = own[:, None] * whole_16(groups) + group[None, :]
                tl.store(maxima + place, best, mask=in_rows[:, None])
            rank = tl.full((BLOCK_M, TILE), NOTHING, tl.float32)
    if COLLECT:
        tl.store(counts + own, count, mask=in_rows)


@triton.jit
def _rows_of(block_seq, block_begin, cu_query, ROWS: tl.constexpr):
    """-> this program's ROWS rows of the step, and a mask of those that exist"""
    block = tl.program_id(1)
    seq = tl.load(block_seq + block)
    first_row = tl.load(cu_query + seq).to(tl.int32)
    query_len = tl.load(cu_query + seq + 1).to(tl.int32) - first_row
    new = tl.load(block_begin + block) + tl.program_id(2) * ROWS + tl.arange(0, ROWS)
    return (first_row + new).to(tl.int64), new < query_len


@direct
@triton.jit(do_not_specialize=["groups"])
def _threshold_kernel(
    cu_query,
    block_seq,
    block_begin,
    limits,
    normalizer,  # [rows, KV_HEADS * SURVEYED] read if NORMALIZE
    maxima,  # [rows, KV_HEADS * SURVEYED, groups]
    thresholds,
    groups: tl.int32,  # a multiple of 16
    KV_HEADS: tl.constexpr,
    SURVEYED: tl.constexpr,  # heads per kv head that have their own maxima
    NORMALIZE: tl.constexpr,
    TOPK: tl.constexpr,
    GROUP_PAGES: tl.constexpr,
    TILE: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,  # at least groups
    SLACK: tl.constexpr,  # groups beyond TOPK that may reach the threshold
):
    row, in_rows = _rows_of(block_seq, block_begin, cu_query, ROWS)
    kv_head = tl.program_id(0)
    limit = tl.load(limits + row, mask=in_rows, other=0)
    surveyed = (limit + TILE - 1) // TILE * (TILE // GROUP_PAGES)  # groups of each row
    group = tl.arange(0, BLOCK)[None, :]
    best = tl.full((ROWS, BLOCK), float("-inf"), tl.float32)
    for h in range(SURVEYED):
        head = (row * KV_HEADS + kv_head) * SURVEYED + h
        value = tl.load(
            maxima + head[:, None] * whole_16(groups) + group,
            mask=group < surveyed[:, None],
            other=float("-inf"),
        )
        if NORMALIZE:
            value -= tl.load(normalizer + head, mask=in_rows, other=0.0)[:, None]
        best = tl.maximum(best, value)
    threshold = threshold_of_rows(best, TOPK, SLACK)
    tl.store(thresholds + row * KV_HEADS + kv_head, threshold, mask=in_rows)


@direct
@triton.jit(do_not_specialize=["capacity"])
def _choose_kernel(
    cu_query,
    block_seq,
    block_begin,
    counts,
    kept,
    out,  # [rows, KV_HEADS, TOPK]
    capacity: tl.int32,  # a multiple of 16
    KV_HEADS: tl.constexpr,
    TOPK: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
    FEW: tl.constexpr,  # no row has more than MOST_FEW collected pages
):
    row, in_rows = _rows_of(block_seq, block_begin, cu_query, ROWS)
    own = row * KV_HEADS + tl.program_id(0)
    count = tl.load(counts + own, mask=in_rows, other=0)
    entries = kept + own[:, None] * whole_16(capacity)
    least = threshold_in_memory(entries, count, TOPK, BLOCK, FEW)[:, None]
    column = tl.arange(0, BLOCK)[None, :]
    above = tl.zeros((ROWS,), tl.int32)
    for start in range(0, tl.max(count), BLOCK):
        there = start + column < count[:, None]
        key = entry_key(tl.load(entries + start + column, mask=there, other=0))
        above += tl.sum((there & (key > least)).to(tl.int32), 1)
    # Entries are ordered by place, so ties go to the earlier page.
    equals = tl.zeros((ROWS,), tl.int32)
    taken = tl.zeros((ROWS,), tl.int32)
    for start in range(0, tl.max(count), BLOCK):
        there = start + column < count[:, None]
        entry = tl.load(entries + start + column, mask=there, other=0)
        key = entry_key(entry)
        equal = (there & (key == least)).to(tl.int32)
        before = equals[:, None] + tl.cumsum(equal, 1)
        take = there & ((key > least) | ((equal > 0) & (before <= TOPK - above[:, None])))
        place = taken[:, None] + tl.cumsum(take.to(tl.int32), 1) - 1
        tl.store(out + own[:, None] * TOPK + place, entry.to(tl.int32), mask=take)
        equals += tl.sum(equal, 1)
        taken += tl.sum(take.to(tl.int32), 1)
    BLOCK_K: tl.constexpr = triton.next_power_of_2(TOPK)
    slot = tl.arange(0, BLOCK_K)[None, :]
    tl.store(
        out + own[:, None] * TOPK + slot,
        tl.full((ROWS, BLOCK_K), -1, tl.int32),
        mask=in_rows[:, None] & (slot >= taken[:, None]) & (slot < TOPK),
    )


def select_pages(
    shape: SparseShape,
    scoring: torch.Tensor,  # [rows, heads, width], from the policy; half as wide if split_query
    vectors: torch.Tensor,  # [pages, landmark heads, width]
    bias: torch.Tensor | None,
    candidates: CandidatePages,
    kv_lens: torch.Tensor,  # [seqs] int32
    cu_query: torch.Tensor,  # [seqs + 1] int32
    dense_until: torch.Tensor,  # [seqs] int32, rows at positions below it attend densely
    blocks: ExtendBlocks,  # SELECT_ROWS rows each
    window_lse: torch.Tensor,  # [rows, heads] float32
    workspace: Workspace,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """-> places of the selected pages in the sequence, [rows, kv_heads, topk] int32, ascending, -1
    for none; and each head's log-sum-exp over window and candidates, [rows, heads], or None if the
    selection does not need it. Rows in no block stay unset. The second is workspace memory."""
    rows, heads, _ = scoring.shape
    device, kv_heads, topk = scoring.device, shape.kv_heads, shape.topk
    block_m, narrow = blocks.block_m, scoring.dtype.itemsize == 2
    warps = 4 if block_m <= 64 else 8
    tma = can_describe(device, scoring.dtype)
    tile = _tile_of(shape, scoring.dtype)
    landmark_heads, width = vectors.shape[1:]
    normalizer = workspace.take("normalizer", rows, heads) if shape.normalized else window_lse
    out = torch.empty(rows, kv_heads, topk, dtype=torch.int32, device=device)
    found = out, normalizer if shape.normalized else None
    grid = (kv_heads, len(blocks.seq))
    rows_of_blocks = (cu_query, blocks.seq, blocks.begin)
    of_blocks = (candidates.offsets, kv_lens, cu_query, dense_until, blocks.seq, blocks.begin)
    landmarks = (vectors, vectors if bias is None else bias, candidates.pages)
    most_candidates = candidates.longest - shape.window // shape.page_size
    if most_candidates <= most_few(shape, scoring.dtype):
        few_kernel[grid](
            scoring,
            *landmarks,
            *of_blocks,
            window_lse,
            normalizer,
            out,
            shape.scale,
            scoring.stride(0),
            **shape.of(few_kernel),
            HAS_BIAS=bias is not None,
            BLOCK_M=block_m,
            TILE=next(size for size in FEW_TILES if most_candidates <= size),
            num_warps=warps,
            num_stages=2 if narrow else 1,
        )
        return found
    count = len(candidates.pages)
    room = _up_to_16(count + tile)  # the last tile is read whole
    flat = workspace.take("flat", landmark_heads * room, width, dtype=vectors.dtype)
    flat_bias = workspace.take("flat_bias", landmark_heads, room)
    lay_out_kernel[(blocks_of(room, 32), landmark_heads)](
        *landmarks,
        flat,
        flat_bias,
        count,
        room,
        **shape.of(lay_out_kernel),
        HAS_BIAS=bias is not None,
        BLOCK=32,
        num_warps=4,
    )

    summed = shape.strategy == "group" and heads > kv_heads
    group_pages, groups, block = _grouping(candidates.longest, topk, tile)
    slack = topk // 8
    capacity = _up_to_16(topk + tile + (topk + slack) * group_pages + shape.sinks)
    surveyed = kv_heads if summed else heads
    limits = workspace.take("limits", rows, dtype=torch.int32)
    maxima = workspace.take("maxima", rows, surveyed, groups)
    thresholds = workspace.take("thresholds", rows, kv_heads)
    counts = workspace.take("counts", rows, kv_heads, dtype=torch.int32)
    kept = workspace.take("kept", rows, kv_heads, capacity, dtype=torch.int64)

    half = width // 2 if shape.reach else width

    def described(flat: torch.Tensor, rows: int) -> torch.Tensor | TensorDescriptor:
        return TensorDescriptor.from_tensor(flat, [rows, half]) if tma else flat

    def rank(collect: bool) -> None:
        own_tile = min(tile, _COLLECT_TILE) if collect else tile
        _rank_kernel[grid](
            scoring,
            described(scoring.view(rows, -1), block_m),
            described(flat, own_tile),
            flat_bias,
            *of_blocks,
            normalizer,
            maxima,
            limits,
            thresholds,
            counts,
            kept,
            shape.scale,
            scoring.stride(0),
            room,
            groups,
            capacity,
            **shape.of(_rank_kernel),
            COLLECT=collect,
            GROUP_PAGES=1 if collect else group_pages,
            BLOCK_M=block_m,
            TILE=own_tile,
            TMA=tma,
            num_warps=warps,
            num_stages=3 if narrow else 1,
        )

    # Four programs fit on a multiprocessor then; wider landmarks would spill registers.
    registers = {"maxnreg": 128} if tma and width <= 64 else {}
    if summed:
        rank(collect=False)
    else:
        survey_kernel[(heads, len(blocks.seq))](
            scoring,
            described(flat, tile),
            flat_bias,
            *of_blocks,
            window_lse,
            normalizer,
            maxima,
            limits,
            shape.scale,
            scoring.stride(0),
            room,
            groups,
            **shape.of(survey_kernel),
            GROUP_PAGES=group_pages,
            BLOCK_M=block_m,
            TILE=tile,
            TMA=tma,
            num_warps=warps,
            num_stages=2 if narrow else 1,
            **registers,
        )
    _threshold_kernel[(*grid, blocks_of(block_m, _THRESHOLD_ROWS))](
        *rows_of_blocks,
        limits,
        normalizer,
        maxima,
        thresholds,
        groups,
        **shape.of(_threshold_kernel),
        SURVEYED=surveyed // kv_heads,
        GROUP_PAGES=group_pages,
        TILE=tile,
        ROWS=_THRESHOLD_ROWS,
        BLOCK=block,
        SLACK=slack,
        num_warps=1,
    )
    rank(collect=True)
    _choose_kernel[(*grid, blocks_of(block_m, _CHOOSE_ROWS))](
        *rows_of_blocks,
        counts,
        kept,
        out,
        capacity,
        **shape.of(_choose_kernel),
        ROWS=_CHOOSE_ROWS,
        BLOCK=_BLOCK,
        FEW=capacity <= MOST_FEW.value,
        num_warps=1,
    )
    return found


class _Grouping(NamedTuple):
    group_pages: int  # pages per group
    groups: int  # groups per row; a multiple of 16
    block: int  # power of two, at least `groups`


def _grouping(pages: int, topk: int, tile: int) -> _Grouping:
    """Group sizes for a longest sequence of `pages` pages."""
    fits = [size for size in _GROUP_PAGES if size <= tile]
    most = max(_GROUPS, 4 * topk)
    group_pages = next((n for n in fits if pages <= n * most), fits[-1])
    groups = _up_to_16(blocks_of(pages, tile) * (tile // group_pages))
    return _Grouping(group_pages, groups, power_of_two(max(most, groups)))


def _tile_of(shape: SparseShape, dtype: torch.dtype) -> int:
    return _TILE if shape.landmark_width <= 128 and dtype.itemsize == 2 else 64


def most_few(shape: SparseShape, dtype: torch.dtype) -> int:
    """Most candidates of a row for which `few_kernel` selects."""
    return min(_tile_of(shape, dtype), _FEW)


def page_rungs(shape: SparseShape, dtype: torch.dtype, most: int) -> tuple[int, ...]:
    """Complete pages of a step's longest sequence, up to `most`, at which `select_pages` switches
    to other compiled forms."""
    tile, window = _tile_of(shape, dtype), shape.window // shape.page_size
    groups = max(_GROUPS, 4 * shape.topk)
    sizes = [size for size in _GROUP_PAGES if size <= tile]
    tiles = [size + window for size in FEW_TILES if size <= most_few(shape, dtype)]
    last = [size * groups for size in sizes[:-1]]  # most pages for each group size
    full = sizes[-1] * power_of_two(groups)
    while full < most:
        last.append(full)
        full *= 2
    ends = {*tiles, *(pages for pages in last if pages > tiles[-1])}
    return (1, *sorted(pages + 1 for pages in ends if pages < most))


def _up_to_16(number: int) -> int:
    return -(-max(1, number) // 16) * 16
