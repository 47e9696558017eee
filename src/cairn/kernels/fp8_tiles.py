"""How kernels read and write rows of 8 bits with scales (see `fp8_rows`).

Tiles of e4m3 are converted to float16, which is exact and costs one instruction for two numbers.
Scales of keys are multiplied to scores. Scales of values are added to the exponents of the softmax,
so that weights stay within float16 whatever the scales are.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.constexpr_function
def is_fp8(pool):
    """Whether pointers to the pool point to rows of 8 bits."""
    return pool.dtype.element_ty.primitive_bitwidth == 8


@triton.constexpr_function
def slice_size(pool, page_size, dim):
    """Elements from a page's slice of one head to that of the next."""
    scale_rows = (4 * page_size + dim - 1) // dim if is_fp8(pool) else 0
    return (page_size + scale_rows) * dim


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
def load_pairs(rows, column, there, DIM: tl.constexpr):
    """-> columns 2 * column and 2 * column + 1 of rows [n] of 8 bits, as two tiles of float16

    In a tile of 16-bit pairs, a product finds the rows of one column by wide loads from shared
    memory. Of single bytes it would load each one by itself.
    """
    pairs = rows.to(tl.pointer_type(tl.int16), bitcast=True)
    both = tl.load(
        pairs[:, None] + column[None, :],
        mask=there[:, None] & (column < DIM // 2)[None, :],
        other=0,
    )
    first = both.to(tl.uint8).to(tl.float8e4nv, bitcast=True)
    second = (both >> 8).to(tl.uint8).to(tl.float8e4nv, bitcast=True)
    return first.to(tl.float16), second.to(tl.float16)


@triton.jit
def scale_bits(most):
    """-> exponents [n] int32 of the scales of rows whose largest absolute value is `most` [n]"""
    bits = most.to(tl.int32, bitcast=True)
    return tl.maximum(((bits + 0x1FFFFF) >> 23) - 8, 87)


@triton.jit
def float_of(exponent):
    """-> 2 ** (exponent - 127)"""
    return (exponent << 23).to(tl.float32, bitcast=True)
