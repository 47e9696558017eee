"""Products of a few rows with a weight matrix: x @ W.T, at the speed W can be read.

With one row a matrix product is nothing but reading the matrix. What comes before it is small and
is done by every program for itself instead of by a kernel of its own: the RMS norm of the row, or
silu(gate) * up. So is what comes after it, the addition to the residual stream.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from cairn.kernels.launch import direct
from cairn.kernels.norm import rms_norm_reference
from cairn.kernels.pdl import pdl_options

_ROWS = 2  # of the matrix in one program


def gemv_reference(
    x: torch.Tensor,
    weight: torch.Tensor,
    *,
    silu: bool = False,
    norm: tuple[torch.Tensor, float] | None = None,
    add_to: torch.Tensor | None = None,
) -> torch.Tensor:
    """The same in torch; arguments as in `gemv`."""
    if silu:
        gate, up = x.chunk(2, dim=-1)
        x = torch.nn.functional.silu(gate) * up
    if norm is not None:
        x = rms_norm_reference(x, *norm)
    out = x @ weight.t()
    return out if add_to is None else add_to.add_(out)


@direct
@triton.jit
def _gemv_kernel(
    x,  # [rows, IN], or [rows, 2 * IN] with SILU
    weight,  # [out_features, IN]
    out,  # [rows, out_features], added to if ADD
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
    row = tl.program_id(1).to(tl.int64)
    n = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    k = tl.arange(0, BLOCK_K)
    there = (n < out_features)[:, None]
    weights = weight + n[:, None].to(tl.int64) * IN
    if PDL:
        gdc_launch_dependents()
    # Weights are nobody's output: the first ones are on their way before the wait for x.
    w = tl.load(weights + k[None, :], mask=there & (k < IN)[None, :], other=0.0)
    if PDL:
        gdc_wait()
    acc = tl.zeros((BLOCK_N, BLOCK_K), tl.float32)
    squares = tl.zeros((BLOCK_K,), tl.float32)
    for start in tl.static_range(0, IN, BLOCK_K):
        at = start + k
        inside = at < IN
        if start > 0:
            w = tl.load(weights + at[None, :], mask=there & inside[None, :], other=0.0)
        if SILU:
            gate = tl.load(x + row * (2 * IN) + at, mask=inside, other=0.0).to(tl.float32)
            up = tl.load(x + row * (2 * IN) + IN + at, mask=inside, other=0.0).to(tl.float32)
            value = gate / (1.0 + tl.exp(-gate)) * up
        else:
            value = tl.load(x + row * IN + at, mask=inside, other=0.0).to(tl.float32)
        if NORM:
            squares += value * value
            value *= tl.load(norm_weight + at, mask=inside, other=0.0).to(tl.float32)
        acc += w.to(tl.float32) * value[None, :]
    result = tl.sum(acc, 1)
    if NORM:
        result *= tl.rsqrt(tl.sum(squares) / IN + eps)
    place = out + row * out_features + n
    if ADD:
        result += tl.load(place, mask=n < out_features, other=0.0).to(tl.float32)
    tl.store(place, result.to(out.dtype.element_ty), mask=n < out_features)


def gemv(
    x: torch.Tensor,  # [rows, in], contiguous, or [rows, 2 * in] with `silu`
    weight: torch.Tensor,  # [out, in]
    *,
    silu: bool = False,  # x is gate and up side by side
    norm: tuple[torch.Tensor, float] | None = None,  # weight [in] and epsilon: x is normed first
    add_to: torch.Tensor | None = None,  # [rows, out], contiguous; takes the result, and is it
) -> torch.Tensor:
    """-> [rows, out]"""
    rows = x.shape[0]
    out_features, width = weight.shape
    out = add_to
    if out is None:
        out = torch.empty(rows, out_features, dtype=x.dtype, device=x.device)
    norm_weight, eps = (x, 0.0) if norm is None else norm
    # Many programs, each with two rows of the matrix; measured on an H200.
    wide = out_features >= 4096
    _gemv_kernel[(triton.cdiv(out_features, _ROWS), rows)](
        x,
        weight,
        out,
        norm_weight,
        eps,
        out_features,
        IN=width,
        BLOCK_N=_ROWS,
        BLOCK_K=min(512 if wide else 1024, triton.next_power_of_2(width)),
        SILU=silu,
        NORM=norm is not None,
        ADD=add_to is not None,
        num_warps=2 if wide else 8 if silu else 4,
        num_stages=1,
        **pdl_options(x),
    )
    return out
