"""Products x @ W.T with a matrix of FP8 numbers (e4m3) and their scales.

Every output has a scale for each group of columns, or one for all of them. Few rows are multiplied
as they are: the kernel reads FP8, at the speed of memory, and widens it in registers. More rows are
rounded to FP8 first (`fp8_many`).
`models/fp8.py` has the same products in torch.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from cairn.kernels import fp8_many
from cairn.kernels.activation import silu_and_mul
from cairn.kernels.fp8_many import Prepared, many_rows, tile_columns
from cairn.kernels.interface import FEW_ROWS
from cairn.kernels.launch import direct
from cairn.kernels.norm import rms_norm
from cairn.kernels.pdl import pdl_options
from cairn.kernels.processors import staying
from cairn.kernels.sizes import blocks_of, power_of_two

_RUN = 16  # columns that a thread loads at once
_ONE_ROW_OUTPUTS = 4  # of a tile


def row_rungs() -> tuple[int, ...]:
    """Row counts at which products switch to another compiled form."""
    return 1, 2, FEW_ROWS + 1, *fp8_many.row_rungs()


@direct
@triton.jit
def _one_row_kernel(
    x,  # [IN], or [2 * IN] with SILU
    weight,  # [out_features, IN] e4m3
    scale,  # [out_features, groups]
    out,  # [out_features], added to if ADD
    norm_weight,  # [IN], if NORM
    eps,
    out_features,
    IN: tl.constexpr,
    GROUP: tl.constexpr,  # columns with one scale; 0 for all
    RUN: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,  # at least IN
    SILU: tl.constexpr,
    NORM: tl.constexpr,
    ADD: tl.constexpr,
    PDL: tl.constexpr,
):
    """A program keeps x in registers and strides over the tiles of BLOCK_N outputs. While it
    multiplies one, other programs of the multiprocessor load theirs."""
    lane = tl.arange(0, BLOCK_N)
    run = tl.arange(0, BLOCK_K // RUN)
    k = run[:, None] * RUN + tl.arange(0, RUN)[None, :]
    inside = run < IN // RUN
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    value = tl.load(x + k, mask=inside[:, None], other=0.0).to(tl.float32)
    if SILU:
        up = tl.load(x + IN + k, mask=inside[:, None], other=0.0).to(tl.float32)
        value = value / (1.0 + tl.exp(-value)) * up
    if NORM:
        length = tl.rsqrt(tl.sum(tl.sum(value * value, 1)) / IN + eps)
        value *= tl.load(norm_weight + k, mask=inside[:, None], other=0.0).to(tl.float32)
        value *= length
    GROUPS: tl.constexpr = 1 if GROUP == 0 else (IN + GROUP - 1) // GROUP
    for first in range(tl.program_id(0) * BLOCK_N, out_features, tl.num_programs(0) * BLOCK_N):
        n = first + lane
        there = n < out_features
        row = n.to(tl.int64)
        here = there[:, None] & inside[None, :]
        w = tl.load(weight + row[:, None, None] * IN + k[None], mask=here[:, :, None], other=0.0)
        if GROUP > 0:
            own = scale + row[:, None] * GROUPS + (run * RUN // GROUP)[None, :]
            factor = tl.load(own, mask=here, other=0.0)
        else:
            factor = tl.load(scale + row, mask=there, other=0.0)
        if ADD:
            before = tl.load(out + n, mask=there, other=0.0).to(tl.float32)
        part = tl.sum(w.to(tl.float32) * value[None], 2)
        result = tl.sum(part * factor, 1) if GROUP > 0 else tl.sum(part, 1) * factor
        if ADD:
            result += before
        tl.store(out + n, result.to(out.dtype.element_ty), mask=there)


@direct
@triton.jit(do_not_specialize=["rows"])
def _few_rows_kernel(
    x,  # [rows, IN]
    weight,  # [out_features, IN] e4m3
    scale,  # [out_features, groups]
    out,  # [rows, out_features], added to if ADD
    norm_weight,  # [IN], if NORM
    eps,
    rows: tl.int32,
    out_features,
    IN: tl.constexpr,
    GROUP: tl.constexpr,
    BLOCK_M: tl.constexpr,  # at least `rows`
    BLOCK_N: tl.constexpr,
    PARTS: tl.constexpr,  # warps, which share the columns
    BLOCK_K: tl.constexpr,  # divides GROUP
    NORM: tl.constexpr,
    ADD: tl.constexpr,
    PDL: tl.constexpr,
):
    m = tl.arange(0, BLOCK_M)
    n = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    part = tl.arange(0, PARTS)
    k = part[:, None] * BLOCK_K + tl.arange(0, BLOCK_K)[None, :]
    there = (n < out_features)[None, :, None]
    weights = weight + n[None, :, None].to(tl.int64) * IN
    GROUPS: tl.constexpr = 1 if GROUP == 0 else (IN + GROUP - 1) // GROUP
    scales = scale + n.to(tl.int64) * GROUPS
    if PDL:
        gdc_launch_dependents()
    w = tl.load(weights + k[:, None, :], mask=there & (k < IN)[:, None, :], other=0.0)
    if PDL:
        gdc_wait()
    acc = tl.zeros((PARTS, BLOCK_N, BLOCK_M), tl.float32)
    squares = tl.zeros((PARTS, BLOCK_M), tl.float32)
    for start in range(0, IN, PARTS * BLOCK_K):
        at = start + k
        inside = at < IN
        seen = (m < rows)[None, None, :] & inside[:, :, None]
        values = x + m[None, None, :] * IN + at[:, :, None]
        value = tl.load(values, mask=seen, other=0.0)
        if NORM:
            wide = value.to(tl.float32)
            squares += tl.sum(wide * wide, 1)
            wide *= tl.load(norm_weight + at, mask=inside, other=0.0).to(tl.float32)[:, :, None]
            value = wide.to(x.dtype.element_ty)
        # By way of float32: hardware has no fast way from FP8 to bfloat16, or from float16.
        wide_w = w.to(tl.float32).to(value.dtype)
        if GROUP > 0:
            first = start + part * BLOCK_K
            own = scales[None, :] + (first // GROUP)[:, None]
            factor = tl.load(own, mask=(n < out_features)[None, :] & (first < IN)[:, None], other=0)
            zero = tl.zeros((PARTS, BLOCK_N, BLOCK_M), tl.float32)
            acc += tl.dot(wide_w, value, zero) * factor[:, :, None]
        else:
            acc = tl.dot(wide_w, value, acc)
        after = at + PARTS * BLOCK_K
        w = tl.load(weights + after[:, None, :], mask=there & (after < IN)[:, None, :], other=0.0)
    result = tl.sum(acc, 0)  # [BLOCK_N, BLOCK_M]
    if GROUP == 0:
        result *= tl.load(scales, mask=n < out_features, other=0.0)[:, None]
    if NORM:
        result *= tl.rsqrt(tl.sum(squares, 0) / IN + eps)[None, :]
    place = out + m[None, :] * out_features + n[:, None]
    stored = (m < rows)[None, :] & (n < out_features)[:, None]
    if ADD:
        result += tl.load(place, mask=stored, other=0.0).to(tl.float32)
    tl.store(place, result.to(out.dtype.element_ty), mask=stored)


def product(
    x: torch.Tensor,  # [rows, in], contiguous, or [rows, 2 * in] with `silu`
    weight: torch.Tensor,  # [out, in] e4m3; `in` is a multiple of 16
    scale: torch.Tensor,  # [out, groups] float32
    group: int,  # columns with one scale; 0 for all
    prepared: Prepared,
    *,
    silu: bool = False,  # each row of x holds gate, then up
    norm: tuple[torch.Tensor, float] | None = None,  # weight [in], epsilon: apply RMS norm to x
    add_to: torch.Tensor | None = None,  # [rows, out], contiguous; added to and returned
) -> torch.Tensor:
    """-> [rows, out]"""
    rows = x.shape[0]
    if silu and rows > 1:
        x, silu = silu_and_mul(x), False
    if rows > FEW_ROWS:
        if norm is not None:
            x = rms_norm(x, *norm)
        result = many_rows(x, weight, scale, group, prepared)
        return result if add_to is None else add_to.add_(result)
    out_features, width = weight.shape
    out = add_to
    if out is None:
        out = torch.empty(rows, out_features, dtype=x.dtype, device=x.device)
    if rows == 0:
        return out
    norm_weight, eps = (x, 0.0) if norm is None else norm
    what = {"IN": width, "GROUP": group, "NORM": norm is not None, "ADD": add_to is not None}
    given = (x, weight, scale, out, norm_weight, eps)
    if rows == 1:
        block_k = max(1024, power_of_two(width))
        warps = block_k // 1024 if block_k <= 4096 else 16
        programs, most = staying(x.device, warps, blocks_of(out_features, _ONE_ROW_OUTPUTS))
        _one_row_kernel[(programs,)](
            *given, out_features, **what, RUN=_RUN, BLOCK_N=_ONE_ROW_OUTPUTS, BLOCK_K=block_k,
            SILU=silu, num_warps=warps, num_stages=1, maxnreg=most, **pdl_options(x),
        )  # fmt: skip
        return out
    parts = 4 if width <= 2048 else 8
    _few_rows_kernel[(blocks_of(out_features, 16),)](
        *given, rows, out_features, **what,
        BLOCK_M=FEW_ROWS, BLOCK_N=16, PARTS=parts,
        BLOCK_K=tile_columns(group), num_warps=parts, num_stages=1, **pdl_options(x),
    )  # fmt: skip
    return out
