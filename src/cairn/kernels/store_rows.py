"""Stores latent rows and index keys of 8 bits with their scales (see `fp8_rows`), one program each.
In torch it takes a dozen kernels."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from cairn.kernels.fp8_rows import page_rows
from cairn.kernels.fp8_tiles import (
    SPAN,
    narrow,
    row_size,
    scale_of,
    scales_of_latents,
    slice_size,
)
from cairn.kernels.launch import direct
from cairn.kernels.sizes import power_of_two


@direct
@triton.jit(do_not_specialize=["stride"])
def _store_kernel(
    rows,  # [n, WIDTH]
    places,  # [n] page of each row
    offsets,  # [n] row of the page
    pool,
    stride: tl.int32,  # of `rows`
    WIDTH: tl.constexpr,
    PAGE_SIZE: tl.constexpr,
    PACKED: tl.constexpr,  # rows hold their scales; otherwise they follow the rows of a page
    BLOCK: tl.constexpr,  # at least WIDTH
):
    row = tl.program_id(0).to(tl.int64)
    page = tl.load(places + row).to(tl.int64)
    offset = tl.load(offsets + row).to(tl.int64)
    column = tl.arange(0, BLOCK)
    x = tl.load(rows + row * stride + column, mask=column < WIDTH, other=0.0).to(tl.float32)
    if PACKED:
        SPANS: tl.constexpr = max(1, BLOCK // SPAN)
        span = tl.arange(0, SPANS)
        spans = tl.reshape(x, (SPANS, BLOCK // SPANS))
        scale = scale_of(tl.max(tl.abs(spans), 1), pool)
        # Rounded up to bfloat16, the upper half of float32.
        bits = (scale.to(tl.int32, bitcast=True) + 0xFFFF) & -65536
        scale = bits.to(tl.float32, bitcast=True)
        numbers = tl.reshape(narrow(spans, scale[:, None], pool), (BLOCK,))
        own = pool + (page * PAGE_SIZE + offset) * row_size(pool, WIDTH)
        there = span < (WIDTH + SPAN - 1) // SPAN
        tl.store(scales_of_latents(own, WIDTH) + span, scale.to(tl.bfloat16), mask=there)
    else:
        scale = scale_of(tl.max(tl.abs(x), 0), pool)
        numbers = narrow(x, scale, pool)
        page_start = pool + page * slice_size(pool, PAGE_SIZE, WIDTH)
        own = page_start + offset * WIDTH
        scales = (page_start + PAGE_SIZE * WIDTH).to(tl.pointer_type(tl.float32), bitcast=True)
        tl.store(scales + offset, scale)
    tl.store(own + column, numbers, mask=column < WIDTH)


def store_narrow_rows(
    pages: torch.Tensor,  # [pages, rows, dim] of 8 bits, contiguous
    places: torch.Tensor,  # [n] integers
    offsets: torch.Tensor,  # [n] integers
    rows: torch.Tensor,  # [n, width]
) -> None:
    """As `fp8_rows.store_rows` does."""
    width = rows.shape[1]
    packed = pages.shape[2] != width
    _store_kernel[(len(rows),)](
        rows,
        places,
        offsets,
        pages,
        rows.stride(0),
        WIDTH=width,
        PAGE_SIZE=pages.shape[1] if packed else page_rows(pages),
        PACKED=packed,
        BLOCK=power_of_two(width),
        num_warps=4,
    )
