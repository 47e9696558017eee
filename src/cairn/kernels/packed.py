"""Products x @ W.T with a matrix of codes of 4 or 8 bits, stored as packed_layout.py says.

A code becomes a float without arithmetic: as the mantissa of a number with exponent zero it is a
tiny (subnormal) number, which is multiplied like any other. Inputs are scaled up to make up for it.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from cairn.kernels.activation import silu_and_mul
from cairn.kernels.launch import direct
from cairn.kernels.norm import rms_norm
from cairn.kernels.packed_layout import Packed
from cairn.kernels.pdl import pdl_options
from cairn.kernels.processors import staying
from cairn.kernels.sizes import blocks_of, power_of_two

_ONE_ROW_OUTPUTS = 4  # of a tile
_FEW_ROWS = 32  # products of more rows widen the matrix in memory
_MOST_WIDENED = 2**25  # weights that are in float at the same time


def row_rungs() -> tuple[int, ...]:
    """Row counts at which products switch to another compiled form."""
    return 1, 2, 9, 17, _FEW_ROWS + 1


_SHRUNK = tl.constexpr(2.0**43)  # what products of `_tiny` and `_grown` lack


@triton.jit
def _tiny(words, i: tl.constexpr, BITS: tl.constexpr):
    """Code i of each word as a float, times 2**(p - 149), where p is its place in the mantissa."""
    BEGIN: tl.constexpr = i * BITS
    SHIFT: tl.constexpr = _place(i, BITS) - BEGIN
    if SHIFT > 0:
        words = words << SHIFT
    elif SHIFT < 0:
        words = words >> -SHIFT
    MASK: tl.constexpr = ((1 << BITS) - 1) << _place(i, BITS)
    return (words & MASK).to(tl.float32, bitcast=True)


@triton.constexpr_function
def _place(i, bits):
    """The bit at which code i begins. Codes of 4 bits need only two shifts of a word this way."""
    if bits == 8:
        return 8
    return 8 + 4 * ((i + 1) % 3) if i >= 2 else 8 + 4 * i


@triton.constexpr_function
def _growth(i, bits):
    """The factor of an input for code i."""
    return 2.0 ** (106 - _place(i, bits))


@triton.jit
def _word(row, at, CHUNKS: tl.constexpr):
    """Where word `at` of a row is. Both broadcast."""
    return ((row // 8 * CHUNKS + at // 16) * 8 + row % 8) * 16 + at % 16


@triton.jit
def _load_scales(
    scale,
    inner,
    row,  # of the matrix, int64, in a shape that broadcasts with `block`
    block,
    mask,
    sub: tl.constexpr,
    IN: tl.constexpr,
    SUPER: tl.constexpr,
    SUBS: tl.constexpr,
    MINIMUM: tl.constexpr,
    SUB_SCALE: tl.constexpr,
    SUB_MINIMUM: tl.constexpr,
):
    """Outer scale and minimum of blocks, and the inner ones, as they are stored. Those that the
    matrix does not have are copies of the outer scale."""
    BLOCKS: tl.constexpr = IN // 32
    outer = scale + ((row // 8 * (BLOCKS // SUPER) + block // SUPER) * 8 + row % 8) * (1 + MINIMUM)
    at = ((row // 8 * BLOCKS + block) * 8 + row % 8) * ((SUB_SCALE + SUB_MINIMUM) * SUBS) + sub
    own = tl.load(outer, mask=mask, other=0.0)
    least, own_sub, least_sub = own, own, own
    if SUB_SCALE:
        own_sub = tl.load(inner + at, mask=mask, other=0)
    if MINIMUM:
        least = tl.load(outer + 1, mask=mask, other=0.0)
    if SUB_MINIMUM:
        least_sub = tl.load(inner + at + SUB_SCALE * SUBS, mask=mask, other=0)
    return own, least, own_sub, least_sub


@triton.jit
def _combined(
    own,
    least,
    own_sub,
    least_sub,
    OFFSET: tl.constexpr,
    MINIMUM: tl.constexpr,
    SUB_SCALE: tl.constexpr,
    SUB_MINIMUM: tl.constexpr,
):
    """What codes are multiplied by, and what is added then, from `_load_scales`; float32."""
    factor = own.to(tl.float32)
    if SUB_SCALE:
        factor *= own_sub.to(tl.float32)
    added = factor * -OFFSET
    if MINIMUM:
        more = least.to(tl.float32)
        if SUB_MINIMUM:
            more *= least_sub.to(tl.float32)
        added += more
    return factor, added


@triton.jit
def _input(x, norm_weight, at, inside, IN: tl.constexpr, GATED: tl.constexpr, NORM: tl.constexpr):
    """Inputs at some columns, before RMS norm divides them, and the squares that it adds up."""
    value = tl.load(x + at, mask=inside[:, None], other=0.0).to(tl.float32)
    if GATED:
        up = tl.load(x + IN + at, mask=inside[:, None], other=0.0).to(tl.float32)
        value = value / (1.0 + tl.exp(-value)) * up
    square = value * value
    if NORM:
        value *= tl.load(norm_weight + at, mask=inside[:, None], other=0.0).to(tl.float32)
    return value, square


@triton.jit
def _dots(w, a, b, c, d, BITS: tl.constexpr, FIRST: tl.constexpr, COUNT: tl.constexpr):
    """Codes FIRST, FIRST + 1 and so on of each word, COUNT of them, with inputs that have grown."""
    sums = _tiny(w, FIRST, BITS) * a[None] + _tiny(w, FIRST + 1, BITS) * b[None]
    if COUNT == 4:
        sums += _tiny(w, FIRST + 2, BITS) * c[None]
        sums += _tiny(w, FIRST + 3, BITS) * d[None]
    return sums


@direct
@triton.jit
def _one_row_kernel(
    x,  # [IN], or [2 * IN] with GATED
    words,
    scale,
    inner,
    out,  # [out_features], added to if ADD
    norm_weight,  # [IN], if NORM
    eps,
    out_features,
    IN: tl.constexpr,
    BITS: tl.constexpr,
    OFFSET: tl.constexpr,
    SUPER: tl.constexpr,  # blocks with one outer scale
    SUBS: tl.constexpr,  # inner scales of a block
    MINIMUM: tl.constexpr,
    SUB_SCALE: tl.constexpr,
    SUB_MINIMUM: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,  # at least IN
    GATED: tl.constexpr,
    NORM: tl.constexpr,
    ADD: tl.constexpr,
    PDL: tl.constexpr,
):
    """A program keeps x in registers and strides over the tiles of BLOCK_N outputs. It loads the
    next tile before it multiplies the one that has arrived."""
    CODES: tl.constexpr = 32 // BITS  # of a word
    WORDS: tl.constexpr = 32 // CODES  # of a block
    CHUNKS: tl.constexpr = (IN // CODES + 15) // 16
    QUADS: tl.constexpr = WORDS // 4  # of a block: four words, which a thread loads at once
    HALF: tl.constexpr = CODES // 2
    lane = tl.arange(0, BLOCK_N)
    quad = tl.arange(0, BLOCK_K // 32 * QUADS)
    word = quad[:, None] * 4 + tl.arange(0, 4)[None, :]
    at = (quad // QUADS * 32 + quad % QUADS * 4)[:, None] + tl.arange(0, 4)[None, :]
    inside = quad < IN // 32 * QUADS
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    # Inputs of each code of a word; with codes of 8 bits the last four are not used.
    v0, s0 = _input(x, norm_weight, at, inside, IN, GATED, NORM)
    v1, s1 = _input(x, norm_weight, at + WORDS, inside, IN, GATED, NORM)
    v2, s2 = _input(x, norm_weight, at + 2 * WORDS, inside, IN, GATED, NORM)
    v3, s3 = _input(x, norm_weight, at + 3 * WORDS, inside, IN, GATED, NORM)
    squares = (s0 + s1) + (s2 + s3)
    if CODES == 8:
        v4, s4 = _input(x, norm_weight, at + 4 * WORDS, inside, IN, GATED, NORM)
        v5, s5 = _input(x, norm_weight, at + 5 * WORDS, inside, IN, GATED, NORM)
        v6, s6 = _input(x, norm_weight, at + 6 * WORDS, inside, IN, GATED, NORM)
        v7, s7 = _input(x, norm_weight, at + 7 * WORDS, inside, IN, GATED, NORM)
        squares += (s4 + s5) + (s6 + s7)
        low = tl.sum((v0 + v1) + (v2 + v3), 1)
        high = tl.sum((v4 + v5) + (v6 + v7), 1)
        v4, v5 = v4 * _growth(4, BITS), v5 * _growth(5, BITS)
        v6, v7 = v6 * _growth(6, BITS), v7 * _growth(7, BITS)
    else:
        low, high = tl.sum(v0 + v1, 1), tl.sum(v2 + v3, 1)
    v0, v1 = v0 * _growth(0, BITS), v1 * _growth(1, BITS)
    v2, v3 = v2 * _growth(2, BITS), v3 * _growth(3, BITS)
    length = 1.0
    if NORM:
        length = tl.rsqrt(tl.sum(tl.sum(squares, 1)) / IN + eps)
    # As if blocks were not neighbours: otherwise threads would load several scales at once, and
    # exchange them in shared memory.
    block = tl.max_contiguous((quad // QUADS)[None, :], [1, 1])
    step = tl.num_programs(0) * BLOCK_N
    n = tl.program_id(0) * BLOCK_N + lane
    row = n.to(tl.int64)
    here = (n < out_features)[:, None] & inside[None, :]
    place = words + _word(row[:, None, None], word[None], CHUNKS)
    w = tl.load(place, mask=here[:, :, None], other=0)
    a, b, c, d = _load_scales(
        scale, inner, row[:, None], block, here, 0,
        IN, SUPER, SUBS, MINIMUM, SUB_SCALE, SUB_MINIMUM,
    )  # fmt: skip
    e, f = c, d
    if SUBS == 2:
        _, _, e, f = _load_scales(
            scale, inner, row[:, None], block, here, 1,
            IN, SUPER, SUBS, MINIMUM, SUB_SCALE, SUB_MINIMUM,
        )  # fmt: skip
    for _ in range(tl.program_id(0) * BLOCK_N, out_features, step):
        own_n = n
        n += step
        row = n.to(tl.int64)
        here = (n < out_features)[:, None] & inside[None, :]
        place = words + _word(row[:, None, None], word[None], CHUNKS)
        next_w = tl.load(place, mask=here[:, :, None], other=0)
        next_a, next_b, next_c, next_d = _load_scales(
            scale, inner, row[:, None], block, here, 0,
            IN, SUPER, SUBS, MINIMUM, SUB_SCALE, SUB_MINIMUM,
        )  # fmt: skip
        next_e, next_f = next_c, next_d
        if SUBS == 2:
            _, _, next_e, next_f = _load_scales(
                scale, inner, row[:, None], block, here, 1,
                IN, SUPER, SUBS, MINIMUM, SUB_SCALE, SUB_MINIMUM,
            )  # fmt: skip
        there = own_n < out_features
        if ADD:
            before = tl.load(out + own_n, mask=there, other=0.0).to(tl.float32)
        of_low = _dots(w, v0, v1, v2, v3, BITS, 0, HALF)
        if CODES == 8:
            of_high = _dots(w, v4, v5, v6, v7, BITS, HALF, HALF)
        else:
            of_high = _dots(w, v2, v3, v2, v3, BITS, HALF, HALF)
        factor, added = _combined(a, b, c, d, OFFSET, MINIMUM, SUB_SCALE, SUB_MINIMUM)
        if SUBS == 2:
            part = tl.sum(of_low, 2) * (factor * _SHRUNK) + added * low[None, :]
            factor, added = _combined(a, b, e, f, OFFSET, MINIMUM, SUB_SCALE, SUB_MINIMUM)
            part += tl.sum(of_high, 2) * (factor * _SHRUNK) + added * high[None, :]
        else:
            part = tl.sum(of_low + of_high, 2) * (factor * _SHRUNK)
            if MINIMUM or OFFSET > 0:
                part += added * (low + high)[None, :]
        result = tl.sum(part, 1)
        if NORM:
            result *= length
        if ADD:
            result += before
        tl.store(out + own_n, result.to(out.dtype.element_ty), mask=there)
        w, a, b, c, d, e, f = next_w, next_a, next_b, next_c, next_d, next_e, next_f


@direct
@triton.jit(do_not_specialize=["rows"])
def _few_rows_kernel(
    x,  # [rows, IN]
    words,
    scale,
    inner,
    out,  # [rows, out_features], added to if ADD
    norm_weight,  # [IN], if NORM
    eps,
    rows: tl.int32,
    out_features,
    IN: tl.constexpr,
    BITS: tl.constexpr,
    OFFSET: tl.constexpr,
    SUPER: tl.constexpr,
    SUBS: tl.constexpr,
    MINIMUM: tl.constexpr,
    SUB_SCALE: tl.constexpr,
    SUB_MINIMUM: tl.constexpr,
    BLOCK_M: tl.constexpr,  # at least `rows`
    BLOCK_N: tl.constexpr,
    PARTS: tl.constexpr,  # warps, which share the columns
    BLOCK_W: tl.constexpr,  # words
    NORM: tl.constexpr,
    ADD: tl.constexpr,
    PDL: tl.constexpr,
):
    CODES: tl.constexpr = 32 // BITS
    WORDS: tl.constexpr = 32 // CODES
    CHUNKS: tl.constexpr = (IN // CODES + 15) // 16
    HALF: tl.constexpr = CODES // SUBS
    m = tl.arange(0, BLOCK_M)
    n = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    row = n.to(tl.int64)[None, :, None]
    word = tl.arange(0, PARTS)[:, None] * BLOCK_W + tl.arange(0, BLOCK_W)[None, :]
    there = (n < out_features)[None, :, None]
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    acc = tl.zeros((PARTS, BLOCK_N, BLOCK_M), tl.float32)
    squares = tl.zeros((PARTS, BLOCK_M), tl.float32)
    for start in range(0, IN // CODES, PARTS * BLOCK_W):
        at = start + word
        inside = at < IN // CODES
        here = there & inside[:, None, :]
        w = tl.load(words + _word(row, at[:, None, :], CHUNKS), mask=here, other=0)
        block = at // WORDS
        for sub in tl.static_range(SUBS):
            a, b, c, d = _load_scales(
                scale, inner, row, block[:, None, :], here, sub,
                IN, SUPER, SUBS, MINIMUM, SUB_SCALE, SUB_MINIMUM,
            )  # fmt: skip
            own, added = _combined(a, b, c, d, OFFSET, MINIMUM, SUB_SCALE, SUB_MINIMUM)
            for i in tl.static_range(sub * HALF, (sub + 1) * HALF):
                column = block * 32 + at % WORDS + WORDS * i
                seen = (m < rows)[None, None, :] & inside[:, :, None]
                values = x + m[None, None, :] * IN + column[:, :, None]
                value = tl.load(values, mask=seen, other=0.0)
                if NORM:
                    wide = value.to(tl.float32)
                    squares += tl.sum(wide * wide, 1)
                    factor = tl.load(norm_weight + column, mask=inside, other=0.0).to(tl.float32)
                    value = (wide * factor[:, :, None]).to(x.dtype.element_ty)
                code = (w >> i * BITS & (1 << BITS) - 1).to(tl.float32)
                acc = tl.dot((code * own + added).to(value.dtype), value, acc)
    result = tl.sum(acc, 0)  # [BLOCK_N, BLOCK_M]
    if NORM:
        result *= tl.rsqrt(tl.sum(squares, 0) / IN + eps)[None, :]
    place = out + m[None, :] * out_features + n[:, None]
    stored = (m < rows)[None, :] & (n < out_features)[:, None]
    if ADD:
        result += tl.load(place, mask=stored, other=0.0).to(tl.float32)
    tl.store(place, result.to(out.dtype.element_ty), mask=stored)


@triton.jit
def _weight(w, factor, added, i: tl.constexpr, BITS: tl.constexpr):
    """The weights of code i of each word."""
    return (w >> i * BITS & (1 << BITS) - 1).to(tl.float32) * factor + added


@triton.jit
def _four(
    w,
    factor,
    added,
    i: tl.constexpr,
    j: tl.constexpr,
    k: tl.constexpr,
    m: tl.constexpr,
    BITS: tl.constexpr,
):
    """Weights of four codes, [..., 2, 2]: the second bit of a code's number, then the first."""
    evens = tl.join(_weight(w, factor, added, i, BITS), _weight(w, factor, added, j, BITS))
    odds = tl.join(_weight(w, factor, added, k, BITS), _weight(w, factor, added, m, BITS))
    return tl.join(evens, odds)


