"""Rows of 8 bits, e4m3 or int8, with scales of their own.

    page of a head:  rows [page_size, dim] of 8 bits, then their scales [page_size] float32
    latent row:      its numbers [width] of 8 bits, then a byte for the scale of every 128 of them

Scales of a page take whole rows at the end of the slice, so that whoever copies pages or slices
copies them too. Latent rows are copied one by one, so each has its scales at its end: biased
exponents, as float32 has them. Bytes up to a multiple of 16 are not used.

Scales are powers of two, so that a widened row is exact in bfloat16 and wider types. A scale is the
smallest one with which its numbers fit into 8 bits, so it depends on that row alone; or it is that
of the checkpoint.
"""

from __future__ import annotations

import math
from importlib.util import find_spec

import torch

FP8 = torch.float8_e4m3fn
CACHE_TYPES = {"fp8": FP8, "int8": torch.int8}
"""Types of 8 bits, by their names in `kv_cache_dtype`."""
_MOST = {FP8: (448.0, 0x43E00000), torch.int8: (127.0, 0x42FE0000)}
"""The largest number of each type, and its bits as float32."""
SPAN = 128  # columns of a latent row that share a scale
_LEAST_EXPONENT = 127 - 40  # scales are at least 2**-40; what is smaller than that counts as zero


def is_narrow(dtype: torch.dtype | None) -> bool:
    """Whether rows of a type have 8 bits, and scales."""
    return dtype in _MOST


def scale_rows(page_size: int, dim: int) -> int:
    """Number of rows at the end of a slice that hold the scales of its `page_size` rows."""
    return -(-4 * page_size // dim)


def page_rows(pages: torch.Tensor) -> int:
    """Rows of a page, without the rows that hold scales; pages [..., rows, dim] of any type."""
    rows, dim = pages.shape[-2:]
    return rows * dim // (dim + 4) if is_narrow(pages.dtype) else rows


def quantize(
    rows: torch.Tensor, given: torch.Tensor | None = None, dtype: torch.dtype = FP8
) -> tuple[torch.Tensor, torch.Tensor]:
    """Rows [..., dim] of 8 bits, and their scales [...] float32. Scales are those in `given`, which
    can be broadcast to [...], where it is not 0; larger numbers than fit are cut off."""
    wide, (most, bits_of_most) = rows.float(), _MOST[dtype]
    # The exponent of the largest number / `most`, rounded up: mantissas above that of `most` carry.
    bits = wide.abs().amax(-1).view(torch.int32) + (0x3FFFFFFF - bits_of_most)
    exponent = (bits >> 23).clamp(min=_LEAST_EXPONENT)
    scales = (exponent << 23).view(torch.float32)
    if given is not None:
        scales = torch.where(given > 0, given, scales)
    wide = (wide / scales[..., None]).clamp(-most, most)
    return (wide if dtype == FP8 else wide.round()).to(dtype), scales


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


def packed_width(width: int) -> int:
    """Bytes of a latent row of 8 bits, with its scales."""
    return -(-(width + -(-width // SPAN)) // 16) * 16


def spans_refusal(latent: int, rope: int) -> str | None:
    """Why kernels do not read such latent rows of 8 bits; None if they do. They take latents and
    rotated parts apart, so a span must not have columns of both."""
    if latent % SPAN == 0 or latent + rope <= SPAN:
        return None
    return (
        f"latent rows of 8 bits (kv_cache_dtype) have {latent} and {rope} columns; it has "
        f"multiples of {SPAN}, or {SPAN} in all"
    )


def pack_rows(rows: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Latent rows [..., width] as they are stored in a type of 8 bits, [..., packed width]."""
    width = rows.shape[-1]
    spans = -(-width // SPAN)
    wide = torch.nn.functional.pad(rows, (0, spans * SPAN - width)).unflatten(-1, (spans, SPAN))
    numbers, scales = quantize(wide, None, dtype)
    packed = rows.new_zeros(*rows.shape[:-1], packed_width(width), dtype=torch.uint8)
    packed[..., :width] = numbers.view(torch.uint8).flatten(-2)[..., :width]
    packed[..., width : width + spans] = (scales.view(torch.int32) >> 23).to(torch.uint8)
    return packed.view(dtype)


def unpack_rows(kept: torch.Tensor, width: int, dtype: torch.dtype) -> torch.Tensor:
    """Latent rows [..., width] as numbers of `dtype`, from rows of any type as they are stored."""
    if not is_narrow(kept.dtype):
        return kept.to(dtype)
    spans = -(-width // SPAN)
    exponents = kept.view(torch.uint8)[..., width : width + spans].to(torch.int32)
    scales = (exponents << 23).view(torch.float32).repeat_interleave(SPAN, -1)
    return kept[..., :width].to(dtype) * scales[..., :width].to(dtype)


def store_rows(
    pages: torch.Tensor,
    places: torch.Tensor,
    offsets: torch.Tensor,
    rows: torch.Tensor,
    given: torch.Tensor | None = None,
) -> None:
    """Store rows [n, ..., dim] in pages [pages, ..., rows, dim] of any type: row i in page
    `places[i]`, as its row `offsets[i]`. `given` is for `quantize`. Pages of 8 bits that are wider
    than the rows keep latent rows."""
    if is_narrow(pages.dtype) and pages.dim() == 3 and pages.is_cuda and find_spec("triton"):
        from cairn.kernels.store_rows import store_narrow_rows

        store_narrow_rows(pages, places, offsets, rows)
        return
    if is_narrow(pages.dtype) and pages.shape[-1] != rows.shape[-1]:
        rows = pack_rows(rows, pages.dtype)
        pages.view(torch.uint8)[places, offsets] = rows.view(torch.uint8)
        return
    if not is_narrow(pages.dtype):
        pages.movedim(-2, 1)[places, offsets] = rows.to(pages.dtype)
        return
    stored, scales = rows_and_scales(pages)
    rows, own = quantize(rows, given, pages.dtype)
    stored.movedim(-2, 1)[places, offsets] = rows
    scales.movedim(-1, 1)[places, offsets] = own


def widen(pages: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """The rows of pages, or of slices of pages, as numbers: [..., page_size, dim] of `dtype`."""
    if not is_narrow(pages.dtype):
        return pages.to(dtype)
    rows, scales = rows_and_scales(pages)
    return rows.to(dtype) * scales[..., None].to(dtype)
