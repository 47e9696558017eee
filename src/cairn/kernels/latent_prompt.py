"""Causal attention of a long chunk of one sequence over keys and values made from latent rows.

A key is [nope | rope]: the first part is a head's own, the second is the same for all heads.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from cairn.kernels.launch import direct
from cairn.kernels.sizes import blocks_of
from cairn.kernels.softmax import LOG2E, softmax_result, softmax_step


@triton.jit
def _load(base, rows, there, stride, WIDTH: tl.constexpr, BLOCK: tl.constexpr):
    """-> [rows, BLOCK], zero beyond WIDTH and for rows that are not there"""
    column = tl.arange(0, BLOCK)
    mask = there[:, None] & (column < WIDTH)[None, :]
    return tl.load(base + rows[:, None] * stride + column[None, :], mask=mask, other=0.0)


@direct
@triton.jit(do_not_specialize=["rows", "length"])
def _latent_prompt_kernel(
    query,  # [rows, heads, NOPE + ROPE]
    keys,  # [length, heads, NOPE]
    ropes,  # [length, ...], the last ROPE columns of latent rows
    values,  # [length, heads, VALUE]
    out,  # [rows, heads, VALUE]
    scale,
    rows: tl.int32,
    length: tl.int32,
    query_stride,
    rope_stride,
    out_stride,
    NOPE: tl.constexpr,
    ROPE: tl.constexpr,
    VALUE: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    BLOCK_K: tl.constexpr = max(16, triton.next_power_of_2(NOPE))
    BLOCK_R: tl.constexpr = max(16, triton.next_power_of_2(ROPE))
    BLOCK_V: tl.constexpr = max(16, triton.next_power_of_2(VALUE))
    head = tl.program_id(0)
    key_stride = tl.num_programs(0) * NOPE
    value_stride = tl.num_programs(0) * VALUE
    begin = (tl.num_programs(1) - 1 - tl.program_id(1)) * BLOCK_M  # the longest first
    past = length - rows
    offs_m = begin + tl.arange(0, BLOCK_M)
    offs_n = tl.arange(0, BLOCK_N)
    here = offs_m < rows
    row = offs_m.to(tl.int64)
    own = query + head * (NOPE + ROPE)
    q = _load(own, row, here, query_stride, NOPE, BLOCK_K)
    q_rope = _load(own + NOPE, row, here, query_stride, ROPE, BLOCK_R)
    key = keys + head * NOPE
    value = values + head * VALUE
    most = tl.full((BLOCK_M,), float("-inf"), tl.float32)
    total = tl.zeros((BLOCK_M,), tl.float32)
    acc = tl.zeros((BLOCK_M, BLOCK_V), tl.float32)
    position = past + offs_m
    clear = (past + begin + 1) // BLOCK_N * BLOCK_N  # tiles before it need no mask
    end = tl.minimum(past + begin + BLOCK_M, length)
    for start in range(0, clear, BLOCK_N):
        n = (start + offs_n).to(tl.int64)
        there = n >= 0
        k = _load(key, n, there, key_stride, NOPE, BLOCK_K)
        k_rope = _load(ropes, n, there, rope_stride, ROPE, BLOCK_R)
        v = _load(value, n, there, value_stride, VALUE, BLOCK_V)
        scores = tl.dot(q, k.T, input_precision="ieee")
        scores = tl.dot(q_rope, k_rope.T, scores, input_precision="ieee") * (scale * LOG2E)
        most, total, acc = softmax_step(scores, v, most, total, acc, True)
    for start in range(clear, end, BLOCK_N):
        n = (start + offs_n).to(tl.int64)
        there = n < end
        k = _load(key, n, there, key_stride, NOPE, BLOCK_K)
        k_rope = _load(ropes, n, there, rope_stride, ROPE, BLOCK_R)
        v = _load(value, n, there, value_stride, VALUE, BLOCK_V)
        scores = tl.dot(q, k.T, input_precision="ieee")
        scores = tl.dot(q_rope, k_rope.T, scores, input_precision="ieee") * (scale * LOG2E)
        scores = tl.where(n[None, :] <= position[:, None], scores, float("-inf"))
        most, total, acc = softmax_step(scores, v, most, total, acc, False)
    result, _ = softmax_result(most, total, acc)
    column = tl.arange(0, BLOCK_V)
    place = out + row[:, None] * out_stride + head * VALUE + column[None, :]
    mask = here[:, None] & (column < VALUE)[None, :]
    tl.store(place, result.to(out.dtype.element_ty), mask=mask)


def latent_prompt(
    query: torch.Tensor,  # [rows, heads, nope + rope], heads contiguous
    keys: torch.Tensor,  # [length, heads, nope], contiguous
    ropes: torch.Tensor,  # [length, rope]
    values: torch.Tensor,  # [length, heads, value], contiguous
    out: torch.Tensor,  # [rows, heads, value], heads contiguous
    *,
    scale: float,
) -> None:
    """Attention of the last `rows` of `length` rows."""
    rows, heads, _ = query.shape
    half = query.dtype.itemsize == 2
    block_m, block_n = (128, 64) if half else (32, 16)
    _latent_prompt_kernel[(heads, blocks_of(rows, block_m))](
        query, keys, ropes, values, out, scale, rows, len(keys), query.stride(0), ropes.stride(0),
        out.stride(0), NOPE=keys.shape[2], ROPE=ropes.shape[1], VALUE=values.shape[2],
        BLOCK_M=block_m, BLOCK_N=block_n,
        num_warps=8 if half else 4, num_stages=3 if half else 2,
    )  # fmt: skip
