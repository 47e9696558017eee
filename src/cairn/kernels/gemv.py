"""Products of a few rows with a weight matrix, x @ W.T, at the speed at which W can be read.

With few rows, reading the matrix takes all the time. The RMS norm or silu(gate) * up before the
product is small, so every program repeats it instead of leaving it to a separate kernel. The
addition to the residual stream after the product is fused as well.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait
from triton.tools.tensor_descriptor import TensorDescriptor

from cairn.kernels.activation import silu_and_mul
from cairn.kernels.interface import FEW_ROWS, STREAMED_ROWS, streams
from cairn.kernels.launch import direct
from cairn.kernels.norm import rms_norm
from cairn.kernels.paged_extend import can_describe
from cairn.kernels.pdl import pdl_options
from cairn.kernels.processors import processors
from cairn.kernels.sizes import blocks_of, power_of_two

_COLUMNS = 256  # matrix columns per warp in the kernel for several rows
_WIDE = 4096  # with more columns, the kernel for one row does not fit them all into registers


def row_rungs() -> tuple[int, ...]:
    """Row counts at which `gemv` switches to another compiled form; the last is too many for it,
    unless the matrix streams."""
    return 1, 2, FEW_ROWS + 1


@direct
@triton.jit
def _gemv_kernel(
    x,  # [IN], or [2 * IN] with SILU
    weight,  # [out_features, IN]
    out,  # [out_features], added to if ADD
    norm_weight,  # [IN], if NORM
    eps,
    out_features,
    IN: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    SILU: tl.constexpr,
    NORM: tl.constexpr,
    ADD: tl.constexpr,
    PDL: tl.constexpr,
):
    n = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    k = tl.arange(0, BLOCK_K)
    there = (n < out_features)[:, None]
    weights = weight + n[:, None].to(tl.int64) * IN
    if PDL:
        gdc_launch_dependents()
    # No kernel writes the weights, so the first loads are issued before the wait for x.
    w = tl.load(weights + k[None, :], mask=there & (k < IN)[None, :], other=0.0)
    if NORM:
        factor = tl.load(norm_weight + k, mask=k < IN, other=0.0)
    if PDL:
        gdc_wait()
    place = out + n
    if ADD:  # loaded before the product, to hide its latency
        before = tl.load(place, mask=n < out_features, other=0.0).to(tl.float32)
    acc = tl.zeros((BLOCK_N, BLOCK_K), tl.float32)
    squares = tl.zeros((BLOCK_K,), tl.float32)
    for start in tl.static_range(0, IN, BLOCK_K):
        at = start + k
        inside = at < IN
        if start > 0:
            w = tl.load(weights + at[None, :], mask=there & inside[None, :], other=0.0)
            if NORM:
                factor = tl.load(norm_weight + at, mask=inside, other=0.0)
        if SILU:
            gate = tl.load(x + at, mask=inside, other=0.0).to(tl.float32)
            up = tl.load(x + IN + at, mask=inside, other=0.0).to(tl.float32)
            value = gate / (1.0 + tl.exp(-gate)) * up
        else:
            value = tl.load(x + at, mask=inside, other=0.0).to(tl.float32)
        if NORM:
            squares += value * value
            value *= factor.to(tl.float32)
        acc += w.to(tl.float32) * value[None, :]
    result = tl.sum(acc, 1)
    if NORM:
        result *= tl.rsqrt(tl.sum(squares) / IN + eps)
    if ADD:
        result += before
    tl.store(place, result.to(out.dtype.element_ty), mask=n < out_features)


@direct
@triton.jit(do_not_specialize=["rows"])
def _few_rows_kernel(
    x,  # [rows, IN]
    weight,  # [out_features, IN]
    out,  # [rows, out_features], added to if ADD
    norm_weight,  # [IN], if NORM
    eps,
    rows: tl.int32,
    out_features,
    IN: tl.constexpr,
    BLOCK_M: tl.constexpr,  # at least `rows`
    BLOCK_N: tl.constexpr,
    PARTS: tl.constexpr,
    BLOCK_K: tl.constexpr,
    NORM: tl.constexpr,
    ADD: tl.constexpr,
    PDL: tl.constexpr,
):
    m = tl.arange(0, BLOCK_M)
    n = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    k = tl.arange(0, PARTS)[:, None] * BLOCK_K + tl.arange(0, BLOCK_K)[None, :]
    there = (n < out_features)[None, :, None]
    weights = weight + n[None, :, None].to(tl.int64) * IN
    if PDL:
        gdc_launch_dependents()
    w = tl.load(weights + k[:, None, :], mask=there & (k < IN)[:, None, :], other=0.0)
    if PDL:
        gdc_wait()
    # Few outputs make too few product tiles for all warps, so the warps split the columns instead.
    acc = tl.zeros((PARTS, BLOCK_N, BLOCK_M), tl.float32)
    squares = tl.zeros((PARTS, BLOCK_M), tl.float32)
    for start in range(0, IN, PARTS * BLOCK_K):
        at = start + k
        inside = at < IN
        seen = (m < rows)[None, None, :] & inside[:, :, None]
        values = x + m[None, None, :] * IN + at[:, :, None]
        value = tl.load(values, mask=seen, other=0.0).to(tl.float32)
        if NORM:
            squares += tl.sum(value * value, 1)
            value *= tl.load(norm_weight + at, mask=inside, other=0.0).to(tl.float32)[:, :, None]
        acc = tl.dot(w, value.to(w.dtype), acc)
        if IN > PARTS * BLOCK_K:
            after = at + PARTS * BLOCK_K
            w = tl.load(
                weights + after[:, None, :], mask=there & (after < IN)[:, None, :], other=0.0
            )
    result = tl.sum(acc, 0)  # [BLOCK_N, BLOCK_M]
    if NORM:
        result *= tl.rsqrt(tl.sum(squares, 0) / IN + eps)[None, :]
    place = out + m[None, :] * out_features + n[:, None]
    stored = (m < rows)[None, :] & (n < out_features)[:, None]
    if ADD:
        result += tl.load(place, mask=stored, other=0.0).to(tl.float32)
    tl.store(place, result.to(out.dtype.element_ty), mask=stored)


@direct
@triton.jit(do_not_specialize=["rows"])
def _streamed_kernel(
    x,  # [rows, IN]
    weight,  # [out_features, IN]
    tiles,  # if TMA: descriptor of the weight, for loads of [BLOCK_N, BLOCK_K]
    out,  # [rows, out_features], added to if ADD
    rows: tl.int32,
    out_features,
    IN: tl.constexpr,  # a multiple of BLOCK_K
    BLOCK_M: tl.constexpr,  # at least `rows`
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    ADD: tl.constexpr,
    TMA: tl.constexpr,
    PDL: tl.constexpr,
):
    """Weights are the left operand: tensor cores take 64 rows there, but few on the right."""
    m = tl.arange(0, BLOCK_M)
    first = tl.program_id(0) * BLOCK_N
    n = first + tl.arange(0, BLOCK_N)
    k = tl.arange(0, BLOCK_K)
    there = m < rows
    values = x + m[:, None] * IN
    weights = weight + n[:, None].to(tl.int64) * IN
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    acc = tl.zeros((BLOCK_N, BLOCK_M), tl.float32)
    for start in range(0, IN, BLOCK_K):
        at = (start + k)[None, :]
        value = tl.load(values + at, mask=there[:, None], other=0.0)
        if TMA:
            w = tiles.load([first, start])
        else:
            w = tl.load(weights + at, mask=(n < out_features)[:, None], other=0.0)
        acc = tl.dot(w, value.T, acc)
    place = out + m[None, :] * out_features + n[:, None]
    stored = there[None, :] & (n < out_features)[:, None]
    if ADD:
        acc += tl.load(place, mask=stored, other=0.0).to(tl.float32)
    tl.store(place, acc.to(out.dtype.element_ty), mask=stored)


@direct
@triton.jit(do_not_specialize=["rows", "out_features"])
def _narrow_kernel(
    x,  # [rows, IN]
    weight,  # [out_features, IN] float32
    out,  # [rows, out_features] float32
    scale,
    rows: tl.int32,
    out_features: tl.int32,
    IN: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_K: tl.constexpr,
    PDL: tl.constexpr,
):
    """One output of a few rows; all columns are loaded at once if there are not too many."""
    n = tl.program_id(0)
    m = tl.program_id(1) * BLOCK_M + tl.arange(0, BLOCK_M)
    k = tl.arange(0, BLOCK_K)
    if PDL:
        gdc_launch_dependents()
    w = tl.load(weight + n * IN + k, mask=k < IN, other=0.0)  # before the wait, as above
    if PDL:
        gdc_wait()
    result = tl.zeros((BLOCK_M,), tl.float32)
    for start in tl.static_range(0, IN, BLOCK_K):
        at = start + k
        if start > 0:
            w = tl.load(weight + n * IN + at, mask=at < IN, other=0.0)
        seen = (m < rows)[:, None] & (at < IN)[None, :]
        value = tl.load(x + m[:, None] * IN + at[None, :], mask=seen, other=0.0)
        result += tl.sum(value.to(tl.float32) * w[None, :], 1)
    tl.store(out + m * out_features + n, result * scale, mask=m < rows)


def narrow_product(x: torch.Tensor, weight: torch.Tensor, scale: float = 1.0) -> torch.Tensor:
    """x [rows, in], contiguous, and a matrix of few outputs in float32, [out, in] -> [rows, out]
    float32, scaled"""
    rows, (out_features, width) = len(x), weight.shape
    out = torch.empty(rows, out_features, dtype=torch.float32, device=x.device)
    _narrow_kernel[(out_features, blocks_of(rows, 4))](
        x,
        weight,
        out,
        scale,
        rows,
        out_features,
        IN=width,
        BLOCK_M=4,
        BLOCK_K=min(8192, power_of_two(width)),
        num_warps=8,
        num_stages=1,
        **pdl_options(x),
    )
    return out


def gemv(
    x: torch.Tensor,  # [rows, in], contiguous, or [rows, 2 * in] with `silu`
    weight: torch.Tensor,  # [out, in]
    *,
    silu: bool = False,  # each row of x holds gate, then up
    norm: tuple[torch.Tensor, float] | None = None,  # weight [in], epsilon: apply RMS norm to x
    add_to: torch.Tensor | None = None,  # [rows, out], contiguous; added to and returned
) -> torch.Tensor:
    """-> [rows, out]; takes 1 to FEW_ROWS rows, or STREAMED_ROWS if the matrix `streams`"""
    rows = x.shape[0]
    out_features, width = weight.shape
    streamed = x.dtype.itemsize == 2 and streams(out_features, width)  # for tensor cores
    assert 1 <= rows <= (STREAMED_ROWS if streamed else FEW_ROWS)
    streamed = streamed and (rows > 1 or width > _WIDE)
    out = add_to
    if out is None:
        out = torch.empty(rows, out_features, dtype=x.dtype, device=x.device)
    if silu and (rows > 1 or streamed):  # too much work to repeat in every program
        x, silu = silu_and_mul(x), False
    if streamed:
        _streamed(x if norm is None else rms_norm(x, *norm), weight, out, add_to is not None)
        return out
    norm_weight, eps = (x, 0.0) if norm is None else norm
    what = {"IN": width, "NORM": norm is not None, "ADD": add_to is not None}
    given = (x, weight, out, norm_weight, eps)
    if rows > 1:
        parts = 4 if width <= 1024 else 8
        _few_rows_kernel[(blocks_of(out_features, 16),)](
            *given,
            rows,
            out_features,
            **what,
            BLOCK_M=FEW_ROWS,
            BLOCK_N=16,
            PARTS=parts,
            BLOCK_K=_COLUMNS,
            num_warps=parts,
            num_stages=1,
            **pdl_options(x),
        )
        return out
    block_n, block_k, warps = _tile(out_features, width)
    _gemv_kernel[(blocks_of(out_features, block_n),)](
        *given,
        out_features,
        **what,
        BLOCK_N=block_n,
        BLOCK_K=block_k,
        SILU=silu,
        num_warps=warps,
        num_stages=1,
        **pdl_options(x),
    )
    return out


def _streamed(x: torch.Tensor, weight: torch.Tensor, out: torch.Tensor, add: bool) -> None:
    rows, (out_features, width) = len(x), weight.shape
    tma = can_describe(x.device, x.dtype)
    tiles = TensorDescriptor.from_tensor(weight, [64, 128]) if tma else weight
    programs = blocks_of(out_features, 64)
    _streamed_kernel[(programs,)](
        x,
        weight,
        tiles,
        out,
        rows,
        out_features,
        IN=width,
        BLOCK_M=FEW_ROWS if rows <= FEW_ROWS else STREAMED_ROWS,
        BLOCK_N=64,
        BLOCK_K=128,
        ADD=add,
        TMA=tma,
        num_warps=4,
        num_stages=6 if programs <= processors(x.device) else 4,  # one on each, or two
        **pdl_options(x),
    )


def _tile(out_features: int, width: int) -> tuple[int, int, int]:
    """Tile rows, tile columns and warps of a program of the one-row kernel.

    Measured on an H200. Many small programs are best, with as many columns as fit in registers,
    because whatever is loaded before the wait costs nothing.
    """
    columns = min(4096, power_of_two(width))
    if out_features >= 4096 and columns <= 1024:
        return 4, columns, 2
    if columns == 4096:
        return 4, columns, 8
    return 2, columns, max(4, columns // 512)
