"""Products with quantised matrices against torch, on any device."""

from __future__ import annotations

import torch

from cairn.bench.products import random_codes
from cairn.kernels import packed
from cairn.kernels.references import gemv_reference
from cairn.models.gpu_matrix import PackedMatrix


def check_product(
    form: str,
    rows: int,
    columns: int,
    device: torch.device,
    dtype: torch.dtype,
    *,
    before: str = "nothing",
    outputs: int = 37,
    tolerance: float = 1e-5,
) -> None:
    codes = random_codes(form, outputs, columns).to(device)
    matrix = PackedMatrix(codes).packed
    torch.manual_seed(0)
    x = torch.randn(rows, 2 * columns if before == "silu" else columns, device=device).to(dtype)
    norm = None
    if before == "norm":
        norm = (torch.rand(columns, device=device) + 0.5).to(dtype), 1e-2
    streams = [torch.ones(rows, outputs, device=device).to(dtype) if norm else None] * 2
    streams = [None if stream is None else stream.clone() for stream in streams]
    found = packed.product(x, matrix, silu=before == "silu", norm=norm, add_to=streams[0])
    wide_norm = None if norm is None else (norm[0].double(), norm[1])
    expected = gemv_reference(
        x.double(),
        codes.dense().double(),
        silu=before == "silu",
        norm=wide_norm,
        add_to=None if streams[1] is None else streams[1].double(),
    )
    error = (found.double() - expected).norm() / expected.norm()
    assert error < tolerance, f"error ratio {error:.1e}"
    assert streams[0] is None or found is streams[0]


def check_widened(form: str, columns: int, device: torch.device) -> None:
    codes = random_codes(form, 50, columns).to(device)
    stored = PackedMatrix(codes)
    matrix, expected = stored.packed, codes.dense()
    assert torch.equal(stored.dense(), expected)
    torch.testing.assert_close(
        packed.widened(matrix, torch.float32), expected, rtol=1e-6, atol=1e-9
    )
    some = packed.widened(matrix, torch.float32, slice(16, 40))
    torch.testing.assert_close(some, expected[16:40], rtol=1e-6, atol=1e-9)
    ids = torch.tensor([49, 0, 7, 7], device=device)
    found = packed.widened(matrix, torch.float32, ids=ids)
    torch.testing.assert_close(found, expected[ids], rtol=1e-6, atol=1e-9)
