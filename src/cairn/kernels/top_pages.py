"""Of many ranks the best k, ties to the earlier place: the part that all selection kernels share.

There is no sort. Ranks are mapped to integers of the same order, and the k-th largest is found by
search: each step counts the ranks above three thresholds, in one sum over what a program holds
anyway, and keeps a quarter of the range.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def order_key(rank):
    """int32 with the order of the float32 `rank`."""
    bits = rank.to(tl.int32, bitcast=True)
    return bits ^ ((bits >> 31) & 0x7FFFFFFF)


@triton.jit
def _reached(key, valid, threshold):
    return (valid & (key >= threshold)).to(tl.int64)


@triton.jit
def _narrow(low, high, wanted, first, second, third, packed):
    """The range after a step: at least `wanted` keys are >= low, fewer are > high."""
    one, two, three = packed & 0x1FFFFF, (packed >> 21) & 0x1FFFFF, packed >> 42
    new_low = tl.where(one >= wanted, first, low)
    new_low = tl.where(two >= wanted, second, new_low)
    new_low = tl.where(three >= wanted, third, new_low)
    new_high = tl.where(three < wanted, third - 1, high)
    new_high = tl.where(two < wanted, second - 1, new_high)
    new_high = tl.where(one < wanted, first - 1, new_high)
    # Exactly as many as wanted: that is the threshold.
    exact = (one == wanted) | (two == wanted) | (three == wanted)
    new_high = tl.where(exact, new_low, new_high)
    return new_low, new_high


@triton.jit
def keep_best(rank, K: tl.constexpr):
    """rank [n] -> which of them are among the best K above -inf, [n]"""
    valid = rank > float("-inf")
    key = order_key(rank)
    wanted = tl.minimum(tl.sum(valid.to(tl.int32)), K)
    low = tl.min(tl.where(valid, key, 0x7FFFFFFF)).to(tl.int64)
    high = tl.max(tl.where(valid, key, -0x7FFFFFFF)).to(tl.int64)
    while low < high:
        span = high - low
        first, second, third = (
            low + ((span + 3) >> 2),
            low + ((2 * span + 3) >> 2),
            low + ((3 * span + 3) >> 2),
        )
        packed = tl.sum(
            _reached(key, valid, first.to(tl.int32))
            + (_reached(key, valid, second.to(tl.int32)) << 21)
            + (_reached(key, valid, third.to(tl.int32)) << 42)
        )
        low, high = _narrow(low, high, wanted, first, second, third, packed)
    least = low.to(tl.int32)
    above = valid & (key > least)
    equal = (valid & (key == least)).to(tl.int32)
    room = wanted - tl.sum(above.to(tl.int32))
    return above | ((equal > 0) & (tl.cumsum(equal, 0) <= room))


@triton.jit
def keep_best_of_rows(rank, K: tl.constexpr):
    """rank [rows, n] -> which are among the best K of their row above -inf, [rows, n]"""
    valid = rank > float("-inf")
    key = order_key(rank)
    wanted = tl.minimum(tl.sum(valid.to(tl.int32), 1), K)
    low = tl.min(tl.where(valid, key, 0x7FFFFFFF), 1).to(tl.int64)
    high = tl.max(tl.where(valid, key, -0x7FFFFFFF), 1).to(tl.int64)
    while tl.max(high - low) > 0:
        span = tl.maximum(high - low, 0)
        first, second, third = (
            low + ((span + 3) >> 2),
            low + ((2 * span + 3) >> 2),
            low + ((3 * span + 3) >> 2),
        )
        packed = tl.sum(
            _reached(key, valid, first.to(tl.int32)[:, None])
            + (_reached(key, valid, second.to(tl.int32)[:, None]) << 21)
            + (_reached(key, valid, third.to(tl.int32)[:, None]) << 42),
            1,
        )
        new_low, new_high = _narrow(low, high, wanted, first, second, third, packed)
        searching = low < high
        low = tl.where(searching, new_low, low)
        high = tl.where(searching, new_high, high)
    least = low.to(tl.int32)[:, None]
    above = valid & (key > least)
    equal = (valid & (key == least)).to(tl.int32)
    room = wanted - tl.sum(above.to(tl.int32), 1)
    return above | ((equal > 0) & (tl.cumsum(equal, 1) <= room[:, None]))
