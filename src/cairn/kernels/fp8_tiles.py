"""How kernels read and write rows of 8 bits with scales (see `fp8_rows`).

Tiles of e4m3 and of int8 are converted to float16, which is exact.
Scales of keys are multiplied to scores. Scales of values are added to the exponents of the softmax,
so that weights stay within float16 whatever the scales are.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from triton import knobs

from cairn.kernels.fp8_rows import FP8, LEAST_SCALE, MOST, QUERY_WEIGHT
from cairn.kernels.fp8_rows import SCALES as _SCALES
from cairn.kernels.fp8_rows import SPAN as _SPAN

SPAN = tl.constexpr(_SPAN)
SCALES = tl.constexpr(_SCALES)
_LEAST = tl.constexpr(LEAST_SCALE)
_QUERY_WEIGHT = tl.constexpr(QUERY_WEIGHT)
_MOST, _MOST_INT8 = MOST[FP8], MOST[torch.int8]
INTERPRETED = tl.constexpr(knobs.runtime.interpret)


@triton.constexpr_function
def has_scales(pool):
    """Whether pointers to the pool point to rows of 8 bits, which have scales."""
    return pool.dtype.element_ty.primitive_bitwidth == 8


@triton.constexpr_function
def is_int8(pool):
    """Whether they point to integers of 8 bits."""
    return pool.dtype.element_ty.is_int8()


@triton.constexpr_function
def most_of(pool):
    """The largest number of 8 bits."""
    return _MOST_INT8 if is_int8(pool) else _MOST


@triton.constexpr_function
def slice_size(pool, page_size, dim):
    """Elements from a page's slice of one head to that of the next."""
    scale_rows = (4 * page_size + dim - 1) // dim if has_scales(pool) else 0
    return (page_size + scale_rows) * dim


