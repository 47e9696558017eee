"""Of many ranks the best k, ties to the earlier place: the part that all selection kernels share.

There is no sort. Ranks are mapped to integers of the same order, and the k-th largest is found by
bisection, whose steps are sums over the ranks a program holds anyway.
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
def keep_best(rank, K: tl.constexpr):
    """rank [n] -> which of them are among the best K above -inf, [n]"""
    valid = rank > float("-inf")
    key = order_key(rank)
    wanted = tl.minimum(tl.sum(valid.to(tl.int32)), K)
    low = tl.min(tl.where(valid, key, 0x7FFFFFFF)).to(tl.int64)
    high = tl.max(tl.where(valid, key, -0x7FFFFFFF)).to(tl.int64)
    # At least `wanted` keys are >= low, fewer are > high.
    while low < high:
        middle = (low + high + 1) >> 1
        count = tl.sum((valid & (key >= middle.to(tl.int32))).to(tl.int32))
        high = tl.where(count == wanted, middle, tl.where(count > wanted, high, middle - 1))
        low = tl.where(count >= wanted, middle, low)
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
        middle = (low + high + 1) >> 1
        reached = valid & (key >= middle.to(tl.int32)[:, None])
        count = tl.sum(reached.to(tl.int32), 1)
        open_ = low < high
        new_high = tl.where(count == wanted, middle, tl.where(count > wanted, high, middle - 1))
        high = tl.where(open_, new_high, high)
        low = tl.where(open_ & (count >= wanted), middle, low)
    least = low.to(tl.int32)[:, None]
    above = valid & (key > least)
    equal = (valid & (key == least)).to(tl.int32)
    room = wanted - tl.sum(above.to(tl.int32), 1)
    return above | ((equal > 0) & (tl.cumsum(equal, 1) <= room[:, None]))
