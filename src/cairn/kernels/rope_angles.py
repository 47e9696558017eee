"""Cosines and sines of the rotary embedding for all rows of a step, in one launch."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from cairn.kernels.launch import direct


@direct
@triton.jit
def _angles_kernel(positions, frequencies, cos, sin, scale, HALF: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    j = tl.arange(0, triton.next_power_of_2(HALF))
    mask = j < HALF
    position = tl.load(positions + row).to(tl.float32)
    angle = position * tl.load(frequencies + j, mask=mask, other=0.0)
    c = (tl.cos(angle) * scale).to(cos.dtype.element_ty)
    s = (tl.sin(angle) * scale).to(cos.dtype.element_ty)
    first = row * (2 * HALF) + j
    tl.store(cos + first, c, mask=mask)
    tl.store(cos + first + HALF, c, mask=mask)
    tl.store(sin + first, -s, mask=mask)
    tl.store(sin + first + HALF, s, mask=mask)


def rope_angles(
    positions: torch.Tensor,  # [rows]
    frequencies: torch.Tensor,  # [dim / 2] float32
    scale: float,
    dtype: torch.dtype,
) -> tuple[torch.Tensor, torch.Tensor]:
    """-> cos, sin [rows, 1, dim]; the first half of sin is negated, as `rope_kv` expects"""
    rows, half = len(positions), len(frequencies)
    cos, sin = torch.empty(2, rows, 1, 2 * half, dtype=dtype, device=positions.device).unbind()
    _angles_kernel[(rows,)](positions, frequencies, cos, sin, scale, HALF=half, num_warps=1)
    return cos, sin
