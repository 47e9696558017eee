"""Computes landmarks of complete pages for the policies that come with Cairn.

The torch reference for each policy is its own `landmark`.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from cairn.kernels.fp8_rows import page_rows
from cairn.kernels.fp8_tiles import has_scales, load_scales, slice_size
from cairn.kernels.interface import Pooling
from cairn.kernels.launch import direct

POOLINGS: dict[Pooling, int] = {"hils": 0, "last": 1, "box": 2, "mean": 3, "spread": 4}

HILS = tl.constexpr(0)
LAST = tl.constexpr(1)
BOX = tl.constexpr(2)
SPREAD = tl.constexpr(4)


@triton.jit
def pool_page(
    keys,  # [PAGE_SIZE, DIM] of the page and kv head
    prior,  # [HEADS, DIM] query of the page's last row; read for HILS only
    vectors,  # [landmark heads, width] of the page
    bias,  # [landmark heads] of the page
    kv_head,
    scale,
    GROUP: tl.constexpr,
    DIM: tl.constexpr,
    PAGE_SIZE: tl.constexpr,
    POOLING: tl.constexpr,
):
    """Write the landmarks of one page for one kv head."""
    offs_n = tl.arange(0, PAGE_SIZE)
    offs_d = tl.arange(0, DIM)
    k = tl.load(keys + offs_n[:, None] * DIM + offs_d[None, :])  # [PAGE_SIZE, DIM]
    if has_scales(keys):
        key_scale = load_scales(keys, offs_n, offs_n >= 0, PAGE_SIZE, DIM)
        k = (k.to(tl.float32) * key_scale[:, None]).to(vectors.dtype.element_ty)
    if POOLING == HILS:
        offs_g = tl.arange(0, max(16, triton.next_power_of_2(GROUP)))
        head = kv_head * GROUP + offs_g
        real = (offs_n < PAGE_SIZE - 1)[None, :]  # leave out the landmark row
        q = tl.load(
            prior + head[:, None] * DIM + offs_d[None, :], mask=(offs_g < GROUP)[:, None], other=0.0
        )
        logits = tl.dot(q, tl.trans(k), input_precision="ieee") * scale
        logits = tl.where(real, logits, float("-inf"))
        most = tl.max(logits, 1)
        shares = tl.exp(logits - most[:, None])
        total = tl.sum(shares, 1)
        weights = shares / total[:, None]
        vector = tl.dot(weights.to(k.dtype), k, input_precision="ieee")
        log_weights = tl.where(real, logits - most[:, None] - tl.log(total)[:, None], 0.0)
        entropy = -tl.sum(weights * log_weights, 1)
        tl.store(
            vectors + head[:, None] * DIM + offs_d[None, :],
            vector.to(vectors.dtype.element_ty),
            mask=(offs_g < GROUP)[:, None],
        )
        tl.store(bias + head, entropy, mask=offs_g < GROUP)
    elif POOLING == LAST:
        is_last = (offs_n == PAGE_SIZE - 1)[:, None]
        last = tl.sum(tl.where(is_last, k.to(tl.float32), 0.0), 0)
        tl.store(vectors + kv_head * DIM + offs_d, last.to(vectors.dtype.element_ty))
    elif POOLING == BOX:
        wide = k.to(tl.float32)
        place = vectors + kv_head * (2 * DIM) + offs_d
        tl.store(place, tl.max(wide, 0).to(vectors.dtype.element_ty))
        tl.store(place + DIM, tl.min(wide, 0).to(vectors.dtype.element_ty))
    else:
        wide = k.to(tl.float32)
        mean = tl.sum(wide, 0) / PAGE_SIZE
        place = vectors + kv_head * (2 * DIM if POOLING == SPREAD else DIM) + offs_d
        tl.store(place, mean.to(vectors.dtype.element_ty))
        if POOLING == SPREAD:
            apart = wide - mean[None, :]
            variance = tl.sum(apart * apart, 0) / PAGE_SIZE
            tl.store(place + DIM, variance.to(vectors.dtype.element_ty))


@direct
@triton.jit
def _pool_kernel(
    pages,  # [n]
    kv_pages,  # [n]
    last_rows,  # [n] read for HILS only
    pool,  # of the first layer, [pages, 2 * KV_HEADS, PAGE_SIZE, DIM]
    prior,  # [rows, HEADS, DIM]
    vectors,  # of the first layer, [pages, LANDMARK_HEADS, WIDTH]
    bias,
    pool_shifts,  # [layers] if SHIFTED, in units of 16 bytes
    vector_shifts,  # [layers] if SHIFTED
    scale,
    prior_stride,
    HEADS: tl.constexpr,
    KV_HEADS: tl.constexpr,
    DIM: tl.constexpr,
    PAGE_SIZE: tl.constexpr,
    LANDMARK_HEADS: tl.constexpr,
    WIDTH: tl.constexpr,
    POOLING: tl.constexpr,
    SHIFTED: tl.constexpr,  # the third axis of the grid is the layer
):
    item = tl.program_id(0)
    kv_head = tl.program_id(1)
    page = tl.load(pages + item).to(tl.int64)
    kv_page = tl.load(kv_pages + item).to(tl.int64)
    if POOLING == HILS:
        prior += tl.load(last_rows + item).to(tl.int64) * prior_stride
    if SHIFTED:
        layer = tl.program_id(2)
        # Elements in 16 bytes:
        UNIT: tl.constexpr = 128 // pool.dtype.element_ty.primitive_bitwidth
        VECTOR_UNIT: tl.constexpr = 128 // vectors.dtype.element_ty.primitive_bitwidth
        pool += tl.load(pool_shifts + layer) * UNIT
        vectors += tl.load(vector_shifts + layer) * VECTOR_UNIT
    pool_page(
        pool + (kv_page * (2 * KV_HEADS) + kv_head) * slice_size(pool, PAGE_SIZE, DIM),
        prior,
        vectors + page * (LANDMARK_HEADS * WIDTH),
        bias + page * LANDMARK_HEADS,
        kv_head,
        scale,
        HEADS // KV_HEADS,
        DIM,
        PAGE_SIZE,
        POOLING,
    )


def pool_landmarks(
    pages: torch.Tensor,  # [n] page ids, which index landmarks
    kv_pages: torch.Tensor,  # [n] the same pages in the pool
    pool: torch.Tensor,  # [pages, 2 * kv_heads, page_size, dim]
    vectors: torch.Tensor,  # [pages, landmark heads, width], written
    bias: torch.Tensor | None,  # [pages, landmark heads] float32, written
    *,
    pooling: Pooling,
    scale: float,
    prior: torch.Tensor | None = None,  # [rows, heads, dim], for "hils"
    last_rows: torch.Tensor | None = None,  # [n] row that completes each page, for "hils"
    shifts: tuple[torch.Tensor, torch.Tensor] | None = None,  # of KV and landmarks, per layer
) -> None:
    """Save the landmarks of pages in one layer or, with `shifts` (see `LayerMemory`), in several;
    `pool` and `vectors` are then those of the first layer."""
    assert pooling != "hils" or (prior is not None and last_rows is not None and shifts is None)
    kv_heads, page_size, dim = pool.shape[1] // 2, page_rows(pool), pool.shape[3]
    _pool_kernel[(len(pages), kv_heads, 1 if shifts is None else len(shifts[0]))](
        pages,
        kv_pages,
        pages if last_rows is None else last_rows,
        pool,
        pool if prior is None else prior,
        vectors,
        vectors if bias is None else bias,
        *((pages, pages) if shifts is None else shifts),
        scale,
        0 if prior is None else prior.stride(0),
        HEADS=kv_heads if prior is None else prior.shape[1],
        KV_HEADS=kv_heads,
        DIM=dim,
        PAGE_SIZE=page_size,
        LANDMARK_HEADS=vectors.shape[1],
        WIDTH=vectors.shape[2],
        POOLING=POOLINGS[pooling],
        SHIFTED=shifts is not None,
        num_warps=4,
    )
