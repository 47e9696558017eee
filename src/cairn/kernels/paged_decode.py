"""Decode attention over a paged KV cache: one or a few query rows per sequence, split along the
past. Rows of a sequence share its keys and values: they are further rows of a program's tile.

Sequences are cut into splits so that there are enough programs to fill the device, whatever the
number and length of the sequences. The device plans the splits once per step for all layers, so a
recorded graph follows changing lengths:

    item:    one split of one sequence. There are at most `sequences + target` items
    splits:  item_seq [items] sequence of each item, -1 for none; for each sequence its first item
             and the number of its items. Long splits come first, so that short ones fill the end

Each program handles one item and one kv head. The last program of a group of eight splits to finish
merges the group; the last group to finish merges the groups. These programs reset the arrival
counters to zero.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from cairn.kernels.fp8_rows import FP8, is_narrow, page_rows
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
from cairn.kernels.pdl import pdl_options
from cairn.kernels.processors import processors
from cairn.kernels.sizes import power_of_two
from cairn.kernels.softmax import LOG2E, softmax_result, softmax_shares

MERGE = tl.constexpr(8)  # splits that are merged at once
_LEAST_PAGES = 4  # fewest pages of 64 rows per split: less is not worth the merge
_LEAST_OF_MANY = 16  # likewise, if there are programs enough for the device without splits


@dataclass(frozen=True, slots=True)
class DecodeSplits:
    item_seq: torch.Tensor  # [max_seqs + target] int32
    item_begin: torch.Tensor  # [max_seqs] int32, the first item of each sequence
    item_count: torch.Tensor  # [max_seqs] int32
    partial: torch.Tensor  # [items, most rows of a sequence, heads, head_dim] float32
    partial_lse: torch.Tensor  # [items, most rows of a sequence, heads] float32
    arrivals: torch.Tensor  # [max_seqs, kv_heads] int32, finished groups of a sequence
    group_arrivals: torch.Tensor  # [items, kv_heads] int32, splits done, at a group's first item
    narrow: bool  # rows of the cache have 8 bits

    @classmethod
    def empty(
        cls,
        max_seqs: int,
        heads: int,
        kv_heads: int,
        head_dim: int,
        device: torch.device,
        cache_dtype: torch.dtype,
        rows_per_seq: int = 1,
    ) -> DecodeSplits:
        narrow = is_narrow(cache_dtype)
        most = max(target_items(kv_heads, seqs, device, narrow) for seqs in (1, 2, max_seqs))
        items = max_seqs + most
        return cls(
            torch.full((items,), -1, dtype=torch.int32, device=device),
            torch.zeros(max_seqs, dtype=torch.int32, device=device),
            torch.zeros(max_seqs, dtype=torch.int32, device=device),
            torch.empty(items, rows_per_seq, heads, head_dim, dtype=torch.float32, device=device),
            torch.empty(items, rows_per_seq, heads, dtype=torch.float32, device=device),
            torch.zeros(max_seqs, kv_heads, dtype=torch.int32, device=device),
            torch.zeros(items, kv_heads, dtype=torch.int32, device=device),
            narrow,
        )


def target_items(
    kv_heads: int, seqs: int, device: torch.device, narrow: bool, rows: int = 1
) -> int:
    """Number of splits, beyond one per sequence, with which all kv heads fill the device.

    With rows of 8 bits (`narrow`), or several rows of a sequence, few programs run on a
    multiprocessor at the same time, so a few programs more take another turn. The number is then a
    multiple of the sequences: if these have the same length, their splits together fill the device
    as often as planned, and no more.
    """
    target = max(1, processors(device) * _depth(seqs, narrow, rows).programs // kv_heads)
    if (rows > 1 and seqs <= target) or (narrow and 1 < seqs < min(_MANY, target)):
        target -= target % seqs
    return target


class _Depth(NamedTuple):
    programs: int  # per multiprocessor, roughly, if there is enough work
    stages: int  # tiles in flight


def _depth(seqs: int, narrow: bool, rows: int = 1) -> _Depth:
    """Launch parameters for a number of sequences of up to `rows` rows, measured on an H200.

    A single sequence waits for the merge of its splits, so fewer splits are better; likewise if
    several rows are merged, unless there are many sequences. Of many short sequences, hardly any is
    split.
    """
    if narrow:
        return _Depth(8 if 1 < seqs < _MANY else 4, 6)  # tiles of half the bytes
    if rows > 1:
        return _Depth(2 if seqs < _MANY else 6, 5)
    if seqs == 1:
        return _Depth(2, 5)
    return _Depth(8, 4) if seqs < _MANY else _Depth(4, 5)


_MANY = 64
MOST_TILE_ROWS = 64
"""Query heads of a kv head, times rows of a sequence, that a program's tile has room for."""


