"""How kernels read and write rows of 8 bits with scales (see `fp8_rows`).

Tiles of e4m3 are converted to float16, which is exact and costs one instruction for two numbers.
Scales of keys are multiplied to scores. Scales of values are added to the exponents of the softmax,
so that weights stay within float16 whatever the scales are.
"""

from __future__ import annotations

import triton
import triton.language as tl
from triton import knobs

INTERPRETED = tl.constexpr(knobs.runtime.interpret)


@triton.constexpr_function
def is_fp8(pool):
    """Whether pointers to the pool point to rows of 8 bits."""
    return pool.dtype.element_ty.primitive_bitwidth == 8


@triton.constexpr_function
def slice_size(pool, page_size, dim):
    """Elements from a page's slice of one head to that of the next."""
    scale_rows = (4 * page_size + dim - 1) // dim if is_fp8(pool) else 0
    return (page_size + scale_rows) * dim


@triton.constexpr_function
def reads_pairs(pool, query):
    """Whether tiles are read as pairs of columns (see `unpack_pairs`), for queries of 16 bits."""
    return is_fp8(pool) and query.dtype.element_ty.primitive_bitwidth == 16


@triton.jit
def as_tile(rows, PAIRS: tl.constexpr):
    """Pointers to rows, or to their pairs of columns."""
    if PAIRS:
        rows = rows.to(tl.pointer_type(tl.int16), bitcast=True)
    return rows


@triton.jit
def fit_query(q, pool):
    """The query in the type in which it is multiplied with keys."""
    if is_fp8(pool) and q.dtype.primitive_bitwidth == 16:
        q = tl.clamp(q.to(tl.float32), -65504.0, 65504.0).to(tl.float16)
    return q


@triton.jit
def load_scales(rows, offset, there, PAGE_SIZE: tl.constexpr, DIM: tl.constexpr):
    """-> scales [n] of rows `offset` [n] of slices that begin at `rows`; 1 if not `there`"""
    scales = (rows + PAGE_SIZE * DIM).to(tl.pointer_type(tl.float32), bitcast=True)
    return tl.load(scales + offset, mask=there, other=1.0)


@triton.jit
def unpack_pairs(pairs):
    """-> two tiles of float16: the first and the second number of pairs of 8 bits in int16

    A product needs neighbouring numbers along the rows that it sums over. In tiles of pairs, it
    finds them by wide loads from shared memory, whichever axis that is. Of single bytes it would
    load each one by itself.
    """
    if INTERPRETED:
        first = pairs.to(tl.uint8).to(tl.float8e4nv, bitcast=True)
        second = (pairs >> 8).to(tl.uint8).to(tl.float8e4nv, bitcast=True)
        return first.to(tl.float16), second.to(tl.float16)
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
    """-> log2 of scales, which are powers of two"""
    return ((scale.to(tl.int32, bitcast=True) >> 23) - 127).to(tl.float32)


@triton.jit
def inverse_of(scale):
    """-> 1 / scale, of scales that are powers of two"""
    return _power(254 - (scale.to(tl.int32, bitcast=True) >> 23))


@triton.jit
def scale_of(most):
    """-> scales of rows whose largest absolute value is `most`, as `fp8_rows.quantize` has them"""
    bits = most.to(tl.int32, bitcast=True)
    return _power(tl.maximum(((bits + 0x1FFFFF) >> 23) - 8, 87))


@triton.jit
def _power(exponent):
    """-> 2 ** (exponent - 127)"""
    return (exponent << 23).to(tl.float32, bitcast=True)
