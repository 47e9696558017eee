"""Between the projections and attention, in one pass over the rows: norm of query and key heads,
rotation, and the write of keys and values to their pages; likewise for queries that score pages."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from cairn.kernels.interface import ScoringHeads
from cairn.kernels.launch import direct
from cairn.kernels.norm import rms_norm_reference
from cairn.kernels.pdl import pdl_options

_MANY_ROWS = 1024  # so many that programs with several of them still fill the device


def rope_kv_reference(
    qkv: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
    q_weight: torch.Tensor | None,
    k_weight: torch.Tensor | None,
    eps: float,
    pool: torch.Tensor,
    pages: torch.Tensor,
    offsets: torch.Tensor,
    heads: int,
    scoring: ScoringHeads | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """The same in torch; arguments as in `rope_kv`."""
    kv_heads, dim = pool.shape[1] // 2, pool.shape[3]
    x = qkv[:, : (heads + 2 * kv_heads) * dim].reshape(len(qkv), -1, dim)
    scored = x[:, :heads]
    if scoring is not None:
        projected = scoring.projected.reshape(len(qkv), heads, dim)
        scored = projected + scored if scoring.add_query else projected
        scored = rms_norm_reference(scored, scoring.norm_weight, eps)
        scored = scored * cos[:, None] + scored.roll(dim // 2, -1) * sin[:, None]
    query, key, value = x[:, :heads], x[:, heads : heads + kv_heads], x[:, heads + kv_heads :]
    if q_weight is not None and k_weight is not None:
        query = rms_norm_reference(query, q_weight, eps)
        key = rms_norm_reference(key, k_weight, eps)
    query, key = (t * cos[:, None] + t.roll(dim // 2, -1) * sin[:, None] for t in (query, key))
    pool[pages.long(), :, offsets.long()] = torch.cat((key, value), 1).to(pool.dtype)
    query = query.to(qkv.dtype)
    return query, query if scoring is None else scored.to(qkv.dtype)


@direct
@triton.jit(do_not_specialize=["rows"])
def _rope_kv_kernel(
    qkv,  # [rows, (HEADS + 2 * KV_HEADS) * DIM and more]
    projected,  # [rows, HEADS * DIM], if SCORING
    cos,  # [rows, DIM]
    sin,  # [rows, DIM], the sign of the exchange in it
    q_weight,
    k_weight,
    scoring_weight,
    eps,
    pool,  # [pages, 2 * KV_HEADS, PAGE_SIZE, DIM]
    pages,  # [rows]
    offsets,  # [rows]
    out,  # [rows, HEADS, DIM]
    scoring_out,  # [rows, HEADS, DIM]
    stride,
    projected_stride,
    rows,
    HEADS: tl.constexpr,
    KV_HEADS: tl.constexpr,
    DIM: tl.constexpr,
    BLOCK_D: tl.constexpr,
    PAGE_SIZE: tl.constexpr,
    NORM: tl.constexpr,
    SCORING: tl.constexpr,
    ADD_QUERY: tl.constexpr,
    BLOCK_H: tl.constexpr,
    ROWS: tl.constexpr,  # of one program
    PDL: tl.constexpr,
):
    if PDL:
        gdc_launch_dependents()
    head = tl.program_id(1) * BLOCK_H + tl.arange(0, BLOCK_H)
    offs_d = tl.arange(0, BLOCK_D)
    other_d = (offs_d + DIM // 2) % DIM
    in_dim = offs_d < DIM
    inside = (head < HEADS + 2 * KV_HEADS)[:, None] & in_dim[None, :]
    is_query = head < HEADS
    is_value = (head >= HEADS + KV_HEADS) & (head < HEADS + 2 * KV_HEADS)
    source = head
    with_query = inside
    if SCORING:
        is_scoring = (head >= HEADS + 2 * KV_HEADS) & (head < 2 * HEADS + 2 * KV_HEADS)
        scored = head - (HEADS + 2 * KV_HEADS)
        if ADD_QUERY:
            source = tl.where(is_scoring, scored, head)
            with_query = inside | (is_scoring[:, None] & in_dim[None, :])
    if NORM:
        wq = tl.load(q_weight + offs_d, mask=in_dim, other=0.0).to(tl.float32)
        wk = tl.load(k_weight + offs_d, mask=in_dim, other=0.0).to(tl.float32)
        wq_other = tl.load(q_weight + other_d, mask=in_dim, other=0.0).to(tl.float32)
        wk_other = tl.load(k_weight + other_d, mask=in_dim, other=0.0).to(tl.float32)
        weight = tl.where(is_query[:, None], wq[None, :], wk[None, :])
        other_weight = tl.where(is_query[:, None], wq_other[None, :], wk_other[None, :])
        if SCORING:
            ws = tl.load(scoring_weight + offs_d, mask=in_dim, other=0.0).to(tl.float32)
            ws_other = tl.load(scoring_weight + other_d, mask=in_dim, other=0.0).to(tl.float32)
            weight = tl.where(is_scoring[:, None], ws[None, :], weight)
            other_weight = tl.where(is_scoring[:, None], ws_other[None, :], other_weight)
    if PDL:
        gdc_wait()
    for r in tl.static_range(ROWS):
        row = tl.program_id(0).to(tl.int64) * ROWS + r
        there = row < rows
        page = tl.load(pages + row, mask=there, other=0).to(tl.int64)
        offset = tl.load(offsets + row, mask=there, other=0).to(tl.int64)
        c = tl.load(cos + row * DIM + offs_d, mask=in_dim & there, other=0.0).to(tl.float32)
        s = tl.load(sin + row * DIM + offs_d, mask=in_dim & there, other=0.0).to(tl.float32)
        mask = inside & there
        read = with_query & there
        base = qkv + row * stride + source[:, None] * DIM
        x = tl.load(base + offs_d[None, :], mask=read, other=0.0).to(tl.float32)
        y = tl.load(base + other_d[None, :], mask=read, other=0.0).to(tl.float32)
        if SCORING:
            more = is_scoring[:, None] & in_dim[None, :] & there
            base = projected + row * projected_stride + scored[:, None] * DIM
            x += tl.load(base + offs_d[None, :], mask=more, other=0.0).to(tl.float32)
            y += tl.load(base + other_d[None, :], mask=more, other=0.0).to(tl.float32)
        turned, exchanged = x, y
        if NORM:
            scale = tl.rsqrt(tl.sum(x * x, 1) / DIM + eps)[:, None]
            turned = x * scale * weight
            exchanged = y * scale * other_weight
        turned = turned * c[None, :] + exchanged * s[None, :]
        result = tl.where(is_value[:, None], x, turned)
        place = row * (HEADS * DIM) + head[:, None] * DIM + offs_d[None, :]
        tl.store(out + place, result.to(out.dtype.element_ty), mask=mask & is_query[:, None])
        if SCORING:
            place = row * (HEADS * DIM) + scored[:, None] * DIM + offs_d[None, :]
            tl.store(scoring_out + place, result.to(out.dtype.element_ty), mask=more)
        slot = (page * (2 * KV_HEADS) + head[:, None] - HEADS) * PAGE_SIZE + offset
        tl.store(
            pool + slot * DIM + offs_d[None, :],
            result.to(pool.dtype.element_ty),
            mask=mask & (head >= HEADS)[:, None],
        )


def rope_kv(
    qkv: torch.Tensor,  # [rows, (heads + 2 * kv_heads) * dim and more]
    cos: torch.Tensor,  # [rows, dim]
    sin: torch.Tensor,  # [rows, dim]; the first half negative, as `models.rope.Rotary` gives it
    q_weight: torch.Tensor | None,  # [dim], norm of each query head; None for no norm
    k_weight: torch.Tensor | None,
    eps: float,
    pool: torch.Tensor,  # [pages, 2 * kv_heads, page_size, dim]
    pages: torch.Tensor,  # [rows] page that each row is written to
    offsets: torch.Tensor,  # [rows] row within the page
    heads: int,
    scoring: ScoringHeads | None = None,  # with norms of query and key heads only
) -> tuple[torch.Tensor, torch.Tensor]:
    """Writes keys and values; returns the query and the scoring query, [rows, heads, dim].

    Without `scoring` they are the same.
    """
    rows = qkv.shape[0]
    kv_heads, page_size, dim = pool.shape[1] // 2, pool.shape[2], pool.shape[3]
    out = torch.empty(rows, heads, dim, dtype=qkv.dtype, device=qkv.device)
    scored = out if scoring is None else torch.empty_like(out)
    block_h = 8
    total = heads + 2 * kv_heads + (0 if scoring is None else heads)
    own_rows = 4 if rows >= _MANY_ROWS else 1
    _rope_kv_kernel[(triton.cdiv(rows, own_rows), triton.cdiv(total, block_h))](
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
        qkv.stride(0),
        0 if scoring is None else scoring.projected.stride(0),
        rows,
        HEADS=heads,
        KV_HEADS=kv_heads,
        DIM=dim,
        BLOCK_D=triton.next_power_of_2(dim),
        PAGE_SIZE=page_size,
        NORM=q_weight is not None,
        SCORING=scoring is not None,
        ADD_QUERY=scoring is not None and scoring.add_query,
        BLOCK_H=block_h,
        ROWS=own_rows,
        num_warps=max(1, min(4, block_h * dim // 256)),
        **pdl_options(qkv),
    )
    return out, scored