def seq_rungs() -> tuple[int, ...]:
    """Sequence counts at which `paged_decode` switches to another compiled form."""
    return 1, 2, _MANY


@triton.jit
def _pages_of(kv_lens, seq, num_seqs, PAGE_SIZE: tl.constexpr, WINDOW: tl.constexpr, ROWS):
    """Number of pages that sequences read; 0 beyond num_seqs."""
    length = tl.load(kv_lens + seq, mask=seq < num_seqs, other=0).to(tl.int32)
    first = tl.zeros_like(length)
    if WINDOW > 0:
        first = tl.maximum(length - (ROWS - 1) - WINDOW, 0) // PAGE_SIZE
    return (length + PAGE_SIZE - 1) // PAGE_SIZE - first


@direct
@triton.jit(do_not_specialize=["num_seqs", "num_items", "target", "least"])
def _plan_kernel(
    kv_lens,
    item_seq,
    item_begin,
    item_count,
    num_seqs: tl.int32,
    num_items: tl.int32,
    target: tl.int32,
    least: tl.int32,  # pages of a split, unless its sequence has fewer
    PAGE_SIZE: tl.constexpr,
    WINDOW: tl.constexpr,  # 0 for none
    ROWS: tl.constexpr,  # most rows of a sequence
    BLOCK: tl.constexpr,  # at least num_seqs of any step
    BLOCK_ITEMS: tl.constexpr,  # at least num_items of any step
    COMPARED: tl.constexpr,  # sequences that are compared with all others at once
):
    seq = tl.arange(0, BLOCK)
    valid = seq < num_seqs
    pages = _pages_of(kv_lens, seq, num_seqs, PAGE_SIZE, WINDOW, ROWS)
    chunk = tl.maximum((tl.sum(pages) + target - 1) // target, least)
    splits = (pages + chunk - 1) // chunk
    size = (pages + splits - 1) // tl.maximum(splits, 1)
    begin = tl.zeros_like(splits)
    for start in range(0, num_seqs, COMPARED):
        other = start + tl.arange(0, COMPARED)
        other_pages = _pages_of(kv_lens, other, num_seqs, PAGE_SIZE, WINDOW, ROWS)
        other_splits = (other_pages + chunk - 1) // chunk
        other_size = (other_pages + other_splits - 1) // tl.maximum(other_splits, 1)
        earlier = other[None, :] < seq[:, None]
        before = other_size[None, :] > size[:, None]
        before |= (other_size[None, :] == size[:, None]) & earlier
        begin += tl.sum(tl.where(before, other_splits[None, :], 0), 1)
    tl.store(item_begin + seq, begin, mask=valid)
    tl.store(item_count + seq, splits, mask=valid)
    item = tl.arange(0, BLOCK_ITEMS)
    tl.store(item_seq + item, tl.full((BLOCK_ITEMS,), -1, tl.int32), mask=item < num_items)
    tl.debug_barrier()
    for i in range(0, tl.max(splits)):
        tl.store(item_seq + begin + i, seq, mask=valid & (i < splits))


def plan_splits(
    splits: DecodeSplits,
    kv_lens: torch.Tensor,  # [seqs] int32
    *,
    kv_heads: int,
    page_size: int,
    window: int | None,
    rows_per_seq: int = 1,
) -> None:
    """Plan the splits of a step and write them to `splits`. `rows_per_seq` is as in `paged_decode`.

    Attention reads the plan before its PDL wait. A kernel launched without PDL must therefore run
    between the two; in a step, `known_tokens` does.
    """
    seqs = len(kv_lens)
    device = kv_lens.device
    target = target_items(kv_heads, seqs, device, splits.narrow, rows_per_seq)
    items = seqs + target
    enough = seqs * kv_heads >= 2 * processors(device)
    least = _LEAST_OF_MANY if enough else _LEAST_PAGES
    _plan_kernel[(1,)](
        kv_lens,
        splits.item_seq,
        splits.item_begin,
        splits.item_count,
        seqs,
        items,
        target,
        max(1, least * 64 // page_size),
        PAGE_SIZE=page_size,
        WINDOW=window or 0,
        ROWS=rows_per_seq,
        BLOCK=power_of_two(len(splits.arrivals)),
        BLOCK_ITEMS=power_of_two(len(splits.item_seq)),
        COMPARED=32,
        num_warps=8,  # the whole step waits for this one program
    )


@triton.jit
def merge_splits(
    parts,  # output [items, ROWS, HEADS, DIM] and log-sum-exp [items, ROWS, HEADS] of the splits
    to,  # the same of the merged rows, [count, HEADS, DIM] and [count, HEADS]
    first_item,
    splits,
    kv_head,
    HEADS: tl.constexpr,
    KV_HEADS: tl.constexpr,
    DIM: tl.constexpr,
    WITH_LSE: tl.constexpr,
    STRIDE: tl.constexpr = 1,  # items from one split to the next
    NULL_SPLIT: tl.constexpr = False,  # add a split whose log-sum-exp and output are zero
    ROWS: tl.constexpr = 1,
    count=1,  # rows to merge, at most ROWS
):
    """Merge splits of one sequence for the query heads of one kv head, all rows at once."""
    partial, partial_lse = parts
    out, lse_out = to
    GROUP: tl.constexpr = HEADS // KV_HEADS
    MERGE_G: tl.constexpr = triton.next_power_of_2(GROUP * ROWS)
    BLOCK_D: tl.constexpr = max(16, triton.next_power_of_2(DIM))
    # With several rows, fewer splits at a time, so that the tile fits in registers.
    TILE: tl.constexpr = max(1, 4096 // (MERGE_G * BLOCK_D))
    AT_ONCE: tl.constexpr = MERGE if ROWS == 1 else min(MERGE, TILE)
    offs_d = tl.arange(0, BLOCK_D)
    in_dim = offs_d < DIM
    group = tl.arange(0, MERGE_G)
    in_rows = group < GROUP * count
    own = group // GROUP * HEADS + kv_head * GROUP + group % GROUP  # [MERGE_G] row and head
    most = tl.full((MERGE_G,), 0.0 if NULL_SPLIT else float("-inf"), tl.float32)
    total = tl.full((MERGE_G,), 1.0 if NULL_SPLIT else 0.0, tl.float32)
    merged = tl.zeros((MERGE_G, BLOCK_D), tl.float32)
    for start in range(0, splits, AT_ONCE):
        split = start + tl.arange(0, AT_ONCE)
        there = (split < splits)[:, None] & in_rows[None, :]
        place = (first_item + split * STRIDE)[:, None] * (ROWS * HEADS) + own[None, :]
        # Other programs wrote these, so the loads bypass this multiprocessor's L1 cache.
        # lse [AT_ONCE, MERGE_G]
        lse = tl.load(partial_lse + place, mask=there, other=float("-inf"), cache_modifier=".cg")
        part = tl.load(
            partial + place[:, :, None] * DIM + offs_d[None, None, :],
            mask=there[:, :, None] & in_dim[None, None, :],
            other=0.0,
            cache_modifier=".cg",
        )
        new_most = tl.maximum(most, tl.max(lse, 0))
        safe = tl.where(new_most == float("-inf"), 0.0, new_most)
        fade = tl.exp(most - safe)
        share = tl.exp(lse - safe[None, :])
        merged = merged * fade[:, None] + tl.sum(part * share[:, :, None], 0)
        total = total * fade + tl.sum(share, 0)
        most = new_most
    merged = merged / tl.where(total > 0, total, 1.0)[:, None]
    tl.store(
        out + own[:, None] * DIM + offs_d[None, :],
        merged.to(out.dtype.element_ty),
        mask=in_rows[:, None] & in_dim[None, :],
    )
    if WITH_LSE:
        lse = tl.where(total > 0, most + tl.log(total), float("-inf"))
        tl.store(lse_out + own, lse, mask=in_rows)


@direct
@triton.jit(do_not_specialize=["table_stride", "head_stride"])
def _decode_kernel(
    query,  # [rows, HEADS, DIM]
    pool,  # [pages, 2 * KV_HEADS, PAGE_SIZE, DIM]
    page_table,  # [seqs, ...], or [seqs, KV_HEADS, ...]
    kv_lens,  # [seqs]
    rows,  # [seqs] first row of each sequence's query; if ROWS > 1, [seqs + 1]
    item_seq,
    item_begin,
    item_count,
    out,  # [rows, HEADS, DIM]
    lse_out,  # [rows, HEADS], if WITH_LSE
    partial,
    partial_lse,
    arrivals,  # [seqs, KV_HEADS]
    group_arrivals,  # [items, KV_HEADS]
    scale,
    query_stride,
    table_stride: tl.int32,
    head_stride: tl.int32,
    HEADS: tl.constexpr,
    KV_HEADS: tl.constexpr,
    DIM: tl.constexpr,
    PAGE_SIZE: tl.constexpr,
    WINDOW: tl.constexpr,
    HIDE_LAST: tl.constexpr,  # mask the last row of every page
    WITH_LSE: tl.constexpr,
    ROWS: tl.constexpr,  # most rows of a sequence
    BLOCK_N: tl.constexpr,
    PDL: tl.constexpr,
):
    if PDL:
        gdc_launch_dependents()
    # Data that is constant within a step is read before the wait, bypassing the L1 cache.
    item = tl.program_id(1)
    kv_head = tl.program_id(0)
    seq = tl.load(item_seq + item, cache_modifier=".cg")
    own = tl.maximum(seq, 0)
    first_item = tl.load(item_begin + own, cache_modifier=".cg")
    splits = tl.load(item_count + own, cache_modifier=".cg")
    length = tl.load(kv_lens + own, cache_modifier=".cg").to(tl.int32)
    row = tl.load(rows + own, cache_modifier=".cg").to(tl.int64)
    count = 1
    if ROWS > 1:
        count = (tl.load(rows + own + 1, cache_modifier=".cg") - row).to(tl.int32)
    if PDL:
        gdc_wait()
    if seq < 0:
        return
    GROUP: tl.constexpr = HEADS // KV_HEADS
    BLOCK_G: tl.constexpr = max(16, triton.next_power_of_2(GROUP * ROWS))
    BLOCK_D: tl.constexpr = max(16, triton.next_power_of_2(DIM))
    first_page = 0
    if WINDOW > 0:
        first_page = tl.maximum(length - (ROWS - 1) - WINDOW, 0) // PAGE_SIZE
    pages = tl.cdiv(length, PAGE_SIZE) - first_page
    per_split = tl.cdiv(pages, splits)
    begin = (first_page + (item - first_item) * per_split) * PAGE_SIZE
    end = tl.minimum(length, begin + per_split * PAGE_SIZE)

    offs_g = tl.arange(0, BLOCK_G)
    offs_d = tl.arange(0, BLOCK_D)
    offs_n = tl.arange(0, BLOCK_N)
    own_row = offs_g // GROUP  # [BLOCK_G] among the sequence's new rows
    in_group = own_row < count
    in_dim = offs_d < DIM
    head = kv_head * GROUP + offs_g % GROUP
    sees = length - count + own_row  # [BLOCK_G] the last key that each row sees
    # Rows of 8 bits are read as pairs: columns 0, 2, 4... here, and 1, 3, 5... in `odd` tiles.
    PAIRS: tl.constexpr = reads_pairs(pool, query)
    EACH: tl.constexpr = 2 if PAIRS else 1
    offs_p = tl.arange(0, BLOCK_D // EACH)
    in_pairs = offs_p < DIM // EACH
    query += (row + own_row)[:, None] * query_stride + head[:, None] * DIM
    q_mask = in_group[:, None] & in_pairs[None, :]
    q = tl.load(query + EACH * offs_p[None, :], mask=q_mask, other=0.0)  # [BLOCK_G, BLOCK_D / EACH]
    q = fit_query((q * (scale * LOG2E)).to(q.dtype), pool)  # scores in base 2
    if PAIRS:
        odd_q = tl.load(query + (2 * offs_p + 1)[None, :], mask=q_mask, other=0.0)
        odd_q = fit_query((odd_q * (scale * LOG2E)).to(odd_q.dtype), pool)

    most = tl.full((BLOCK_G,), float("-inf"), tl.float32)
    totals = tl.zeros((BLOCK_G, BLOCK_N), tl.float32)
    acc = tl.zeros((BLOCK_G, BLOCK_D // EACH), tl.float32)
    odd_acc = acc
    SLICE: tl.constexpr = slice_size(pool, PAGE_SIZE, DIM)
    keys = pool + kv_head * SLICE
    values = keys + KV_HEADS * SLICE
    key_tile, value_tile = as_tile(keys, PAIRS), as_tile(values, PAIRS)
    table = page_table + seq * table_stride + kv_head * head_stride
    for start in range(begin, end, BLOCK_N):
        n = start + offs_n
        seen = n < end
        if ROWS > 1 and WINDOW > 0:
            seen = seen & (n > length - count - WINDOW)
        if PAGE_SIZE % BLOCK_N == 0:
            page = tl.load(table + start // PAGE_SIZE).to(tl.int64)
            inside = start % PAGE_SIZE + offs_n  # [BLOCK_N]
        else:
            page = tl.load(table + n // PAGE_SIZE, mask=seen, other=0).to(tl.int64)
            inside = n % PAGE_SIZE
        at = page * (2 * KV_HEADS * SLICE)
        slot = at // EACH + inside * (DIM // EACH)
        k = tl.load(
            key_tile + slot[None, :] + offs_p[:, None],
            mask=seen[None, :] & in_pairs[:, None],
            other=0.0,
        )  # [BLOCK_D / EACH, BLOCK_N]
        v = tl.load(
            value_tile + slot[:, None] + offs_p[None, :],
            mask=seen[:, None] & in_pairs[None, :],
            other=0.0,
        )  # [BLOCK_N, BLOCK_D / EACH]
        if PAIRS:
            k, odd_k = unpack_pairs(k, pool)
            v, odd_v = unpack_pairs(v, pool)
        scores = tl.dot(q, k.to(q.dtype), input_precision="ieee")  # [BLOCK_G, BLOCK_N]
        if PAIRS:
            scores = tl.dot(odd_q, odd_k, scores)
        value_scale = None
        if has_scales(pool):
            scores *= load_scales(keys + at, inside, seen, PAGE_SIZE, DIM)[None, :]
            value_scale = load_scales(values + at, inside, seen, PAGE_SIZE, DIM)
        if WINDOW > 0 and ROWS == 1:
            seen = seen & (n >= length - WINDOW)
        if HIDE_LAST:
            seen = seen & (n % PAGE_SIZE != PAGE_SIZE - 1)
        scores = tl.where(seen[None, :], scores, float("-inf"))
        if ROWS > 1:
            scores = tl.where(n[None, :] <= sees[:, None], scores, float("-inf"))
            if WINDOW > 0:
                scores = tl.where(n[None, :] > sees[:, None] - WINDOW, scores, float("-inf"))
        weights, counted, fade, most = softmax_shares(scores, most, False, value_scale)
        # Added up over keys at the end: a sum across warps in every turn would hold them up.
        totals = totals * fade[:, None] + counted
        weights = weights.to(q.dtype)
        acc = tl.dot(weights, v.to(q.dtype), acc * fade[:, None], input_precision="ieee")
        if PAIRS:
            odd_acc = tl.dot(weights, odd_v, odd_acc * fade[:, None])
    if PAIRS:
        acc = tl.interleave(acc, odd_acc)

    result, lse = softmax_result(most, tl.sum(totals, 1), acc)
    mask = in_group[:, None] & in_dim[None, :]
    if splits == 1:
        place = (row + own_row) * HEADS + head
        tl.store(
            out + place[:, None] * DIM + offs_d[None, :], result.to(out.dtype.element_ty), mask=mask
        )
        if WITH_LSE:
            tl.store(lse_out + place, lse, mask=in_group)
    else:
        split_place = (item * ROWS + own_row) * HEADS + head
        tl.store(partial + split_place[:, None] * DIM + offs_d[None, :], result, mask=mask)
        tl.store(partial_lse + split_place, lse, mask=in_group)
        tl.debug_barrier()  # the program's stores complete before it reports its arrival
        group = (item - first_item) // MERGE
        groups = tl.cdiv(splits, MERGE)
        first = first_item + group * MERGE
        members = tl.minimum(MERGE, splits - group * MERGE)
        counter = group_arrivals + first * KV_HEADS + kv_head
        if tl.atomic_add(counter, 1, sem="acq_rel") == members - 1:
            tl.store(counter, 0)
            # The result replaces the group's first split, or goes to `out` if it is the only group.
            parts = (partial, partial_lse)
            to = (out + row * (HEADS * DIM), lse_out + row * HEADS)
            if groups == 1:
                merge_splits(
                    parts, to, first, members, kv_head, HEADS, KV_HEADS, DIM, WITH_LSE,
                    ROWS=ROWS, count=count,
                )  # fmt: skip
            else:
                begins = first * (ROWS * HEADS)
                into = (partial + begins * DIM, partial_lse + begins)
                merge_splits(
                    parts, into, first, members, kv_head, HEADS, KV_HEADS, DIM, True,
                    ROWS=ROWS, count=count,
                )  # fmt: skip
                tl.debug_barrier()
                counter = arrivals + seq * KV_HEADS + kv_head
                if tl.atomic_add(counter, 1, sem="acq_rel") == groups - 1:
                    tl.store(counter, 0)
                    merge_splits(
                        parts, to, first_item, groups, kv_head, HEADS, KV_HEADS, DIM, WITH_LSE,
                        MERGE, ROWS=ROWS, count=count,
                    )  # fmt: skip


def paged_decode(
    query: torch.Tensor,  # [rows, heads, dim], heads contiguous
    pool: torch.Tensor,  # [pages, 2 * kv_heads, page_size, dim]
    page_table: torch.Tensor,  # [seqs, pages] int32, or [seqs, kv_heads, pages]
    kv_lens: torch.Tensor,  # [seqs] int32
    rows: torch.Tensor,  # [seqs] int32, query row of each sequence; see `rows_per_seq`
    splits: DecodeSplits,  # planned by `plan_splits` for these lengths
    out: torch.Tensor,  # [rows, heads, dim], contiguous
    *,
    scale: float,
    window: int | None = None,
    hide_last: bool = False,
    lse: torch.Tensor | None = None,  # [rows, heads] float32, filled if given
    rows_per_seq: int = 1,
) -> None:
    """With `rows_per_seq` over 1, a sequence has up to that many new rows, or none; `rows`
    [seqs + 1] is then the first row of each sequence, and the end of the last."""
    heads, dim = query.shape[1:]
    kv_heads, page_size = pool.shape[1] // 2, page_rows(pool)
    seqs = len(kv_lens)
    items = seqs + target_items(kv_heads, seqs, query.device, splits.narrow, rows_per_seq)
    block_n = min(64, max(16, power_of_two(page_size)))
    if page_size % block_n:
        block_n = 64
    stages, warps, registers = 2, 4, {}
    if query.dtype.itemsize == 2 and dim <= 128:
        stages = _depth(seqs, splits.narrow, rows_per_seq).stages
        if splits.narrow and heads // kv_heads * rows_per_seq <= 16:
            registers = {"maxnreg": 128}  # so that four programs run at the same time
            # Two warps wait less for each other. Other forms were not measured.
            form = pool.dtype, heads // kv_heads, dim, block_n, rows_per_seq, window
            if form == (FP8, 2, 128, 64, 1, None) and 1 < seqs < _MANY:
                warps, registers = 2, {}
    _decode_kernel[(kv_heads, items)](
        query,
        pool,
        page_table,
        kv_lens,
        rows,
        splits.item_seq,
        splits.item_begin,
        splits.item_count,
        out,
        out if lse is None else lse,
        splits.partial,
        splits.partial_lse,
        splits.arrivals,
        splits.group_arrivals,
        scale,
        query.stride(0),
        page_table.stride(0),
        page_table.stride(1) if page_table.ndim == 3 else 0,
        HEADS=heads,
        KV_HEADS=kv_heads,
        DIM=dim,
        PAGE_SIZE=page_size,
        WINDOW=window or 0,
        HIDE_LAST=hide_last,
        WITH_LSE=lse is not None,
        ROWS=rows_per_seq,
        BLOCK_N=block_n,
        num_warps=warps,
        num_stages=stages,
        **registers,
        **pdl_options(query),
    )
