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
    with sdpa_kernel(_cuda_kernels(query)) if query.device.type == "cuda" else nullcontext():
        return F.scaled_dot_product_attention(query, key, value, attn_mask=mask, scale=scale)


def _cuda_kernels(query: torch.Tensor) -> list[SDPBackend]:
    """The kernels that torch may choose from. cuDNN's is never among them: it plans for 0.1 s at
    every new shape. Fused kernels give wrong results for some numbers of rows if heads are wide."""
    if query.shape[-1] > _MOST_FUSED:
        return [SDPBackend.MATH]
    return [SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH]
