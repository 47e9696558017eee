"""The k best of many scores of each row, exactly: ties go to the lower position.

Three kernels, and each reads the scores of a row at most once:

    sample    finds a bound that a little more than k scores reach, probably, from a sample
    collect   lists the positions whose score reaches the bound; several programs share a row
    choose    finds the k-th best of these, and writes the chosen positions in ascending order

If the list is shorter than k or very long, because the sample misled, `choose` searches all scores
of the row instead. That takes longer and gives the same result: nothing is ever left out. Scores
are compared by their bits, as integers of the same order. Scores of -inf are never chosen.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from cairn.kernels.interface import MOST_SCORES
from cairn.kernels.launch import direct
from cairn.kernels.pdl import pdl_options
from cairn.kernels.sizes import power_of_two
from cairn.kernels.top_pages import cuts_of, narrow, order_key, pack_counts

_SAMPLE = 8192
_SLACK = 16  # how many more sampled scores than necessary may reach the bound
_BLOCK = 2048  # scores at once
_MOST_SPLITS = 64
_PROGRAMS = 528  # most programs that collect
_FEW, _MANY = 4096, 8192  # listed positions that `choose` keeps in registers
_AT_ONCE = tl.constexpr(16)  # numbers of listed positions that are loaded at once
_LEAST_KEY = tl.constexpr(-0x7F800001)  # of -inf


@triton.jit
def _key(score):
    """-> int32 keys that order like the scores; both zeros have the same"""
    return order_key(tl.where(score == 0.0, 0.0, score))


@triton.jit
def _search(key, valid, low, high, wanted, SLACK: tl.constexpr):
    """key [n] -> a key that at least `wanted` valid keys reach and at most wanted + SLACK exceed.
    All valid keys lie in [low, high], int64, and at least `wanted` >= 1 are valid."""
    while low < high:
        cuts = cuts_of(low, high)
        packed = tl.sum(_reached(key, valid, cuts), 0)
        low, high = narrow(low, high, wanted, SLACK, cuts, packed, False)
    return low.to(tl.int32)


@triton.jit
def _reached(key, valid, cuts):
    first, second, third = cuts
    one = valid & (key >= first.to(tl.int32))
    two = valid & (key >= second.to(tl.int32))
    three = valid & (key >= third.to(tl.int32))
    return pack_counts(one, two, three, False)


@triton.jit
def _least(key, valid):
    return tl.min(tl.where(valid, key, 0x7FFFFFFF), 0).to(tl.int64)


@triton.jit
def _most(key, valid):
    return tl.max(tl.where(valid, key, -0x7FFFFFFF), 0).to(tl.int64)


@direct
@triton.jit(do_not_specialize=["blocks"])
def _sample_kernel(
    scores,  # [rows, 128 * blocks]
    limits,  # [rows]
    bounds,  # [rows] int32
    blocks: tl.int32,
    K: tl.constexpr,
    SAMPLE: tl.constexpr,
    SLACK: tl.constexpr,
    PDL: tl.constexpr,
):
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    row = tl.program_id(0)
    count = tl.load(limits + row)
    if count <= K:
        return
    sampled = tl.minimum(count, SAMPLE)
    i = tl.arange(0, SAMPLE)
    there = i < sampled
    position = i.to(tl.int64) * count // sampled
    own = scores + row.to(tl.int64) * (128 * blocks)
    key = _key(tl.load(own + position, mask=there, other=0.0))
    expected = K * (sampled.to(tl.float32) / count.to(tl.float32))
    # Five deviations more than expected, so that the bound is almost never too high.
    wanted = (expected + 5 * tl.sqrt(expected) + 8).to(tl.int32)
    wanted = tl.where(sampled == count, K, wanted)
    bound = _LEAST_KEY
    if wanted < sampled:
        bound = _search(key, there, _least(key, there), _most(key, there), wanted, SLACK)
    tl.store(bounds + row, bound)


@direct
@triton.jit(do_not_specialize=["blocks", "splits"])
def _collect_kernel(
    scores,
    limits,
    bounds,
    listed,  # [rows, 128 * blocks] int32; each program has the places of the scores it reads
    counts,  # [rows, splits]
    blocks: tl.int32,
    splits: tl.int32,
    K: tl.constexpr,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    split = tl.program_id(0)
    row = tl.program_id(1)
    count = tl.load(limits + row)
    if count <= K:
        return
    bound = tl.load(bounds + row)
    share = _share(count, splits, BLOCK)
    begin = split * share
    end = tl.minimum(begin + share, count)
    own = row.to(tl.int64) * (128 * blocks)
    found = 0
    for start in range(begin, end, BLOCK):
        position = start + tl.arange(0, BLOCK)
        there = position < end
        key = _key(tl.load(scores + own + position, mask=there, other=0.0))
        keep = (there & (key >= bound)).to(tl.int32)
        place = begin + found + tl.cumsum(keep, 0) - 1
        tl.store(listed + own + place, position, mask=keep > 0)
        found += tl.sum(keep, 0)
    tl.store(counts + row * splits + split, found)


@triton.jit
def _share(count, splits, BLOCK: tl.constexpr):
    """Scores of one program."""
    return ((count + splits - 1) // splits + BLOCK - 1) // BLOCK * BLOCK


@triton.jit
def _write(positions, slots, table, place, position, keep, PAGE_SIZE: tl.constexpr):
    page = tl.load(table + position // PAGE_SIZE, mask=keep, other=0)
    tl.store(positions + place, position, mask=keep)
    tl.store(slots + place, page * PAGE_SIZE + position % PAGE_SIZE, mask=keep)


@triton.jit
def _choose_listed(
    scores,
    listed,
    counts,
    total,
    share,
    splits,
    positions,
    slots,
    table,
    K: tl.constexpr,
    PAGE_SIZE: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Choose among at most BLOCK listed positions. -> how many were chosen"""
    entry = tl.arange(0, BLOCK)
    shift = tl.zeros((BLOCK,), tl.int32)
    before = 0
    for first in range(0, splits, _AT_ONCE):
        for i in tl.static_range(_AT_ONCE):  # loads that do not wait for each other
            split = first + i
            found = tl.load(counts + split, mask=split < splits, other=0)
            shift = tl.where(entry >= before, split * share - before, shift)
            before += found
    there = entry < total
    position = tl.load(listed + shift + entry, mask=there, other=0)
    key = _key(tl.load(scores + position, mask=there, other=0.0))
    valid = there & (key > _LEAST_KEY)
    wanted = tl.minimum(tl.sum(valid.to(tl.int32), 0), K)
    least = _LEAST_KEY
    if wanted > 0:
        least = _search(key, valid, _least(key, valid), _most(key, valid), wanted, 0)
    above = valid & (key > least)
    equal = (valid & (key == least)).to(tl.int32)
    room = wanted - tl.sum(above.to(tl.int32), 0)
    keep = above | ((equal > 0) & (tl.cumsum(equal, 0) <= room))
    place = tl.cumsum(keep.to(tl.int32), 0) - 1
    _write(positions, slots, table, place, position, keep, PAGE_SIZE)
    return wanted


