"""What the kernels of `hsa` refuse, before any of them runs."""

from __future__ import annotations

import pytest
import torch

from cairn.attention.backend import AttentionShape
from cairn.attention.hsa.kernel_sparse import KernelSparse
from cairn.memory.groups import group_layers
from cairn.memory.layout import CacheLayout
from cairn.sparsity.config import SparseConfig
from cairn.sparsity.policy import PolicyShape
from cairn.sparsity.registry import make_policy

BF16, FP8 = torch.bfloat16, torch.float8_e4m3fn


@pytest.mark.parametrize(
    ("dim", "dtype", "cache", "least"),
    [
        (16, BF16, BF16, None),
        (8, BF16, BF16, 16),
        (16, torch.float32, FP8, None),
        (16, BF16, FP8, 32),  # two products of 8 columns each, fewer than a product can have
        (32, BF16, FP8, None),
    ],
)
def test_small_heads(dim: int, dtype: torch.dtype, cache: torch.dtype, least: int | None) -> None:
    policy = make_policy("spread", PolicyShape(4, 2, dim, 1.0))
    config = SparseConfig(policy, (0,), 111, 128, policy.strategy, policy.fusion)
    groups = group_layers([None], [CacheLayout.of_heads(2, dim, cache)])
    shape = AttentionShape(4, 2, dim, 1.0, 8, dtype, torch.device("cuda"), groups)
    refused = f"head_dim is {dim}; they have powers of two from {least} to 128"
    assert KernelSparse.refusal(config, shape) == (None if least is None else refused)
