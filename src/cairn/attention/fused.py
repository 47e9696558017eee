"""Torch's own attention, without what it computes wrongly."""

from __future__ import annotations

from contextlib import nullcontext

import torch
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

_MOST_FUSED = 256  # columns of a head that torch's fused kernels on CUDA are known to serve


def attention(
    query: torch.Tensor,  # [..., rows, dim]
    key: torch.Tensor,  # [..., keys, dim]
    value: torch.Tensor,  # like key
    scale: float,
    mask: torch.Tensor | None = None,
) -> torch.Tensor:
    """Attention output, [..., rows, dim]."""
    # Torch's fused kernel for heads this wide gives wrong results for some numbers of rows.
    wide = query.device.type == "cuda" and query.shape[-1] > _MOST_FUSED
    with sdpa_kernel(SDPBackend.MATH) if wide else nullcontext():
        return F.scaled_dot_product_attention(query, key, value, attn_mask=mask, scale=scale)
