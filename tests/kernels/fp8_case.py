"""Products with FP8 matrices against their reference, on any device."""

from __future__ import annotations

import torch

from cairn.kernels import fp8 as kernels
from cairn.kernels.fp8_many import prepare
from cairn.kernels.interface import BLOCK_OUTPUTS
from cairn.kernels.references import rms_norm_reference, silu_and_mul_reference
from cairn.models.fp8 import fp8_product, to_fp8


def check_product(
    rows: int,
    width: int,
    group: int,
    device: torch.device,
    dtype: torch.dtype,
    *,
    before: str = "nothing",
    adds: bool = False,
    outputs: int = 37,
    of_blocks: bool = False,
    tolerance: float = 1e-5,
) -> None:
    """`of_blocks`: blocks of 128 outputs have the same scales."""
    torch.manual_seed(0)
    matrix = to_fp8(torch.randn(outputs, width, device=device) * width**-0.5, group)
    assert matrix.scale is not None
    matrix.scale.mul_(torch.rand_like(matrix.scale) + 0.5)
    if of_blocks:
        firsts = matrix.scale[::BLOCK_OUTPUTS].repeat_interleave(BLOCK_OUTPUTS, 0)
        matrix.scale.copy_(firsts[:outputs])
    x = torch.randn(rows, 2 * width if before == "silu" else width, device=device).to(dtype)
    norm = None
    if before == "norm":
        norm = (torch.rand(width, device=device) + 0.5).to(dtype), 1e-2
    stream = torch.randn(rows, outputs, device=device).to(dtype) if adds else None
    given = x
    if before == "silu":
        given = silu_and_mul_reference(x.float()).to(dtype)
    if norm is not None:
        given = rms_norm_reference(x, *norm)
    own = matrix.values, matrix.scale, group
    prepared = prepare(*own)
    assert of_blocks == prepared.has_blocks
    expected = fp8_product(given, matrix, prepared.row_group(rows, dtype, group) or width)
    if stream is not None:
        expected = expected + stream
    found = kernels.product(x, *own, prepared, silu=before == "silu", norm=norm, add_to=stream)
    error = (found.float() - expected).norm() / expected.norm()
    assert error < tolerance, f"error ratio {error:.1e}"
    assert stream is None or found is stream