@direct
@triton.jit(do_not_specialize=["count"])
def _widen_kernel(
    ids,  # [count] int64 rows of the matrix, if CHOSEN
    words,
    scale,
    inner,
    out,  # [count, IN]
    count: tl.int32,
    IN: tl.constexpr,
    BITS: tl.constexpr,
    OFFSET: tl.constexpr,
    SUPER: tl.constexpr,
    SUBS: tl.constexpr,
    MINIMUM: tl.constexpr,
    SUB_SCALE: tl.constexpr,
    SUB_MINIMUM: tl.constexpr,
    CHOSEN: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_W: tl.constexpr,
    PDL: tl.constexpr,
):
    CODES: tl.constexpr = 32 // BITS
    WORDS: tl.constexpr = 32 // CODES
    CHUNKS: tl.constexpr = (IN // CODES + 15) // 16
    n = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    at = tl.program_id(1) * BLOCK_W + tl.arange(0, BLOCK_W)
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    row = n.to(tl.int64)[:, None]
    if CHOSEN:
        row = tl.load(ids + n, mask=n < count, other=0)[:, None]
    here = (n < count)[:, None] & (at < IN // CODES)[None, :]
    w = tl.load(words + _word(row, at[None, :], CHUNKS), mask=here, other=0)
    block = at // WORDS
    a, b, c, d = _load_scales(
        scale, inner, row, block[None, :], here, 0,
        IN, SUPER, SUBS, MINIMUM, SUB_SCALE, SUB_MINIMUM,
    )  # fmt: skip
    low, low_added = _combined(a, b, c, d, OFFSET, MINIMUM, SUB_SCALE, SUB_MINIMUM)
    high, high_added = low, low_added
    if SUBS == 2:
        a, b, c, d = _load_scales(
            scale, inner, row, block[None, :], here, 1,
            IN, SUPER, SUBS, MINIMUM, SUB_SCALE, SUB_MINIMUM,
        )  # fmt: skip
        high, high_added = _combined(a, b, c, d, OFFSET, MINIMUM, SUB_SCALE, SUB_MINIMUM)
    # [..., code]: joined by the highest bit of a code's number first
    if CODES == 8:
        first = _four(w, low, low_added, 0, 2, 1, 3, BITS)
        second = _four(w, high, high_added, 4, 6, 5, 7, BITS)
        codes = tl.permute(tl.join(first, second), (0, 1, 4, 2, 3))
    else:
        first = tl.join(_weight(w, low, low_added, 0, BITS), _weight(w, low, low_added, 1, BITS))
        second = tl.join(
            _weight(w, high, high_added, 2, BITS), _weight(w, high, high_added, 3, BITS)
        )
        codes = tl.permute(tl.join(first, second), (0, 1, 3, 2))
    by_block = tl.reshape(codes, (BLOCK_N, BLOCK_W // WORDS, WORDS, CODES))
    columns = tl.reshape(tl.permute(by_block, (0, 1, 3, 2)), (BLOCK_N, BLOCK_W * CODES))
    column = tl.program_id(1) * BLOCK_W * CODES + tl.arange(0, BLOCK_W * CODES)
    place = out + n.to(tl.int64)[:, None] * IN + column[None, :]
    stored = (n < count)[:, None] & (column < IN)[None, :]
    tl.store(place, columns.to(out.dtype.element_ty), mask=stored)


def product(
    x: torch.Tensor,  # [rows, in], contiguous, or [rows, 2 * in] with `silu`
    matrix: Packed,
    *,
    silu: bool = False,  # each row of x holds gate, then up
    norm: tuple[torch.Tensor, float] | None = None,  # weight [in], epsilon: apply RMS norm to x
    add_to: torch.Tensor | None = None,  # [rows, out], contiguous; added to and returned
) -> torch.Tensor:
    """-> [rows, out]"""
    rows, out_features = x.shape[0], matrix.outputs
    if silu and rows > 1:
        x, silu = silu_and_mul(x), False
    if rows > _FEW_ROWS:
        if norm is not None:
            x = rms_norm(x, *norm)
        return _many_rows(x, matrix, add_to)
    out = add_to
    if out is None:
        out = torch.empty(rows, out_features, dtype=x.dtype, device=x.device)
    if rows == 0:
        return out
    norm_weight, eps = (x, 0.0) if norm is None else norm
    what = {**matrix.constants, "NORM": norm is not None, "ADD": add_to is not None}
    given = (x, *matrix.pointers, out, norm_weight, eps)
    if rows == 1:
        per_warp = 32 * 4 * 32 // matrix.bits  # columns of 32 threads with four words each
        block_k = max(per_warp, power_of_two(matrix.columns))
        warps = min(16, block_k // per_warp)
        programs, most = staying(x.device, warps, blocks_of(out_features, _ONE_ROW_OUTPUTS))
        _one_row_kernel[(programs,)](
            *given, out_features, **what, BLOCK_N=_ONE_ROW_OUTPUTS, BLOCK_K=block_k, GATED=silu,
            num_warps=warps, num_stages=1, maxnreg=most, **pdl_options(x),
        )  # fmt: skip
        return out
    parts = 4 if matrix.columns <= 2048 else 8
    _few_rows_kernel[(blocks_of(out_features, 16),)](
        *given, rows, out_features, **what,
        BLOCK_M=8 if rows <= 8 else 16 if rows <= 16 else 32, BLOCK_N=16, PARTS=parts, BLOCK_W=32,
        num_warps=parts, num_stages=1, **pdl_options(x),
    )  # fmt: skip
    return out


def widened(
    matrix: Packed,
    dtype: torch.dtype,
    rows: slice | None = None,  # of the matrix, from a multiple of 8 on
    ids: torch.Tensor | None = None,  # [n] int64, rows of the matrix
) -> torch.Tensor:
    """The matrix, or some of its rows, in float: [n, in]"""
    if rows is not None:
        eights = slice(rows.start // 8, blocks_of(rows.stop, 8))
        tensors = (None if own is None else own[eights] for own in matrix[:3])
        matrix = Packed._make((*tensors, rows.stop - rows.start, *matrix[4:]))
    count = matrix.outputs if ids is None else len(ids)
    out = torch.empty(count, matrix.columns, dtype=dtype, device=matrix.words.device)
    if count == 0:
        return out
    block_w = 128
    _widen_kernel[(blocks_of(count, 8), blocks_of(matrix.columns * matrix.bits, 32 * block_w))](
        matrix.words if ids is None else ids, *matrix.pointers, out, count, **matrix.constants,
        CHOSEN=ids is not None, BLOCK_N=8, BLOCK_W=block_w, num_warps=4, **pdl_options(out),
    )  # fmt: skip
    return out


def _many_rows(x: torch.Tensor, matrix: Packed, add_to: torch.Tensor | None) -> torch.Tensor:
    """Widen some outputs at a time, and multiply."""
    outputs = matrix.outputs
    at_once = max(1, _MOST_WIDENED // matrix.columns // 16) * 16
    if at_once >= outputs:
        result = F.linear(x, widened(matrix, x.dtype))
        return result if add_to is None else add_to.add_(result)
    out = add_to
    if out is None:
        out = torch.empty(x.shape[0], outputs, dtype=x.dtype, device=x.device)
    for begin in range(0, outputs, at_once):
        own = slice(begin, min(begin + at_once, outputs))
        part = F.linear(x, widened(matrix, x.dtype, own))
        if add_to is None:
            out[:, own].copy_(part)
        else:
            out[:, own].add_(part)
    return out
