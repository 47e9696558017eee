"""The work between projections and attention, in one pass over the rows.

It applies norm and rotation to query and key heads and writes keys and values to their pages. The
queries that score pages get norm and rotation in the same pass. For keys of e4m3 it also
multiplies query and key heads by a Hadamard matrix, and adds up the queries that read a key, for
its scale (see `fp8_rows`).
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from cairn.kernels.fp8_rows import FP8, page_rows, takes_hadamard
from cairn.kernels.fp8_tiles import best_scale, has_scales, is_int8, narrow, slice_size
from cairn.kernels.interface import ScoringHeads
from cairn.kernels.launch import direct
from cairn.kernels.pdl import pdl_options
from cairn.kernels.sizes import blocks_of

_SOME_ROWS = 128  # from here on, programs that take more heads still fill the device
_MANY_ROWS = 1024  # the same for several rows


def row_rungs() -> tuple[int, ...]:
    """Row counts at which `rope_kv` switches to another compiled form."""
    return 1, _SOME_ROWS, _MANY_ROWS


@triton.constexpr_function
def _log2(size):
    return size.bit_length() - 1


@triton.jit
def _hadamard(x):
    """-> rows of x [n, size] times the Hadamard matrix of 1 and -1, as `fp8_rows.hadamard` adds"""
    N: tl.constexpr = x.shape[0]
    SIZE: tl.constexpr = x.shape[1]
    for _ in tl.static_range(_log2(SIZE)):
        # Add neighbours. The lowest bit of a column becomes the highest.
        low, high = tl.split(tl.reshape(x, (N, SIZE // 2, 2)))
        x = tl.reshape(tl.permute(tl.join(low + high, low - high), (0, 2, 1)), (N, SIZE))
    return x


@triton.jit
def _sum_of_heads(
    heads,  # [n] pointers to the first head of each sum
    low,  # [half] columns of a head's first half
    read,  # [n, half] what to load; the rest is zero
    eps,
    GROUP: tl.constexpr,  # heads of a sum
    DIM: tl.constexpr,
    NORM: tl.constexpr,
):
    """-> both halves [n, half] float32 of the sum of heads, normalized without a weight"""
    a = tl.zeros(read.shape, tl.float32)
    b = tl.zeros(read.shape, tl.float32)
    for g in tl.static_range(GROUP):
        places = heads[:, None] + g * DIM + low[None, :]
        x = tl.load(places, mask=read, other=0.0).to(tl.float32)
        y = tl.load(places + DIM // 2, mask=read, other=0.0).to(tl.float32)
        if NORM:
            scale = tl.rsqrt(tl.sum(x * x + y * y, 1) / DIM + eps)[:, None]
            x, y = x * scale, y * scale
        a, b = a + x, b + y
    return a, b


@direct
@triton.jit(do_not_specialize=["rows"])
def _rope_kv_kernel(
    qkv,  # [rows, at least (HEADS + 2 * KV_HEADS) * DIM]
    projected,  # [rows, HEADS * DIM], if SCORING
    cos,  # [rows, DIM]
    sin,  # [rows, DIM], first half negated
    q_weight,
    k_weight,
    scoring_weight,
    eps,
    pool,  # [pages, 2 * KV_HEADS, PAGE_SIZE, DIM]
    pages,  # [rows]
    offsets,  # [rows]
    out,  # [rows, HEADS, DIM]
    scoring_out,  # [rows, HEADS, DIM]
    key_scale,  # of rows of 8 bits; 0 for a scale of each row
    value_scale,
    stride,
    projected_stride,
    rows: tl.int32,
    HEADS: tl.constexpr,
    KV_HEADS: tl.constexpr,
    DIM: tl.constexpr,
    PAGE_SIZE: tl.constexpr,
    NORM: tl.constexpr,
    SCORING: tl.constexpr,
    ADD_QUERY: tl.constexpr,
    HADAMARD: tl.constexpr,  # multiply queries and keys by a Hadamard matrix
    BLOCK_H: tl.constexpr,
    ROWS: tl.constexpr,  # rows per program
    PDL: tl.constexpr,
):
    if PDL:
        gdc_launch_dependents()
    HALF: tl.constexpr = DIM // 2
    GROUP: tl.constexpr = HEADS // KV_HEADS
    E4M3: tl.constexpr = has_scales(pool) and not is_int8(pool)
    first_head = tl.program_id(1) * BLOCK_H
    head = first_head + tl.arange(0, BLOCK_H)
    low = tl.arange(0, triton.next_power_of_2(HALF))  # columns of a head's first half
    high = HALF + low
    in_half = low < HALF
    inside = (head < HEADS + 2 * KV_HEADS)[:, None] & in_half[None, :]
    is_query = (head < HEADS)[:, None]
    is_value = ((head >= HEADS + KV_HEADS) & (head < HEADS + 2 * KV_HEADS))[:, None]
    source = head
    with_query = inside
    if SCORING:
        is_scoring = (head >= HEADS + 2 * KV_HEADS) & (head < 2 * HEADS + 2 * KV_HEADS)
        scored = head - (HEADS + 2 * KV_HEADS)
        scores = is_scoring[:, None] & in_half[None, :]
        if ADD_QUERY:
            source = tl.where(is_scoring, scored, head)
            with_query = inside | scores
    if NORM:
        q_low = tl.load(q_weight + low, mask=in_half, other=0.0)[None, :]
        q_high = tl.load(q_weight + high, mask=in_half, other=0.0)[None, :]
        own = tl.load(k_weight + low, mask=in_half, other=0.0)[None, :]
        low_weight = tl.where(is_query, q_low, own)
        own = tl.load(k_weight + high, mask=in_half, other=0.0)[None, :]
        high_weight = tl.where(is_query, q_high, own)
        if SCORING:
            own = tl.load(scoring_weight + low, mask=in_half, other=0.0)[None, :]
            low_weight = tl.where(is_scoring[:, None], own, low_weight)
            own = tl.load(scoring_weight + high, mask=in_half, other=0.0)[None, :]
            high_weight = tl.where(is_scoring[:, None], own, high_weight)
    if PDL:
        gdc_wait()
    for r in tl.static_range(ROWS):
        row = tl.program_id(0).to(tl.int64) * ROWS + r
        there = row < rows
        page = tl.load(pages + row, mask=there, other=0).to(tl.int64)
        offset = tl.load(offsets + row, mask=there, other=0).to(tl.int64)
        read = with_query & there
        base = qkv + row * stride + source[:, None] * DIM
        x = tl.load(base + low[None, :], mask=read, other=0.0).to(tl.float32)
        y = tl.load(base + high[None, :], mask=read, other=0.0).to(tl.float32)
        if SCORING:
            more = scores & there
            base = projected + row * projected_stride + scored[:, None] * DIM
            x += tl.load(base + low[None, :], mask=more, other=0.0).to(tl.float32)
            y += tl.load(base + high[None, :], mask=more, other=0.0).to(tl.float32)
        a, b = x, y
        if NORM:
            scale = tl.rsqrt((tl.sum(x * x, 1) + tl.sum(y * y, 1)) / DIM + eps)[:, None]
            a = x * scale * low_weight.to(tl.float32)
            b = y * scale * high_weight.to(tl.float32)
        known = in_half & there
        low_cos = tl.load(cos + row * DIM + low, mask=known, other=0.0).to(tl.float32)[None, :]
        low_sin = tl.load(sin + row * DIM + low, mask=known, other=0.0).to(tl.float32)[None, :]
        high_cos = tl.load(cos + row * DIM + high, mask=known, other=0.0).to(tl.float32)[None, :]
        high_sin = tl.load(sin + row * DIM + high, mask=known, other=0.0).to(tl.float32)[None, :]
        x = tl.where(is_value, x, a * low_cos + b * low_sin).to(out.dtype.element_ty)
        y = tl.where(is_value, y, b * high_cos + a * high_sin).to(out.dtype.element_ty)
        if HADAMARD and first_head < HEADS + KV_HEADS:  # some are queries or keys
            a, b = _hadamard(x.to(tl.float32)), _hadamard(y.to(tl.float32))
            x = tl.where(is_value, x, ((a + b) * DIM**-0.5).to(x.dtype))
            y = tl.where(is_value, y, ((a - b) * DIM**-0.5).to(y.dtype))
        mask = inside & there
        place = row * (HEADS * DIM) + head[:, None] * DIM
        tl.store(out + place + low[None, :], x, mask=mask & is_query)
        tl.store(out + place + high[None, :], y, mask=mask & is_query)
        if SCORING:
            place = row * (HEADS * DIM) + scored[:, None] * DIM
            tl.store(scoring_out + place + low[None, :], x, mask=more)
            tl.store(scoring_out + place + high[None, :], y, mask=more)
        slices = pool + (page * (2 * KV_HEADS) + head - HEADS) * slice_size(pool, PAGE_SIZE, DIM)
        kept = mask & (head >= HEADS)[:, None]
        place = slices[:, None] + offset * DIM
        if not has_scales(pool):
            tl.store(place + low[None, :], x.to(pool.dtype.element_ty), mask=kept)
            tl.store(place + high[None, :], y.to(pool.dtype.element_ty), mask=kept)
        elif first_head + BLOCK_H > HEADS and first_head < HEADS + 2 * KV_HEADS:  # some are stored
            first, second = x.to(tl.float32), y.to(tl.float32)
            both = tl.reshape(tl.join(first, second), (BLOCK_H, 2 * x.shape[1]))
            if E4M3 and first_head < HEADS + KV_HEADS and key_scale == 0:
                reading = qkv + row * stride + (head - HEADS) * (GROUP * DIM)
                read = ((head >= HEADS) & (head < HEADS + KV_HEADS))[:, None] & known[None, :]
                a, b = _sum_of_heads(reading, low, read, eps, GROUP, DIM, NORM)
                if NORM:
                    a, b = a * q_low.to(tl.float32), b * q_high.to(tl.float32)
                a, b = a * low_cos + b * low_sin, b * high_cos + a * high_sin
                if HADAMARD:
                    a, b = _hadamard(a), _hadamard(b)
                    a, b = a + b, a - b
                query = tl.reshape(tl.join(a, b), both.shape)
                row_scale = best_scale(both, query, pool)
            else:
                row_scale = best_scale(both, None, pool)
            given = tl.where(head < HEADS + KV_HEADS, key_scale, value_scale)
            row_scale = tl.where(given > 0, given, row_scale)
            stored = (head >= HEADS) & (head < HEADS + 2 * KV_HEADS) & there
            scales = (slices + PAGE_SIZE * DIM).to(tl.pointer_type(tl.float32), bitcast=True)
            tl.store(scales + offset, row_scale, mask=stored)
            tl.store(place + low[None, :], narrow(first, row_scale[:, None], pool), mask=kept)
            tl.store(place + high[None, :], narrow(second, row_scale[:, None], pool), mask=kept)


def rope_kv(
    qkv: torch.Tensor,  # [rows, at least (heads + 2 * kv_heads) * dim]
    cos: torch.Tensor,  # [rows, dim]
    sin: torch.Tensor,  # [rows, dim]; first half negated, as `models.rope.Rotary` returns it
    q_weight: torch.Tensor | None,  # [dim], norm weight of query heads; None for no norm
    k_weight: torch.Tensor | None,
    eps: float,
    pool: torch.Tensor,  # [pages, 2 * kv_heads, page_size, dim]
    pages: torch.Tensor,  # [rows] page to which each row is written
    offsets: torch.Tensor,  # [rows] row within the page
    heads: int,
    scoring: ScoringHeads | None = None,  # needs q_weight and k_weight
    scales: tuple[float, float] = (0.0, 0.0),  # of keys and values, see `KVPool.scales`
    *,
    hadamard: bool = False,  # see `KVPool.hadamard`; not with `scoring`
) -> tuple[torch.Tensor, torch.Tensor]:
    """Write keys and values to the pool; return query and scoring query, both [rows, heads, dim].

    Without `scoring` the two are the same tensor.
    """
    rows = qkv.shape[0]
    kv_heads, page_size, dim = pool.shape[1] // 2, page_rows(pool), pool.shape[3]
    out = torch.empty(rows, heads, dim, dtype=qkv.dtype, device=qkv.device)
    scored = out if scoring is None else torch.empty_like(out)
    # The choice of a scale for e4m3 is long: several rows in a program are no faster then.
    own_rows = 4 if rows >= _MANY_ROWS and pool.dtype != FP8 else 1
    block_h = 8
    warps = max(1, min(4, block_h * dim // 256))
    if hadamard:
        assert scoring is None and takes_hadamard(dim)
        # A thread has two neighbours, and gets others by shuffles within its warp.
        block_h = 8 if rows >= _SOME_ROWS else 4
        warps = max(1, min(4, block_h * dim // 128))
    total = heads + 2 * kv_heads + (0 if scoring is None else heads)
    _rope_kv_kernel[(blocks_of(rows, own_rows), blocks_of(total, block_h))](
        qkv,
        qkv if scoring is None else scoring.projected,
        cos,
        sin,
        qkv if q_weight is None else q_weight,
        qkv if k_weight is None else k_weight,
        qkv if scoring is None else scoring.norm_weight,
        eps,
        pool,
        pages,
        offsets,
        out,
        scored,
        *scales,
        qkv.stride(0),
        0 if scoring is None else scoring.projected.stride(0),
        rows,
        HEADS=heads,
        KV_HEADS=kv_heads,
        DIM=dim,
        PAGE_SIZE=page_size,
        NORM=q_weight is not None,
        SCORING=scoring is not None,
        ADD_QUERY=scoring is not None and scoring.add_query,
        HADAMARD=hadamard,
        BLOCK_H=block_h,
        ROWS=own_rows,
        num_warps=warps,
        **pdl_options(qkv),
    )
    return out, scored
