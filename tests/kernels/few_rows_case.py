"""Products of few rows with quantised matrices, and what they must give."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from cairn.bench.products import random_codes
from cairn.kernels.code_rows import CodeMatrix
from cairn.kernels.references import gemv_reference, silu_and_mul_reference
from cairn.models.blocks import Kept
from cairn.models.fp8 import to_fp8
from cairn.models.gpu_matrix import FewRows, gpu_matrix


@dataclass
class FewRowsCase:
    matrix: FewRows
    x: torch.Tensor
    norm: tuple[torch.Tensor, float] | None
    stream: torch.Tensor | None
    expected: torch.Tensor

    def check(self, found: torch.Tensor) -> None:
        errors = (found.double() - self.expected).norm(dim=1) / self.expected.norm(dim=1)
        # The result is rounded to bfloat16; several rows with codes also after their norm, which
        # counts twice if gate and up are multiplied.
        most = 8e-3 if isinstance(self.matrix, CodeMatrix) and self.norm else 4e-3
        assert errors.max() < most, f"error ratio {errors.max():.1e}"


def few_rows_case(
    form: str,
    rows: int,
    columns: int,
    device: torch.device,
    dtype: torch.dtype = torch.bfloat16,
    *,
    kind: str = "plain",
    outputs: int = 37,
) -> FewRowsCase:
    """`form` is that of codes, fp8, or fp8-N with a scale for every N columns. `kind`: plain, added
    to what was there, after an RMS norm, or gated after one."""
    torch.manual_seed(0)
    given: Kept
    if form.startswith("fp8"):
        dense = torch.randn(outputs, columns, device=device) * columns**-0.5
        given = to_fp8(dense, int(form[4:]) if form != "fp8" else None)
        assert given.scale is not None
        given.scale.mul_(torch.rand_like(given.scale) + 0.5)
    else:
        given = random_codes(form, outputs, columns).to(device)
    matrix = gpu_matrix(given).for_few_rows
    assert matrix is not None
    if kind == "gated":
        matrix = matrix.gated()
        assert matrix is not None
    wide = torch.randn(rows, columns, device=device)
    x = (wide * torch.logspace(-3, 3, rows, device=device)[:, None]).to(dtype)
    norm = None
    if kind in ("normed", "gated"):
        norm = (torch.rand(columns, device=device) + 0.5).to(dtype), 1e-2
    stream = torch.randn(rows, outputs, device=device).to(dtype) if kind == "added" else None
    expected = gemv_reference(
        x.double(),
        given.dense().double(),
        norm=None if norm is None else (norm[0].double(), norm[1]),
        add_to=None if stream is None else stream.double(),
    )
    if kind == "gated":
        expected = silu_and_mul_reference(expected)
    return FewRowsCase(matrix, x, norm, stream, expected)
