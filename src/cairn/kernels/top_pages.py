"""Finds the best k of many ranks, ties to the earlier place. All selection kernels share this.

It does not sort. Ranks are mapped to integers of the same order, and a search finds the k-th
largest. Each step counts the ranks that reach three thresholds, in one sum over data that the
program holds anyway, and keeps a quarter of the range.
"""

from __future__ import annotations

import triton
import triton.language as tl

MOST_FEW = tl.constexpr(1023)
"""Counts up to this fit in ten bits and are packed more tightly."""


@triton.jit
def order_key(rank):
    """-> int32 keys that order like the float32 `rank`"""
    bits = rank.to(tl.int32, bitcast=True)
    return bits ^ ((bits >> 31) & 0x7FFFFFFF)


@triton.jit
def order_key_rank(key):
    """-> the float32 whose `order_key` is `key`"""
    return (key ^ ((key >> 31) & 0x7FFFFFFF)).to(tl.float32, bitcast=True)


@triton.jit
def entry_key(entry):
    """-> the order key of the rank whose bits are the upper half of the int64 `entry`"""
    return order_key((entry >> 32).to(tl.int32).to(tl.float32, bitcast=True))


@triton.jit
def pack_counts(one, two, three, FEW: tl.constexpr):
    """Pack three booleans so that a sum gives three counts: ten bits each if FEW, else 21."""
    if FEW:
        packed = one.to(tl.int32) + (two.to(tl.int32) << 10) + (three.to(tl.int32) << 20)
    else:
        packed = one.to(tl.int64) + (two.to(tl.int64) << 21) + (three.to(tl.int64) << 42)
    return packed


@triton.jit
def narrow(low, high, wanted, SLACK: tl.constexpr, cuts, packed, FEW: tl.constexpr):
    """-> the range after a search step. At least `wanted` keys are >= low and fewer are > high,
    until the two meet."""
    first, second, third = cuts
    BITS: tl.constexpr = 10 if FEW else 21
    one, two, three = _field(packed, 0, BITS), _field(packed, 1, BITS), _field(packed, 2, BITS)
    new_low = tl.where(one >= wanted, first, low)
    new_low = tl.where(two >= wanted, second, new_low)
    new_low = tl.where(three >= wanted, third, new_low)
    new_high = tl.where(three < wanted, third - 1, high)
    new_high = tl.where(two < wanted, second - 1, new_high)
    new_high = tl.where(one < wanted, first - 1, new_high)
    # A cut that `wanted` keys reach, or up to SLACK more, is the threshold.
    most = wanted + SLACK
    found = (one >= wanted) & (one <= most)
    found |= (two >= wanted) & (two <= most)
    found |= (three >= wanted) & (three <= most)
    return new_low, tl.where(found, new_low, new_high)


@triton.jit
def _field(packed, index: tl.constexpr, BITS: tl.constexpr):
    return (packed >> (index * BITS)) & ((1 << BITS) - 1)


@triton.jit
def keep_best(rank, K: tl.constexpr):
    """rank [n] -> [n] mask of the best K ranks above -inf"""
    FEW: tl.constexpr = rank.shape[0] <= MOST_FEW
    valid = rank > float("-inf")
    key = order_key(rank)
    wanted = tl.minimum(tl.sum(valid.to(tl.int32)), K)
    low = tl.min(tl.where(valid, key, 0x7FFFFFFF)).to(tl.int64)
    high = tl.max(tl.where(valid, key, -0x7FFFFFFF)).to(tl.int64)
    while low < high:
        cuts = cuts_of(low, high)
        first, second, third = cuts
        one = valid & (key >= first.to(tl.int32))
        two = valid & (key >= second.to(tl.int32))
        three = valid & (key >= third.to(tl.int32))
        packed = tl.sum(pack_counts(one, two, three, FEW))
        low, high = narrow(low, high, wanted, 0, cuts, packed, FEW)
    least = low.to(tl.int32)
    above = valid & (key > least)
    equal = (valid & (key == least)).to(tl.int32)
    room = wanted - tl.sum(above.to(tl.int32))
    return above | ((equal > 0) & (tl.cumsum(equal, 0) <= room))


