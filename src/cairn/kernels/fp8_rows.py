"""Rows of 8 bits (e4m3), each with a scale of its own.

    page of a head:  rows [page_size, dim] e4m3, then their scales [page_size] float32

The scales take whole rows at the end of the slice, so that whoever copies pages or slices copies
them too. Scales are powers of two, so that a widened row is exact in bfloat16 and wider types. A
row's scale is the smallest one with which the row fits into e4m3, so it depends on that row alone;
or it is that of the checkpoint.
"""

from __future__ import annotations

import math

import torch

FP8 = torch.float8_e4m3fn
_MOST = 448.0  # of e4m3
_LEAST_EXPONENT = 127 - 40  # scales are at least 2**-40; what is smaller than that counts as zero


def scale_rows(page_size: int, dim: int) -> int:
    """Number of rows at the end of a slice that hold the scales of its `page_size` rows."""
    return -(-4 * page_size // dim)


def page_rows(pages: torch.Tensor) -> int:
    """Rows of a page, without the rows that hold scales; pages [..., rows, dim] of any type."""
    rows, dim = pages.shape[-2:]
    return rows * dim // (dim + 4) if pages.dtype == FP8 else rows


def quantize(
    rows: torch.Tensor, given: torch.Tensor | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Rows [..., dim] of e4m3, and their scales [...] float32. Scales are those in `given`, which
    can be broadcast to [...], where it is not 0; larger numbers than fit are cut off."""
    wide = rows.float()
    # The exponent of most / 448, rounded up. 448 has the mantissa 0x600000, and larger ones carry.
    bits = wide.abs().amax(-1).view(torch.int32)
    exponent = (((bits + 0x1FFFFF) >> 23) - 8).clamp(min=_LEAST_EXPONENT)
    scales = (exponent << 23).view(torch.float32)
    if given is not None:
        scales = torch.where(given > 0, given, scales)
    return (wide / scales[..., None]).clamp(-_MOST, _MOST).to(FP8), scales


def power_of_two_above(scale: float) -> float:
    """The smallest power of two that is not smaller. As the scale of numbers with an exponent of
    their own it is as precise."""
    mantissa, exponent = math.frexp(scale)
    return math.ldexp(1.0, exponent - 1 if mantissa == 0.5 else exponent)


def rows_and_scales(pages: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Views of pages [..., rows, dim]: rows [..., page_size, dim] and scales [..., page_size]."""
    size = page_rows(pages)
    scales = pages[..., size:, :].flatten(-2)[..., : 4 * size].view(torch.float32)
    return pages[..., :size, :], scales


def store_rows(
    pages: torch.Tensor,
    places: torch.Tensor,
    offsets: torch.Tensor,
    rows: torch.Tensor,
    given: torch.Tensor | None = None,
) -> None:
    """Store rows [n, ..., dim] in pages [pages, ..., rows, dim] of any type: row i in page
    `places[i]`, as its row `offsets[i]`. `given` is for `quantize`."""
    if pages.dtype != FP8:
        pages.movedim(-2, 1)[places, offsets] = rows.to(pages.dtype)
        return
    stored, scales = rows_and_scales(pages)
    rows, own = quantize(rows, given)
    stored.movedim(-2, 1)[places, offsets] = rows
    scales.movedim(-1, 1)[places, offsets] = own


def widen(pages: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """The rows of pages, or of slices of pages, as numbers: [..., page_size, dim] of `dtype`."""
    if pages.dtype != FP8:
        return pages.to(dtype)
    rows, scales = rows_and_scales(pages)
    return rows.to(dtype) * scales[..., None].to(dtype)
