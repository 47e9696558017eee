"""Rows of 8 bits, e4m3 or int8, with scales of their own.

    page of a head:  rows [page_size, dim] of 8 bits, then their scales [page_size] float32
    latent row:      its numbers [width] of 8 bits, then a scale for every 128 of them, bfloat16

Scales of a page take whole rows at the end of the slice, so that they are copied with the page or
slice. Latent rows are copied one by one, so each has its scales at its end, and is padded to a
multiple of 16 bytes.

A scale depends on its own token alone, or it is that of the checkpoint. For int8 it is the smallest
with which the numbers fit. For keys and values of e4m3 it is the best of eight (`best_scales`). For
latent rows and index keys of e4m3 it is the smallest power of two: widened numbers are then exact
in bfloat16.

e4m3 has three bits of mantissa, too few for keys, of which a few columns are much larger than the
others. `hadamard` spreads them over all columns. Queries are multiplied by the same matrix, so
scores do not change.
"""

from __future__ import annotations

import math
from importlib.util import find_spec

import torch

FP8 = torch.float8_e4m3fn
CACHE_TYPES = {"fp8": FP8, "int8": torch.int8}
"""Types of 8 bits, by their names in `kv_cache_dtype`."""
MOST = {FP8: 448.0, torch.int8: 127.0}
"""The largest number of each type."""
SPAN = 128  # columns of a latent row that share a scale
LEAST_SCALE = 2.0**-40  # smaller numbers count as zero
SCALES = 8  # that are tried for a row of e4m3
QUERY_WEIGHT = 32.0  # of an error along the query, see docs/lab-notes.md


def is_narrow(dtype: torch.dtype | None) -> bool:
    """Whether rows of a type have 8 bits, and scales."""
    return dtype in MOST


