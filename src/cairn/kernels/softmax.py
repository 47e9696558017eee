"""One step of attention that runs along the keys: what came before fades as larger scores come."""

from __future__ import annotations

import triton
import triton.language as tl

LOG2E = tl.constexpr(1.4426950408889634)
LN2 = tl.constexpr(0.6931471805599453)


@triton.jit
def softmax_step(scores, value, most, total, acc, SOME_SEEN: tl.constexpr):
    """scores [rows, keys] in base 2, -inf where a row does not see a key; value [keys, dim].

    most, total [rows] and acc [rows, dim] are those of the keys so far -> the same, with these.
    SOME_SEEN: every row has seen a key by now.
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
    """-> output [rows, dim], log-sum-exp [rows] in base e; zero and -inf where nothing was seen"""
    lse = tl.where(total > 0, (most + tl.log2(total)) * LN2, float("-inf"))
    return acc / tl.where(total > 0, total, 1.0)[:, None], lse