@triton.jit
def threshold_of_rows(rank, K: tl.constexpr, SLACK: tl.constexpr = 0):
    """rank [rows, n] -> [rows] threshold that at least K ranks of the row reach and at most
    K + SLACK exceed; -inf if the row has fewer than K"""
    FEW: tl.constexpr = rank.shape[1] <= MOST_FEW
    valid = rank > float("-inf")
    key = order_key(rank)
    low = tl.min(tl.where(valid, key, 0x7FFFFFFF), 1).to(tl.int64)
    high = tl.max(tl.where(valid, key, -0x7FFFFFFF), 1).to(tl.int64)
    while tl.max(high - low) > 0:
        cuts = cuts_of(low, high)
        packed = tl.sum(_reached_cuts(key, valid, cuts, FEW), 1)
        low, high = _narrow_searching(low, high, K, SLACK, cuts, packed, FEW)
    enough = tl.sum(valid.to(tl.int32), 1) >= K
    return tl.where(enough, order_key_rank(low.to(tl.int32)), float("-inf"))


@triton.jit
def threshold_in_memory(entries, count, K: tl.constexpr, BLOCK: tl.constexpr, FEW: tl.constexpr):
    """-> [rows] key that at least K entries of the row reach and at most K exceed; the smallest key
    if there are no more than K.

    entries [rows, 1] points to each row's entries and count [rows] is their number, at most
    MOST_FEW if FEW. The upper half of an entry is the bits of its rank.
    """
    column = tl.arange(0, BLOCK)[None, :]
    low = tl.full(count.shape, 0x7FFFFFFF, tl.int64)
    high = tl.full(count.shape, -0x7FFFFFFF, tl.int64)
    for start in range(0, tl.max(count), BLOCK):
        there = start + column < count[:, None]
        key = entry_key(tl.load(entries + start + column, mask=there, other=0)).to(tl.int64)
        low = tl.minimum(low, tl.min(tl.where(there, key, 0x7FFFFFFF), 1))
        high = tl.maximum(high, tl.max(tl.where(there, key, -0x7FFFFFFF), 1))
    high = tl.where(count <= K, low, high)
    while tl.max(high - low) > 0:
        cuts = cuts_of(low, high)
        packed = tl.zeros(count.shape, tl.int32 if FEW else tl.int64)
        for start in range(0, tl.max(count), BLOCK):
            there = start + column < count[:, None]
            key = entry_key(tl.load(entries + start + column, mask=there, other=0))
            packed += tl.sum(_reached_cuts(key, there, cuts, FEW), 1)
        low, high = _narrow_searching(low, high, K, 0, cuts, packed, FEW)
    return low.to(tl.int32)


@triton.jit
def cuts_of(low, high):
    span = tl.maximum(high - low, 0)
    return low + ((span + 3) >> 2), low + ((2 * span + 3) >> 2), low + ((3 * span + 3) >> 2)


@triton.jit
def _reached_cuts(key, valid, cuts, FEW: tl.constexpr):
    """-> [rows, n] packed booleans: whether key [rows, n] reaches each of its row's three cuts"""
    first, second, third = cuts
    return pack_counts(
        valid & (key >= first.to(tl.int32)[:, None]),
        valid & (key >= second.to(tl.int32)[:, None]),
        valid & (key >= third.to(tl.int32)[:, None]),
        FEW,
    )


@triton.jit
def _narrow_searching(low, high, wanted, SLACK: tl.constexpr, cuts, packed, FEW: tl.constexpr):
    new_low, new_high = narrow(low, high, wanted, SLACK, cuts, packed, FEW)
    searching = low < high
    return tl.where(searching, new_low, low), tl.where(searching, new_high, high)
