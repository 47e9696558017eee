"""Samples one token per row from its logits, entirely on the device.

The vocabulary is cut into blocks. One kernel computes each block's largest logit and the sum of its
weights exp(logit / temperature). Another draws a block by these sums, then a token within it. Both
random numbers are hashes of the row's seed, so a row's draw does not depend on the other rows of
the batch. Temperature zero takes the largest logit, and the lowest token id among equals.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from cairn.kernels.launch import direct
from cairn.kernels.sizes import blocks_of

_BLOCK = 4096
_LOG2_E: tl.constexpr = tl.constexpr(1.4426950408889634)
_NO_TOKEN: tl.constexpr = tl.constexpr(2147483647)


@triton.jit
def _uniform32(first, second):
    mixed = _mix32(_mix32(first) + second)
    return (mixed >> 8).to(tl.float32) * (1.0 / 16777216.0)


@triton.jit
def _mix32(x):
    x = x ^ (x >> 16)
    x = x * 0x7FEB352D
    x = x ^ (x >> 15)
    x = x * 0x846CA68B
    return x ^ (x >> 16)


@triton.jit
def _draw_index(weights, uniform, LENGTH: tl.constexpr):
    """First index where the running sum exceeds uniform * total; its weight is not zero."""
    index = tl.arange(0, LENGTH)
    passed = (tl.cumsum(weights, 0) > uniform * tl.sum(weights, 0)) & (weights > 0)
    first = tl.min(tl.where(passed, index, LENGTH), 0)
    last = tl.max(tl.where(weights > 0, index, 0), 0)  # used if rounding lets none pass
    return tl.minimum(first, last)


@direct
@triton.jit
def _blocks_kernel(
    logits,
    temperatures,
    best,  # [rows, blocks]
    best_token,  # [rows, blocks]
    sums,  # [rows, blocks] sums of weights, relative to the block's largest logit
    stride,
    VOCAB: tl.constexpr,
    BLOCKS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    block = tl.program_id(1)
    token = block * BLOCK + tl.arange(0, BLOCK)
    mask = token < VOCAB
    value = tl.load(logits + row * stride + token, mask=mask, other=float("-inf")).to(tl.float32)
    most = tl.max(value, 0)
    temperature = tl.load(temperatures + row)
    place = row * BLOCKS + block
    tl.store(best + place, most)
    if temperature > 0:
        base = tl.where(most == float("-inf"), 0.0, most)
        tl.store(sums + place, tl.sum(tl.exp2((value - base) * (_LOG2_E / temperature)), 0))
    else:
        tl.store(best_token + place, tl.min(tl.where(value == most, token, VOCAB), 0))


@direct
@triton.jit
def _pick_kernel(
    logits,
    temperatures,
    seeds,
    best,
    best_token,
    sums,
    tokens,
    newest,
    into,  # [rows]
    stride,
    VOCAB: tl.constexpr,
    BLOCKS: tl.constexpr,
    BLOCK: tl.constexpr,
    KEEP: tl.constexpr,  # store tokens in `newest` too, at the places `into`
):
    row = tl.program_id(0).to(tl.int64)
    PADDED: tl.constexpr = triton.next_power_of_2(BLOCKS)
    blocks = tl.arange(0, PADDED)
    mask = blocks < BLOCKS
    own = tl.load(best + row * BLOCKS + blocks, mask=mask, other=float("-inf"))
    most = tl.max(own, 0)
    temperature = tl.load(temperatures + row)
    if temperature > 0:
        seed = tl.load(seeds + row)
        low = (seed & 0xFFFFFFFF).to(tl.uint32)
        high = ((seed >> 32) & 0xFFFFFFFF).to(tl.uint32)
        scale = _LOG2_E / temperature
        weights = tl.load(sums + row * BLOCKS + blocks, mask=mask, other=0.0)
        weights *= tl.exp2((own - most) * scale)
        block = _draw_index(weights, _uniform32(low, high), PADDED)
        token = block * BLOCK + tl.arange(0, BLOCK)
        value = tl.load(logits + row * stride + token, mask=token < VOCAB, other=float("-inf"))
        within = tl.exp2((value.to(tl.float32) - most) * scale)
        chosen = block * BLOCK + _draw_index(within, _uniform32(high, low), BLOCK)
    else:
        places = tl.load(best_token + row * BLOCKS + blocks, mask=mask, other=_NO_TOKEN)
        chosen = tl.min(tl.where(own == most, places, _NO_TOKEN), 0)
    tl.store(tokens + row, chosen.to(tl.int64))
    if KEEP:
        tl.store(newest + tl.load(into + row), chosen.to(tl.int64))


def sample(
    logits: torch.Tensor,  # [rows, vocab]
    temperatures: torch.Tensor,  # [rows] float32; 0 takes the most likely token
    seeds: torch.Tensor,  # [rows] int64, derived from request and position
    newest: torch.Tensor | None = None,  # int64, gets the tokens
    places: torch.Tensor | None = None,  # [rows] where in `newest`
) -> torch.Tensor:
    """-> token ids [rows] int64"""
    rows, vocab = logits.shape
    blocks = blocks_of(vocab, _BLOCK)
    best = torch.empty(rows, blocks, dtype=torch.float32, device=logits.device)
    sums = torch.empty_like(best)
    best_token = torch.empty(rows, blocks, dtype=torch.int32, device=logits.device)
    tokens = torch.empty(rows, dtype=torch.int64, device=logits.device)
    given = (best, best_token, sums)
    stride = logits.stride(0)
    sizes = {"VOCAB": vocab, "BLOCKS": blocks, "BLOCK": _BLOCK}
    _blocks_kernel[(rows, blocks)](logits, temperatures, *given, stride, **sizes, num_warps=8)
    keep = (tokens, tokens) if newest is None or places is None else (newest, places)
    _pick_kernel[(rows,)](
        *(logits, temperatures, seeds, *given, tokens, *keep, stride),
        **sizes,
        KEEP=newest is not None,
        num_warps=8,
    )
    return tokens