@triton.jit
def _choose_any(
    scores,
    count,
    positions,
    slots,
    table,
    K: tl.constexpr,
    PAGE_SIZE: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Choose among all scores of a row. -> how many were chosen"""
    offs = tl.arange(0, BLOCK)
    valid_count = 0
    low = tl.full((), 0x7FFFFFFF, tl.int64)
    high = tl.full((), -0x7FFFFFFF, tl.int64)
    for start in range(0, count, BLOCK):
        there = start + offs < count
        key = _key(tl.load(scores + start + offs, mask=there, other=0.0))
        valid = there & (key > _LEAST_KEY)
        valid_count += tl.sum(valid.to(tl.int32), 0)
        low = tl.minimum(low, _least(key, valid))
        high = tl.maximum(high, _most(key, valid))
    wanted = tl.minimum(valid_count, K)
    while low < high:
        cuts = cuts_of(low, high)
        packed = tl.full((), 0, tl.int64)
        for start in range(0, count, BLOCK):
            there = start + offs < count
            key = _key(tl.load(scores + start + offs, mask=there, other=0.0))
            packed += tl.sum(_reached(key, there & (key > _LEAST_KEY), cuts), 0)
        low, high = narrow(low, high, wanted, 0, cuts, packed, False)
    least = low.to(tl.int32)
    room = wanted
    for start in range(0, count, BLOCK):
        there = start + offs < count
        key = _key(tl.load(scores + start + offs, mask=there, other=0.0))
        room -= tl.sum((there & (key > least)).to(tl.int32), 0)
    chosen = 0
    for start in range(0, count, BLOCK):
        position = start + offs
        there = position < count
        key = _key(tl.load(scores + position, mask=there, other=0.0))
        equal = (there & (key == least) & (key > _LEAST_KEY)).to(tl.int32)
        keep = (there & (key > least)) | ((equal > 0) & (tl.cumsum(equal, 0) <= room))
        room -= tl.sum(equal, 0)
        place = chosen + tl.cumsum(keep.to(tl.int32), 0) - 1
        _write(positions, slots, table, place, position, keep, PAGE_SIZE)
        chosen += tl.sum(keep.to(tl.int32), 0)
    return wanted


@direct
@triton.jit(do_not_specialize=["blocks", "table_stride", "splits"])
def _choose_kernel(
    scores,
    limits,
    seqs,
    listed,
    counts,
    page_table,
    positions,  # [rows, K] int32
    slots,  # [rows, K] int32
    blocks: tl.int32,
    table_stride: tl.int32,
    splits: tl.int32,
    K: tl.constexpr,
    MOST_SPLITS: tl.constexpr,
    PAGE_SIZE: tl.constexpr,
    BLOCK: tl.constexpr,
    FEW: tl.constexpr,
    MANY: tl.constexpr,
    BLOCK_K: tl.constexpr,  # at least K
    PDL: tl.constexpr,
):
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    row = tl.program_id(0).to(tl.int64)
    count = tl.load(limits + row)
    table = page_table + tl.load(seqs + row).to(tl.int64) * table_stride
    positions += row * K
    slots += row * K
    scores += row * (128 * blocks)
    k = tl.arange(0, BLOCK_K)
    if count <= K:  # all of them, and no score is read
        chosen = count
        _write(positions, slots, table, k, k, k < count, PAGE_SIZE)
    else:
        counts += row * splits
        listed += row * (128 * blocks)
        share = _share(count, splits, BLOCK)
        split = tl.arange(0, MOST_SPLITS)
        total = tl.sum(tl.load(counts + split, mask=split < splits, other=0), 0)
        if (total >= K) & (total <= FEW):
            chosen = _choose_listed(
                scores, listed, counts, total, share, splits, positions, slots, table,
                K, PAGE_SIZE, FEW,
            )  # fmt: skip
        elif (total >= K) & (total <= MANY):
            chosen = _choose_listed(
                scores, listed, counts, total, share, splits, positions, slots, table,
                K, PAGE_SIZE, MANY,
            )  # fmt: skip
        else:
            chosen = _choose_any(
                scores, count, positions, slots, table, K, PAGE_SIZE, BLOCK
            )  # fmt: skip
    unused = (k >= chosen) & (k < K)
    tl.store(positions + k, -1, mask=unused)
    tl.store(slots + k, -1, mask=unused)


@direct
@triton.jit(do_not_specialize=["table_stride"])
def _slots_kernel(
    positions,  # [rows, K]
    seqs,
    page_table,
    slots,
    table_stride: tl.int32,
    K: tl.constexpr,
    PAGE_SIZE: tl.constexpr,
    BLOCK_K: tl.constexpr,
    PDL: tl.constexpr,
):
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    row = tl.program_id(0).to(tl.int64)
    table = page_table + tl.load(seqs + row).to(tl.int64) * table_stride
    k = tl.arange(0, BLOCK_K)
    position = tl.load(positions + row * K + k, mask=k < K, other=-1)
    page = tl.load(table + position // PAGE_SIZE, mask=position >= 0, other=0)
    slot = tl.where(position >= 0, page * PAGE_SIZE + position % PAGE_SIZE, -1)
    tl.store(slots + row * K + k, slot, mask=k < K)


def _splits(rows: int) -> int:
    """Programs that share a row."""
    return min(_MOST_SPLITS, power_of_two(max(1, _PROGRAMS // rows) + 1) // 2)


def top_rows(
    scores: torch.Tensor,  # [rows, length] float32, contiguous; length is a multiple of 128
    limits: torch.Tensor,  # [rows] int32; scores from here on are ignored
    seqs: torch.Tensor,  # [rows] int32
    page_table: torch.Tensor,  # [seqs, pages] int32
    positions: torch.Tensor,  # [rows, k] int32
    slots: torch.Tensor,  # [rows, k] int32
    listed: torch.Tensor,  # like scores, int32; scratch
    *,
    page_size: int,
) -> None:
    """Write the positions of each row's k best scores, ascending and padded with -1, and where
    these rows are in the pool: page * page_size + offset."""
    rows, k = positions.shape
    blocks, splits = scores.shape[1] // 128, _splits(rows)
    assert scores.shape[1] % 128 == 0 and scores.shape[1] <= MOST_SCORES
    bounds = torch.empty(rows, dtype=torch.int32, device=scores.device)
    counts = torch.empty(rows, splits, dtype=torch.int32, device=scores.device)
    options = pdl_options(scores)
    _sample_kernel[(rows,)](
        scores, limits, bounds, blocks, K=k, SAMPLE=_SAMPLE, SLACK=_SLACK, num_warps=16, **options
    )
    _collect_kernel[(splits, rows)](
        scores, limits, bounds, listed, counts, blocks, splits,
        K=k, BLOCK=_BLOCK, num_warps=8, **options,
    )  # fmt: skip
    _choose_kernel[(rows,)](
        scores, limits, seqs, listed, counts, page_table, positions, slots, blocks,
        page_table.stride(0), splits,
        K=k, MOST_SPLITS=_MOST_SPLITS, PAGE_SIZE=page_size, BLOCK=_BLOCK,
        FEW=max(_FEW, 2 * power_of_two(k)), MANY=max(_MANY, 4 * power_of_two(k)),
        BLOCK_K=power_of_two(k), num_warps=16, **options,
    )  # fmt: skip


def slots_of(
    positions: torch.Tensor,  # [rows, k] int32
    seqs: torch.Tensor,
    page_table: torch.Tensor,
    slots: torch.Tensor,
    *,
    page_size: int,
) -> None:
    """Where chosen rows are in the pool of another layer group."""
    rows, k = positions.shape
    _slots_kernel[(rows,)](
        positions, seqs, page_table, slots, page_table.stride(0),
        K=k, PAGE_SIZE=page_size, BLOCK_K=power_of_two(k), **pdl_options(slots),
    )  # fmt: skip