def scale_rows(page_size: int, dim: int) -> int:
    """Number of rows at the end of a slice that hold the scales of its `page_size` rows."""
    return -(-4 * page_size // dim)


def page_rows(pages: torch.Tensor) -> int:
    """Rows of a page, without the rows that hold scales; pages [..., rows, dim] of any type."""
    rows, dim = pages.shape[-2:]
    return rows * dim // (dim + 4) if is_narrow(pages.dtype) else rows


def quantize(
    rows: torch.Tensor,
    given: torch.Tensor | None = None,
    dtype: torch.dtype = FP8,
    query: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Rows [..., dim] of 8 bits, and their scales [...] float32. Scales are those in `given`, which
    can be broadcast to [...], where it is not 0; numbers that do not fit are clipped. `query`
    is for `best_scales`; int8 ignores it."""
    wide, most = rows.float(), MOST[dtype]
    scales = best_scales(wide, query) if dtype == FP8 else _smallest_scales(wide, dtype)
    if given is not None:
        scales = torch.where(given > 0, given, scales)
    wide = (wide / scales[..., None]).clamp(-most, most)
    return (wide if dtype == FP8 else wide.round()).to(dtype), scales


def best_scales(rows: torch.Tensor, query: torch.Tensor | None = None) -> torch.Tensor:
    """The scales [...] for float32 rows [..., dim] of e4m3: of the smallest one times 8/8 to 15/8,
    that with the least squared error. Twice a scale rounds the same way.

    `query` [..., dim] is a vector like the queries that will read the row. The part of the error
    along it, which changes their scores, counts `QUERY_WEIGHT` times more; along zero, not at all.
    For keys it is the sum of the token's own queries of their kv head: much of all queries of
    a head lies along one direction.
    """
    smallest = (rows.abs().amax(-1) / MOST[FP8]).clamp(min=LEAST_SCALE)
    if query is not None:
        query = torch.nn.functional.normalize(query.float(), dim=-1)
    errors = []
    for factor in (1 + i / SCALES for i in range(SCALES)):
        wide = rows / (smallest * factor)[..., None]
        lost = wide - wide.to(FP8).float()
        error = lost.square().sum(-1)
        if query is not None:
            error += QUERY_WEIGHT * (lost * query).sum(-1).square()
        errors.append(error * factor**2)
    return smallest * (1 + torch.stack(errors).argmin(0) / SCALES)


def takes_hadamard(dim: int) -> bool:
    """Whether heads of this size can be multiplied by a Hadamard matrix."""
    return dim & (dim - 1) == 0


def hadamard(rows: torch.Tensor) -> torch.Tensor:
    """Rows [..., dim] times the orthogonal Hadamard matrix of their size, a power of two. Entry
    i, j has the sign of the parity of i & j."""
    dim: int = rows.shape[-1]
    wide = rows.to(torch.promote_types(rows.dtype, torch.float32))
    half = 1
    while half < dim:
        low, high = wide.unflatten(-1, (-1, 2, half)).unbind(-2)
        wide = torch.stack((low + high, low - high), -2).flatten(-3)
        half *= 2
    return (wide * (1 / math.sqrt(dim))).to(rows.dtype)


def _smallest_scales(rows: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """The smallest scales [...] of float32 rows [..., dim]; powers of two with e4m3."""
    scales = (rows.abs().amax(-1) / MOST[dtype]).clamp(min=LEAST_SCALE)
    if dtype == FP8:  # a mantissa that is not zero carries
        scales = ((scales.view(torch.int32) + 0x7FFFFF) >> 23 << 23).view(torch.float32)
    return scales


def rows_and_scales(pages: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Views of pages [..., rows, dim]: rows [..., page_size, dim] and scales [..., page_size]."""
    size = page_rows(pages)
    scales = pages[..., size:, :].flatten(-2)[..., : 4 * size].view(torch.float32)
    return pages[..., :size, :], scales


def packed_width(width: int) -> int:
    """Bytes of a latent row of 8 bits, with its scales."""
    return -(-(width + width % 2 + 2 * -(-width // SPAN)) // 16) * 16


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
    # Rounded up to bfloat16, the upper half of float32.
    scales = (_smallest_scales(wide.float(), dtype).view(torch.int32) + 0xFFFF) >> 16
    numbers, _ = quantize(wide, (scales << 16).view(torch.float32), dtype)
    packed = rows.new_zeros(*rows.shape[:-1], packed_width(width), dtype=torch.uint8)
    packed[..., :width] = numbers.view(torch.uint8).flatten(-2)[..., :width]
    packed.view(torch.int16)[..., _scales_of(width)] = scales.to(torch.int16)
    return packed.view(dtype)


def unpack_rows(kept: torch.Tensor, width: int, dtype: torch.dtype) -> torch.Tensor:
    """Latent rows [..., width] as numbers of `dtype`, from rows of any type as they are stored."""
    if not is_narrow(kept.dtype):
        return kept.to(dtype)
    scales = kept.view(torch.bfloat16)[..., _scales_of(width)].repeat_interleave(SPAN, -1)
    wide = torch.promote_types(dtype, torch.float32)
    return (kept[..., :width].to(wide) * scales[..., :width].to(wide)).to(dtype)


def _scales_of(width: int) -> slice:
    """Where a latent row has its scales, in numbers of 16 bits."""
    first = -(-width // 2)
    return slice(first, first + -(-width // SPAN))


def store_rows(
    pages: torch.Tensor,
    places: torch.Tensor,
    offsets: torch.Tensor,
    rows: torch.Tensor,
    given: torch.Tensor | None = None,
    query: torch.Tensor | None = None,
) -> None:
    """Store rows [n, ..., dim] in pages [pages, ..., rows, dim] of any type: row i in page
    `places[i]`, as its row `offsets[i]`. `given` is for `quantize`. Pages of 8 bits that are wider
    than the rows keep latent rows.

    With keys and values [n, 2 * kv_heads, dim], keys first, `query` [n, heads, dim] has the queries
    of the same tokens as keys are multiplied with them. Pages of e4m3 then have scales that suit
    them (`best_scales`).
    """
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
    if pages.dim() == 3:  # index keys
        given = _smallest_scales(rows.float(), pages.dtype)
    if query is not None:
        sums = query.unflatten(1, (rows.shape[1] // 2, -1)).sum(2)
        query = torch.cat((sums, torch.zeros_like(sums)), 1)  # none for values
    rows, own = quantize(rows, given, pages.dtype, query)
    stored.movedim(-2, 1)[places, offsets] = rows
    scales.movedim(-1, 1)[places, offsets] = own


def read_units(
    slices: torch.Tensor, which: torch.Tensor, units: int, dtype: torch.dtype
) -> torch.Tensor:
    """Copies of units [n, rows, dim] of slices [slices, rows, dim] of any type, as numbers. Each
    slice has `units` of them; in `which` [n], unit j of slice s is number s * units + j."""
    if units == 1:
        return widen(slices.index_select(0, which), dtype)
    if not is_narrow(slices.dtype):
        cut = slices.view(len(slices) * units, -1, slices.shape[2])
        return cut.index_select(0, which).to(dtype)
    rows, scales = (part.unflatten(1, (units, -1)) for part in rows_and_scales(slices))
    place = which // units, which % units
    return _scaled(rows[place], scales[place], dtype)


def widen(pages: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """The rows of pages, or of slices of pages, as numbers: [..., page_size, dim] of `dtype`."""
    if not is_narrow(pages.dtype):
        return pages.to(dtype)
    return _scaled(*rows_and_scales(pages), dtype)


def _scaled(rows: torch.Tensor, scales: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Rows [..., dim] of 8 bits and their scales [...] as numbers."""
    wide = torch.promote_types(dtype, torch.float32)
    return (rows.to(wide) * scales[..., None].to(wide)).to(dtype)
