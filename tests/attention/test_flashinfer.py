"""Latent rows that FlashInfer's kernels do not have; tests/gpu/test_backends.py runs the others."""

from __future__ import annotations

import pytest
import torch

from cairn.attention.backend import AttentionShape
from cairn.attention.flashinfer_backend import FlashInferBackend
from cairn.memory.groups import group_layers
from cairn.memory.layout import CacheLayout


@pytest.mark.parametrize(
    ("heads", "columns", "window", "reason"),
    [
        (128, (256, 64), None, "256 and 64 columns; it has 512 and 64"),
        (40, (512, 64), None, "40 heads read latent rows; it has divisors of 128"),
        (128, (512, 64), 100, "no sliding windows"),
    ],
)
def test_other_latent_rows_are_refused(
    heads: int, columns: tuple[int, int], window: int | None, reason: str
) -> None:
    dtype, width = torch.bfloat16, sum(columns)
    groups = group_layers([window], [CacheLayout.of_latents(width).of_type(dtype)])
    size = (heads, 1, width, 0.1, 64, dtype, torch.device("cpu"), groups)
    shape = AttentionShape(*size, value_dim=columns[0])
    assert reason in (FlashInferBackend.unsupported_reason(shape) or "")
