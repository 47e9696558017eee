"""Online softmax: attention over one block of keys at a time, rescaled as the maximum grows."""

from __future__ import annotations

import triton
import triton.language as tl

LOG2E = tl.constexpr(1.4426950408889634)
LN2 = tl.constexpr(0.6931471805599453)


@triton.jit
def softmax_step(scores, value, most, total, acc, SOME_SEEN: tl.constexpr):
    """Add a block of keys; return the updated most, total and acc.

    scores [rows, keys] are in base 2 and -inf where a row does not see a key; value [keys, dim].
    most and total [rows] and acc [rows, dim] cover the keys so far: maximum, sum of weights, and
    weighted sum of values. SOME_SEEN: every row has seen at least one key, this block included.
    """
    new_most = tl.maximum(most, tl.max(scores, 1))
    safe = new_most
    if not SOME_SEEN:
        safe = tl.where(new_most == float("-inf"), 0.0, new_most)
    shares = tl.exp2(scores - safe[:, None])
    fade = tl.exp2(most - safe)
    total = total * fade + tl.sum(shares, 1)
    acc = acc * fade[:, None]
    acc = tl.dot(shares.to(value.dtype), value, acc, input_precision="ieee")
    return new_most, total, acc


@triton.jit
def softmax_result(most, total, acc):
    """-> output [rows, dim], log-sum-exp [rows] in base e; zero and -inf if a row saw no key"""
    lse = tl.where(total > 0, (most + tl.log2(total)) * LN2, float("-inf"))
    return acc / tl.where(total > 0, total, 1.0)[:, None], lse
