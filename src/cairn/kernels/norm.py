"""RMS norm, alone or fused with the addition to the residual stream before it."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from cairn.kernels.launch import direct
from cairn.kernels.pdl import pdl_options
from cairn.kernels.sizes import power_of_two


@direct
@triton.jit(do_not_specialize=["part_stride"])
def _norm_kernel(
    x,  # [rows, DIM], or [PARTS, rows, DIM], whose sum over parts is meant
    residual,  # [rows, DIM], x is added to it in place if ADD
    weight,
    out,
    eps,
    x_stride,
    part_stride: tl.int32,
    PARTS: tl.constexpr,
    DIM: tl.constexpr,
    BLOCK: tl.constexpr,
    ADD: tl.constexpr,
    PDL: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    offs = tl.arange(0, BLOCK)
    mask = offs < DIM
    w = tl.load(weight + offs, mask=mask, other=0.0).to(tl.float32)
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    value = tl.load(x + row * x_stride + offs, mask=mask, other=0.0).to(tl.float32)
    for part in tl.static_range(1, PARTS):
        own = x + part * part_stride + row * x_stride
        value += tl.load(own + offs, mask=mask, other=0.0).to(tl.float32)
    if ADD:
        value += tl.load(residual + row * DIM + offs, mask=mask, other=0.0).to(tl.float32)
        rounded = value.to(residual.dtype.element_ty)
        tl.store(residual + row * DIM + offs, rounded, mask=mask)
        value = rounded.to(tl.float32)
    scale = tl.rsqrt(tl.sum(value * value) / DIM + eps)
    tl.store(out + row * DIM + offs, (value * scale * w).to(out.dtype.element_ty), mask=mask)


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """x [rows, dim], any row stride -> [rows, dim]"""
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    _launch(x, x, weight, out, eps, add=False)
    return out


def add_rms_norm(
    x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float
) -> torch.Tensor:
    """Add x to `residual` in place and return the norm of the sum. All are [rows, dim]; x may also
    be [parts, rows, dim], whose sum over parts is added."""
    out = torch.empty_like(residual)
    _launch(x, residual, weight, out, eps, add=True)
    return out


def _launch(
    x: torch.Tensor,
    residual: torch.Tensor,
    weight: torch.Tensor,
    out: torch.Tensor,
    eps: float,
    *,
    add: bool,
) -> None:
    dim = x.shape[-1]
    block = power_of_two(dim)
    parts = x.shape[0] if x.ndim == 3 else 1
    _norm_kernel[(out.shape[0],)](
        x,
        residual,
        weight,
        out,
        eps,
        x.stride(-2),
        x.stride(0),
        PARTS=parts,
        DIM=dim,
        BLOCK=block,
        ADD=add,
        num_warps=4 if block <= 2048 else 8,
        **pdl_options(x),
    )
