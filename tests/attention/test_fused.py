"""Which of torch's kernels may compute attention."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch._subclasses.fake_tensor import FakeTensorMode

from cairn.attention import fused

FUSED: tuple[Any, ...] = (
    torch.backends.cuda.flash_sdp_enabled,
    torch.backends.cuda.mem_efficient_sdp_enabled,
)


@pytest.mark.parametrize(
    ("device", "columns", "may_fuse"),
    [("cuda", 256, True), ("cuda", 264, False), ("cuda", 576, False), ("cpu", 576, True)],
)
def test_wide_heads_are_not_fused_on_cuda(
    device: str, columns: int, may_fuse: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    compute, seen = F.scaled_dot_product_attention, []

    def spy(*given: Any, **more: Any) -> torch.Tensor:
        seen.append([enabled() for enabled in FUSED])
        return compute(*given, **more)

    monkeypatch.setattr(F, "scaled_dot_product_attention", spy)
    # As on a GPU, without one.
    with FakeTensorMode():
        rows = torch.empty(2, 1, 3, columns, device=device)
        assert fused.attention(rows, rows, rows, 1.0).shape == rows.shape
    assert seen == [[may_fuse] * 2]