@triton.constexpr_function
def row_size(pool, width):
    """Elements from a latent row to the next."""
    if not has_scales(pool):
        return width
    return (width + width % 2 + 2 * -(-width // _SPAN) + 15) // 16 * 16  # `packed_width`


@triton.jit
def scales_of_latents(rows, WIDTH: tl.constexpr):
    """-> pointers to the scales of latent rows, bfloat16"""
    return (rows + (WIDTH + WIDTH % 2)).to(tl.pointer_type(tl.bfloat16), bitcast=True)


@triton.jit
def load_latents(
    rows,  # [n] pointers to latent rows
    there,  # [n] rows to load; others are zero
    query,  # pointers to queries, whose type the result has
    FIRST: tl.constexpr,  # the first column: a multiple of 128, or all columns are of one span
    COLUMNS: tl.constexpr,
    WIDTH: tl.constexpr,  # of a row
    BLOCK: tl.constexpr,  # at least COLUMNS
):
    """-> columns of latent rows [n, BLOCK] as numbers; zero from COLUMNS on"""
    column = tl.arange(0, BLOCK)
    inside = there[:, None] & (column < COLUMNS)[None, :]
    x = tl.load(rows[:, None] + FIRST + column[None, :], mask=inside, other=0.0)
    if has_scales(rows):
        SPANS: tl.constexpr = max(1, BLOCK // SPAN)
        span = FIRST // SPAN + tl.arange(0, SPANS)
        known = there[:, None] & (span < (WIDTH + SPAN - 1) // SPAN)[None, :]
        places = scales_of_latents(rows, WIDTH)[:, None] + span[None, :]
        scale = tl.load(places, mask=known, other=0.0).to(tl.float32)
        wide = tl.reshape(x.to(tl.float32), (x.shape[0], SPANS, BLOCK // SPANS)) * scale[:, :, None]
        x = tl.reshape(wide, (x.shape[0], BLOCK)).to(query.dtype.element_ty)
    return x


@triton.constexpr_function
def reads_pairs(pool, query):
    """Whether tiles are read as pairs of columns (see `unpack_pairs`), for queries of 16 bits."""
    return has_scales(pool) and query.dtype.element_ty.primitive_bitwidth == 16


@triton.jit
def as_tile(rows, PAIRS: tl.constexpr):
    """Pointers to rows, or to their pairs of columns."""
    if PAIRS:
        rows = rows.to(tl.pointer_type(tl.int16), bitcast=True)
    return rows


@triton.jit
def fit_query(q, pool):
    """The query in the type in which it is multiplied with keys."""
    if has_scales(pool) and q.dtype.primitive_bitwidth == 16:
        q = tl.clamp(q.to(tl.float32), -65504.0, 65504.0).to(tl.float16)
    return q


@triton.jit
def load_scales(rows, offset, there, PAGE_SIZE: tl.constexpr, DIM: tl.constexpr):
    """-> scales [n] of rows `offset` [n] of slices that begin at `rows`; 1 if not `there`"""
    scales = (rows + PAGE_SIZE * DIM).to(tl.pointer_type(tl.float32), bitcast=True)
    return tl.load(scales + offset, mask=there, other=1.0)


@triton.jit
def unpack_pairs(pairs, pool):
    """-> two tiles of float16: the first and the second number of pairs of 8 bits in int16

    A product needs neighbouring numbers along the rows that it sums over. In tiles of pairs, it
    finds them by wide loads from shared memory, whichever axis that is. Of single bytes it would
    load each one by itself.
    """
    NARROW: tl.constexpr = pool.dtype.element_ty
    if INTERPRETED:
        first = pairs.to(tl.uint8).to(NARROW, bitcast=True)
        second = (pairs >> 8).to(tl.uint8).to(NARROW, bitcast=True)
        return first.to(tl.float16), second.to(tl.float16)
    if is_int8(pool):
        # Two pairs per register. A byte b with its sign bit flipped, as the low bits of 1024.0, is
        # 1024 + 128 + b.
        return tl.inline_asm_elementwise(
            """
            {
                .reg .b32 first, second, bias;
                mov.b32 bias, 0xE480E480;  // -1152
                shr.b32 second, $2, 8;
                lop3.b32 first, $2, 0x00FF00FF, 0x64806480, 0x6A;  // (a & b) ^ c
                lop3.b32 second, second, 0x00FF00FF, 0x64806480, 0x6A;
                add.f16x2 $0, first, bias;
                add.f16x2 $1, second, bias;
            }
            """,
            "=r,=r,r",
            [pairs],
            dtype=(tl.float16, tl.float16),
            is_pure=True,
            pack=2,
        )
    # Two pairs per register: bring the first bytes of both together, and the second ones.
    return tl.inline_asm_elementwise(
        """
        {
            .reg .b32 sorted;
            .reg .b16 first, second;
            prmt.b32 sorted, $2, 0, 0x3120;
            mov.b32 {first, second}, sorted;
            cvt.rn.f16x2.e4m3x2 $0, first;
            cvt.rn.f16x2.e4m3x2 $1, second;
        }
        """,
        "=r,=r,r",
        [pairs],
        dtype=(tl.float16, tl.float16),
        is_pure=True,
        pack=2,
    )


@triton.jit
def log2_of(scale):
    """-> log2 of scales, which are normal numbers"""
    if INTERPRETED:
        return tl.log2(scale)
    return tl.inline_asm_elementwise(
        "lg2.approx.ftz.f32 $0, $1;", "=f,f", [scale], dtype=tl.float32, is_pure=True, pack=1
    )


@triton.jit
def inverse_of(scale):
    """-> 1 / scale, of scales that are normal numbers"""
    if INTERPRETED:
        return 1.0 / scale
    return tl.inline_asm_elementwise(
        "rcp.approx.ftz.f32 $0, $1;", "=f,f", [scale], dtype=tl.float32, is_pure=True, pack=1
    )


@triton.jit
def scale_of(most, pool):
    """-> scales of latent rows and index keys whose largest absolute value is `most`"""
    LARGEST: tl.constexpr = most_of(pool)
    scale = tl.maximum(tl.div_rn(most, LARGEST), _LEAST)
    if not is_int8(pool):  # a power of two: a mantissa that is not zero carries
        bits = (scale.to(tl.int32, bitcast=True) + 0x7FFFFF) & -8388608
        scale = bits.to(tl.float32, bitcast=True)
    return scale


@triton.jit
def best_scale(x, query, pool):
    """-> scales [n] of keys or values x [n, columns] float32, as `fp8_rows.quantize` has them;
    query is of the same shape, or None"""
    LARGEST: tl.constexpr = most_of(pool)
    scale = tl.maximum(tl.div_rn(tl.max(tl.abs(x), 1), LARGEST), _LEAST)
    if not is_int8(pool):
        smallest = scale
        least = tl.full(scale.shape, float("inf"), tl.float32)
        if query is not None:
            weight = _QUERY_WEIGHT / tl.maximum(tl.sum(query * query, 1), 1e-24)
        for i in tl.static_range(SCALES):
            factor = 1 + i / SCALES
            wide = x * inverse_of(smallest * factor)[:, None]
            lost = wide - _as_e4m3(wide)
            error = tl.sum(lost * lost, 1)
            if query is not None:
                along = tl.sum(lost * query, 1)
                error += weight * along * along
            error *= factor * factor
            scale = tl.where(error < least, smallest * factor, scale)
            least = tl.minimum(error, least)
    return scale


@triton.jit
def _as_e4m3(x):
    """-> x, at most 448, rounded to e4m3"""
    if INTERPRETED:  # its conversion does not carry: it rounds 1.97 to 1.0
        bits = x.to(tl.int32, bitcast=True)
        bits = (bits + 0x7FFFF + ((bits >> 20) & 1)) & -1048576
        normal = bits.to(tl.float32, bitcast=True)
        # Numbers below 2 ** -6 are multiples of 2 ** -9, as float32 is at 1.5 * 2 ** 14.
        return tl.where(tl.abs(x) < 0.015625, (x + 24576.0) - 24576.0, normal)
    return x.to(tl.float8e4nv).to(tl.float32)


@triton.jit
def narrow(x, scale, pool):
    """-> numbers of 8 bits, for float32 and scales of the same shape"""
    x = tl.div_rn(x, scale)
    if is_int8(pool):
        x = tl.clamp(x, -127.0, 127.0)
        x = (x + 12582912.0) - 12582912.0  # rounds: float32 has no fractions at 1.5 * 2 ** 23
    else:
        x = to_e4m3(x)
    return x.to(pool.dtype.element_ty)


@triton.jit
def to_e4m3(x):
    """-> float32 rounded to e4m3"""
    x = tl.clamp(x, -448.0, 448.0)
    if INTERPRETED:
        x = _as_e4m3(x)
    return x.to(tl.float8e4nv)
