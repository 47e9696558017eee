"""How well a scale of e4m3 suits its row, for tests of the kernel that stores keys and values."""

from __future__ import annotations

import torch

from cairn.kernels.fp8_rows import widen


def weighed_errors(
    pages: torch.Tensor,  # [pages, 2 * kv_heads, rows, dim] of e4m3
    exact: torch.Tensor,  # [pages, 2 * kv_heads, page_size, dim]
    places: tuple[torch.Tensor, torch.Tensor],  # [n] page of each row, and its row there
    query: torch.Tensor,  # [n, heads, dim]
) -> torch.Tensor:
    """What `best_scales` minimises, for the rows at these places: [n, 2 * kv_heads] float64. The
    queries of a kv head count for its key, and none for its value."""
    page, offset = (place.long() for place in places)
    lost = (widen(pages, torch.float64) - exact)[page, :, offset]
    kv_heads = lost.shape[1] // 2
    sums = query.double().view(len(query), kv_heads, -1, query.shape[-1]).sum(2)
    unit = sums / sums.norm(dim=-1, keepdim=True).clamp(min=1e-12)
    errors = lost.square().sum(-1)
    errors[:, :kv_heads] += 32 * (lost[:, :kv_heads] * unit).sum(-1).square()
    return errors
