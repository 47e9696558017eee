"""Attention over selected latent rows, anywhere in the pool: each query has its own list.

A latent row is [latent | rope], as in `latent`: queries are absorbed, values are the first columns.
A program has one query, a tile of its heads, and a part of its list. If there are several parts, a
second kernel merges their results.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from cairn.kernels.fp8_tiles import load_latents, row_size
from cairn.kernels.launch import direct
from cairn.kernels.pdl import pdl_options
from cairn.kernels.processors import processors
from cairn.kernels.sizes import blocks_of
from cairn.kernels.softmax import LOG2E, softmax_result

_TILE = 64  # rows at once, of 16-bit types
_TILE_FLOAT32 = 16
_MERGED = tl.constexpr(8)  # parts that are merged at once


def _block_m(dtype: torch.dtype) -> int:
    """Heads of a product. Tensor cores of an H200 take 64; float32 has none."""
    return 64 if dtype.itemsize == 2 else 16


def most_parts(heads: int, dtype: torch.dtype, device: torch.device) -> int:
    """Parts of all queries of a step: a program fills a multiprocessor."""
    return max(1, processors(device) // blocks_of(heads, _block_m(dtype)))


@direct
@triton.jit(do_not_specialize=["parts", "length"])
def _row_attention_kernel(
    query,  # [rows, HEADS, LATENT + ROPE], contiguous
    pool,  # [slots, LATENT + ROPE], or rows of 8 bits with their scales
    slots,  # [rows, K] int32, -1 for none
    out,  # [rows, HEADS, LATENT]
    partial,  # [rows, parts, HEADS, LATENT] float32
    partial_lse,  # [rows, parts, HEADS] float32
    scale,
    parts: tl.int32,
    length: tl.int32,  # of a part
    K: tl.constexpr,
    HEADS: tl.constexpr,
    LATENT: tl.constexpr,
    ROPE: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    PDL: tl.constexpr,
):
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    BLOCK_L: tl.constexpr = max(16, triton.next_power_of_2(LATENT))
    BLOCK_R: tl.constexpr = max(16, triton.next_power_of_2(ROPE))
    WIDTH: tl.constexpr = LATENT + ROPE
    part = tl.program_id(1)
    row = tl.program_id(2).to(tl.int64)
    head = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)
    valid = head < HEADS
    offs_l = tl.arange(0, BLOCK_L)
    offs_r = tl.arange(0, BLOCK_R)
    offs_n = tl.arange(0, BLOCK_N)
    own = query + (row * HEADS + head)[:, None] * WIDTH
    q = tl.load(own + offs_l[None, :], mask=valid[:, None] & (offs_l < LATENT)[None, :], other=0.0)
    q_rope = tl.load(
        own + LATENT + offs_r[None, :], mask=valid[:, None] & (offs_r < ROPE)[None, :], other=0.0
    )
    most = tl.full((BLOCK_M,), float("-inf"), tl.float32)
    total = tl.zeros((BLOCK_M,), tl.float32)
    acc = tl.zeros((BLOCK_M, BLOCK_L), tl.float32)
    begin = part * length
    end = tl.minimum(begin + length, K)
    listed = slots + row * K
    # Look up slots one tile ahead: a load that depends on another load would stall the loop.
    following = tl.load(listed + begin + offs_n, mask=begin + offs_n < end, other=-1)
    for start in range(begin, end, BLOCK_N):
        slot = following
        n = start + BLOCK_N + offs_n
        following = tl.load(listed + n, mask=n < end, other=-1)
        there = slot >= 0
        kept = pool + slot.to(tl.int64) * row_size(pool, WIDTH)
        k = load_latents(kept, there, query, 0, LATENT, WIDTH, BLOCK_L)
        k_rope = load_latents(kept, there, query, LATENT, ROPE, WIDTH, BLOCK_R)
        # Always true. Without a branch, Triton sees that the second product takes the result of the
        # first, and lets both halves of the warps compute all scores.
        if end > 0:
            scores = tl.dot(q, k.T, input_precision="ieee") * (scale * LOG2E)
            scores += tl.dot(q_rope, k_rope.T, input_precision="ieee") * (scale * LOG2E)
            scores = tl.where(there[None, :], scores, float("-inf"))
            new_most = tl.maximum(most, tl.max(scores, 1))
            safe = tl.where(new_most == float("-inf"), 0.0, new_most)
            weights = tl.exp2(scores - safe[:, None])
            fade = tl.exp2(most - safe)
            total = total * fade + tl.sum(weights, 1)
            shares = weights.to(k.dtype)
            most = new_most
        else:
            shares = tl.full((BLOCK_M, BLOCK_N), scale, tl.float32).to(k.dtype)
            fade = tl.full((BLOCK_M,), scale, tl.float32)
        acc = tl.dot(shares, k, acc * fade[:, None], input_precision="ieee")
    result, lse = softmax_result(most, total, acc)
    mask = valid[:, None] & (offs_l < LATENT)[None, :]
    if parts == 1:
        place = (row * HEADS + head)[:, None] * LATENT + offs_l[None, :]
        tl.store(out + place, result.to(out.dtype.element_ty), mask=mask)
    else:
        at = (row * parts + part) * HEADS + head
        tl.store(partial + at[:, None] * LATENT + offs_l[None, :], result, mask=mask)
        tl.store(partial_lse + at, lse, mask=valid)


@direct
@triton.jit(do_not_specialize=["parts"])
def _row_merge_kernel(
    out,  # [rows, HEADS, LATENT]
    partial,
    partial_lse,
    parts: tl.int32,
    HEADS: tl.constexpr,
    LATENT: tl.constexpr,
    PDL: tl.constexpr,
):
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    head = tl.program_id(0)
    row = tl.program_id(1).to(tl.int64)
    offs_l = tl.arange(0, max(16, triton.next_power_of_2(LATENT)))
    inside = offs_l < LATENT
    most = float("-inf")
    total = 0.0
    merged = tl.zeros(offs_l.shape, tl.float32)
    for start in range(0, parts, _MERGED):
        part = start + tl.arange(0, _MERGED)
        at = (row * parts + part) * HEADS + head
        lse = tl.load(partial_lse + at, mask=part < parts, other=float("-inf"))
        there = lse > float("-inf")  # a part may have nothing to read
        own = tl.load(
            partial + at[:, None] * LATENT + offs_l[None, :],
            mask=there[:, None] & inside[None, :],
            other=0.0,
        )
        new_most = tl.maximum(most, tl.max(lse, 0))
        safe = tl.where(new_most == float("-inf"), 0.0, new_most)
        fade = tl.exp(most - safe)
        weight = tl.exp(lse - safe)
        merged = merged * fade + tl.sum(own.to(tl.float32) * weight[:, None], 0)
        total = total * fade + tl.sum(weight, 0)
        most = new_most
    merged = merged / tl.where(total > 0, total, 1.0)
    tl.store(
        out + (row * HEADS + head) * LATENT + offs_l, merged.to(out.dtype.element_ty), mask=inside
    )


def row_attention(
    query: torch.Tensor,  # [rows, heads, latent + rope], contiguous
    pool: torch.Tensor,  # [pages, page_size, latent + rope], or packed rows of 8 bits
    slots: torch.Tensor,  # [rows, k] int32, -1 for none
    out: torch.Tensor,  # [rows, heads, latent], contiguous
    *,
    scale: float,
) -> None:
    """Attention of each query over the rows of its list, in any order. An empty list gives zero."""
    rows, heads, width = query.shape
    latent, k, half = out.shape[2], slots.shape[1], query.dtype.itemsize == 2
    block_m, block_n = _block_m(query.dtype), _TILE if half else _TILE_FLOAT32
    tiles = blocks_of(k, block_n)
    parts = min(tiles, max(1, most_parts(heads, query.dtype, query.device) // rows))
    length = blocks_of(tiles, parts) * block_n
    parts = blocks_of(k, length)
    results = rows * parts * heads if parts > 1 else 1
    partial = torch.empty(results, latent, dtype=torch.float32, device=query.device)
    partial_lse = torch.empty(results, dtype=torch.float32, device=query.device)
    _row_attention_kernel[(blocks_of(heads, block_m), parts, rows)](
        query, pool, slots, out, partial, partial_lse, scale, parts, length,
        K=k, HEADS=heads, LATENT=latent, ROPE=width - latent, BLOCK_M=block_m, BLOCK_N=block_n,
        num_warps=8 if half else 4, num_stages=2 if half else 1, **pdl_options(query),
    )  # fmt: skip
    if parts > 1:
        _row_merge_kernel[(heads, rows)](
            out, partial, partial_lse, parts, HEADS=heads, LATENT=latent, **pdl_options(out)
        )
