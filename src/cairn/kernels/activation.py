"""silu(gate) * up, where gate and up are the two halves of a row."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from cairn.kernels.launch import direct
from cairn.kernels.pdl import pdl_options
from cairn.kernels.sizes import blocks_of, power_of_two


@direct
@triton.jit
def _silu_kernel(gate_up, out, WIDTH: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    offs = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = offs < WIDTH
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    gate = tl.load(gate_up + row * (2 * WIDTH) + offs, mask=mask, other=0.0).to(tl.float32)
    up = tl.load(gate_up + row * (2 * WIDTH) + WIDTH + offs, mask=mask, other=0.0).to(tl.float32)
    value = gate / (1.0 + tl.exp(-gate)) * up
    tl.store(out + row * WIDTH + offs, value.to(out.dtype.element_ty), mask=mask)


def silu_and_mul(gate_up: torch.Tensor) -> torch.Tensor:
    """[rows, 2 * width], contiguous -> [rows, width]"""
    rows, width = gate_up.shape[0], gate_up.shape[1] // 2
    out = torch.empty(rows, width, dtype=gate_up.dtype, device=gate_up.device)
    block = min(1024, power_of_two(width))
    _silu_kernel[(rows, blocks_of(width, block))](
        gate_up, out, WIDTH=width, BLOCK=block, num_warps=4, **pdl_options(gate_up)
    )
    return out
