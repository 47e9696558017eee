"""The work between projections and attention over latent rows, in one pass over the new rows.

Heads of queries are rotated in place. The latent row, or the key of an index, is normed, rotated
and written to its page.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from cairn.kernels.interface import Normed
from cairn.kernels.launch import direct
from cairn.kernels.pdl import pdl_options
from cairn.kernels.sizes import blocks_of, power_of_two

_HEADS = 16  # of a program


@triton.jit
def _rotated(low, high, cos, sin, row, j, ROPE: tl.constexpr, there):
    """Both halves of rotated columns; `sin` has the sign of the exchange."""
    at = row * ROPE + j
    low_cos = tl.load(cos + at, mask=there, other=0.0).to(tl.float32)
    low_sin = tl.load(sin + at, mask=there, other=0.0).to(tl.float32)
    high_cos = tl.load(cos + at + ROPE // 2, mask=there, other=0.0).to(tl.float32)
    high_sin = tl.load(sin + at + ROPE // 2, mask=there, other=0.0).to(tl.float32)
    return low * low_cos + high * low_sin, high * high_cos + low * high_sin


@direct
@triton.jit
def _rope_latent_kernel(
    query,  # [rows, HEADS, DIM], rotated in place
    latent,  # [rows, WIDTH]
    key,  # [rows, ROPE], unless KEYS
    cos,  # [rows, ROPE]
    sin,  # [rows, ROPE], first half negated
    weight,  # [WIDTH]
    bias,  # [WIDTH], if KEYS
    eps,
    pool,  # [pages, PAGE_SIZE, WIDTH, or WIDTH + ROPE unless KEYS]
    pages,  # [rows]
    offsets,  # [rows]
    stride,
    HEADS: tl.constexpr,
    DIM: tl.constexpr,
    FIRST: tl.constexpr,  # column of a head that is rotated first
    ROPE: tl.constexpr,
    WIDTH: tl.constexpr,
    PAGE_SIZE: tl.constexpr,
    KEYS: tl.constexpr,  # keys of an index
    BLOCK_H: tl.constexpr,
    BLOCK_W: tl.constexpr,  # at least WIDTH
    BLOCK_R: tl.constexpr,  # at least ROPE // 2
    PDL: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    HALF: tl.constexpr = ROPE // 2
    j = tl.arange(0, BLOCK_R)
    there = j < HALF
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    if tl.program_id(1) > 0:
        h = (tl.program_id(1) - 1) * BLOCK_H + tl.arange(0, BLOCK_H)
        place = query + (row * HEADS + h)[:, None] * DIM + FIRST + j[None, :]
        mask = (h < HEADS)[:, None] & there[None, :]
        # A thread has both columns of a pair, so that no other needs what it overwrites.
        low = tl.load(place, mask=mask, other=0.0).to(tl.float32)
        high = tl.load(place + HALF, mask=mask, other=0.0).to(tl.float32)
        low, high = _rotated(low, high, cos, sin, row, j[None, :], ROPE, there[None, :])
        tl.store(place, low.to(query.dtype.element_ty), mask=mask)
        tl.store(place + HALF, high.to(query.dtype.element_ty), mask=mask)
        return
    KEPT: tl.constexpr = WIDTH if KEYS else WIDTH + ROPE
    page = tl.load(pages + row).to(tl.int64)
    target = pool + (page * PAGE_SIZE + tl.load(offsets + row)) * KEPT
    w = tl.arange(0, BLOCK_W)
    inside = w < WIDTH
    source = latent + row * stride
    value = tl.load(source + w, mask=inside, other=0.0).to(tl.float32)
    factor = tl.load(weight + w, mask=inside, other=0.0).to(tl.float32)
    if KEYS:
        mean = tl.sum(value) / WIDTH
        apart = tl.where(inside, value - mean, 0.0)
        scale = tl.rsqrt(tl.sum(apart * apart) / WIDTH + eps)
        shift = tl.load(bias + w, mask=inside, other=0.0).to(tl.float32)
        normed = apart * scale * factor + shift
        tl.store(target + w, normed.to(pool.dtype.element_ty), mask=inside & (w >= ROPE))
        low = (tl.load(source + j, mask=there, other=0.0).to(tl.float32) - mean) * scale
        low *= tl.load(weight + j, mask=there, other=0.0).to(tl.float32)
        low += tl.load(bias + j, mask=there, other=0.0).to(tl.float32)
        at = HALF + j
        high = (tl.load(source + at, mask=there, other=0.0).to(tl.float32) - mean) * scale
        high *= tl.load(weight + at, mask=there, other=0.0).to(tl.float32)
        high += tl.load(bias + at, mask=there, other=0.0).to(tl.float32)
        rotated = target
    else:
        scale = tl.rsqrt(tl.sum(value * value) / WIDTH + eps)
        tl.store(target + w, (value * scale * factor).to(pool.dtype.element_ty), mask=inside)
        low = tl.load(key + row * stride + j, mask=there, other=0.0).to(tl.float32)
        high = tl.load(key + row * stride + HALF + j, mask=there, other=0.0).to(tl.float32)
        rotated = target + WIDTH
    low, high = _rotated(low, high, cos, sin, row, j, ROPE, there)
    tl.store(rotated + j, low.to(pool.dtype.element_ty), mask=there)
    tl.store(rotated + HALF + j, high.to(pool.dtype.element_ty), mask=there)


def rope_latent(
    query: torch.Tensor,  # [rows, heads, dim], contiguous; rotated in place
    first: int,  # column of a head that is rotated first
    cos_sin: tuple[torch.Tensor, torch.Tensor],  # [rows, 1, rope] each, contiguous
    stored: Normed,
    pool: torch.Tensor,  # [pages, page_size, width of a stored row], of the query's type
    pages: torch.Tensor,  # [rows]
    offsets: torch.Tensor,  # [rows]
) -> None:
    (rows, heads, dim), (cos, sin) = query.shape, cos_sin
    rope, width, keys = cos.shape[-1], stored.row.shape[1], stored.key is None
    assert keys == (stored.bias is not None) and query.is_contiguous() and pool.is_contiguous()
    assert stored.key is None or stored.key.stride(0) == stored.row.stride(0)
    _rope_latent_kernel[(rows, 1 + blocks_of(heads, _HEADS))](
        query,
        stored.row,
        stored.row if stored.key is None else stored.key,
        cos,
        sin,
        stored.weight,
        stored.weight if stored.bias is None else stored.bias,
        stored.eps,
        pool,
        pages,
        offsets,
        stored.row.stride(0),
        HEADS=heads,
        DIM=dim,
        FIRST=first,
        ROPE=rope,
        WIDTH=width,
        PAGE_SIZE=pool.shape[1],
        KEYS=keys,
        BLOCK_H=_HEADS,
        BLOCK_W=power_of_two(width),
        BLOCK_R=power_of_two(rope // 2),
        num_warps=4,
        **pdl_options(query),
    )
