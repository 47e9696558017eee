"""Rows of 8 bits (e4m3), each with a scale of its own.

    page of a head:  rows [page_size, dim] e4m3, then their scales [page_size] float32

The scales take whole rows at the end of the slice, so that whoever copies pages or slices copies
them too. A row's scale is the smallest power of two with which the row fits into e4m3. It depends
on that row alone, and a widened row is exact in bfloat16 and wider types.
"""

from __future__ import annotations

import torch

FP8 = torch.float8_e4m3fn
_LEAST_EXPONENT = 127 - 40  # scales are at least 2**-40; what is smaller than that counts as zero


def scale_rows(page_size: int, dim: int) -> int:
    """Number of rows at the end of a slice that hold the scales of its `page_size` rows."""
    return -(-4 * page_size // dim)


def page_rows(pages: torch.Tensor) -> int:
    """Rows of a page, without the rows that hold scales; pages [..., rows, dim] of any type."""
    rows, dim = pages.shape[-2:]
    return rows * dim // (dim + 4) if pages.dtype == FP8 else rows


def quantize(rows: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Rows [..., dim] of e4m3, and their scales [...] float32."""
    wide = rows.float()
    # The exponent of most / 448, rounded up. 448 has the mantissa 0x600000, and larger ones carry.
    bits = wide.abs().amax(-1).view(torch.int32)
    exponent = (((bits + 0x1FFFFF) >> 23) - 8).clamp(min=_LEAST_EXPONENT)
    inverse = ((254 - exponent) << 23).view(torch.float32)
    return (wide * inverse[..., None]).to(FP8), (exponent << 23).view(torch.float32)


def rows_and_scales(pages: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Views of pages [..., rows, dim]: rows [..., page_size, dim] and scales [..., page_size]."""
    size = page_rows(pages)
    scales = pages[..., size:, :].flatten(-2)[..., : 4 * size].view(torch.float32)
    return pages[..., :size, :], scales


def store_rows(
    pages: torch.Tensor, places: torch.Tensor, offsets: torch.Tensor, rows: torch.Tensor
) -> None:
    """Store rows [n, ..., dim] in pages [pages, ..., rows, dim] of any type: row i in page
    `places[i]`, as its row `offsets[i]`."""
    if pages.dtype != FP8:
        pages.movedim(-2, 1)[places, offsets] = rows.to(pages.dtype)
        return
    stored, scales = rows_and_scales(pages)
    stored.movedim(-2, 1)[places, offsets], scales.movedim(-1, 1)[places, offsets] = quantize(rows)


def widen(pages: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """The rows of pages, or of slices of pages, as numbers: [..., page_size, dim] of `dtype`."""
    if pages.dtype != FP8:
        return pages.to(dtype)
    rows, scales = rows_and_scales(pages)
    return rows.to(dtype) * scales[..., None].to(dtype)
