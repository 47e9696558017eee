"""Online softmax: attention over one block of keys at a time, rescaled as the maximum grows."""

from __future__ import annotations

import triton
import triton.language as tl

from cairn.kernels.fp8_tiles import inverse_of, log2_of

LOG2E = tl.constexpr(1.4426950408889634)
LN2 = tl.constexpr(0.6931471805599453)


@triton.jit
def softmax_shares(scores, most, SOME_SEEN: tl.constexpr, value_scale=None):
    """Add the scores of a block of keys; return their weights [rows, keys], what these add to the
    sum of weights [rows, keys], the factor [rows] by which older ones shrink, and the new most.

    scores [rows, keys] are in base 2 and -inf where a row does not see a key. most [rows] is the
    maximum of the keys so far. SOME_SEEN: every row has seen at least one key, this block included.

    If values have scales [keys], the weights are for values without them: they include the scales,
    and so does `most`. They are at most 1 whatever the scales are.
    """
    if value_scale is not None:
        scores += log2_of(value_scale)[None, :]
    new_most = tl.maximum(most, tl.max(scores, 1))
    safe = new_most
    if not SOME_SEEN:
        safe = tl.where(new_most == float("-inf"), 0.0, new_most)
    shares = tl.exp2(scores - safe[:, None])
    fade = tl.exp2(most - safe)
    counted = shares
    if value_scale is not None:
        counted = shares * inverse_of(value_scale)[None, :]
    return shares, counted, fade, new_most


@triton.jit
def softmax_weights(scores, most, total, SOME_SEEN: tl.constexpr, value_scale=None):
    """`softmax_shares` with the sum of weights [rows], total; return the weights, the factor, and
    the updated most and total."""
    shares, counted, fade, most = softmax_shares(scores, most, SOME_SEEN, value_scale)
    return shares, fade, most, total * fade + tl.sum(counted, 1)


@triton.jit
def softmax_step(scores, value, most, total, acc, SOME_SEEN: tl.constexpr, value_scale=None):
    """Add a block of keys with value [keys, dim]; return the updated most, total and acc.

    acc [rows, dim] is the weighted sum of values so far. See `softmax_weights`.
    """
    shares, fade, most, total = softmax_weights(scores, most, total, SOME_SEEN, value_scale)
    acc = acc * fade[:, None]
    acc = tl.dot(shares.to(value.dtype), value, acc, input_precision="ieee")
    return most, total, acc


@triton.jit
def softmax_result(most, total, acc):
    """-> output [rows, dim], log-sum-exp [rows] in base e; zero and -inf if a row saw no key"""
    lse = tl.where(total > 0, (most + tl.log2(total)) * LN2, float("-inf"))
    return acc / tl.where(total > 0, total, 1.0)[:, None], lse
