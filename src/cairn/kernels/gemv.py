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

from cairn.kernels.activation import silu_and_mul
from cairn.kernels.interface import FEW_ROWS
from cairn.kernels.launch import direct
from cairn.kernels.pdl import pdl_options
from cairn.kernels.sizes import blocks_of, power_of_two

_COLUMNS = 256  # matrix columns per warp in the kernel for several rows


def row_rungs() -> tuple[int, ...]:
    """Row counts at which `gemv` switches to another compiled form; the last is too many for it."""
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


def gemv(
    x: torch.Tensor,  # [rows, in], contiguous, or [rows, 2 * in] with `silu`
    weight: torch.Tensor,  # [out, in]
    *,
    silu: bool = False,  # each row of x holds gate, then up
    norm: tuple[torch.Tensor, float] | None = None,  # weight [in], epsilon: apply RMS norm to x
    add_to: torch.Tensor | None = None,  # [rows, out], contiguous; added to and returned
) -> torch.Tensor:
    """-> [rows, out]; takes 1 to FEW_ROWS rows"""
    rows = x.shape[0]
    assert 1 <= rows <= FEW_ROWS
    out_features, width = weight.shape
    out = add_to
    if out is None:
        out = torch.empty(rows, out_features, dtype=x.dtype, device=x.device)
    if silu and rows > 1:  # too much work to repeat in every program
        x, silu = silu_and_mul(x), False
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
