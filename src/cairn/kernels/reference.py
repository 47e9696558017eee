"""Torch reference for the attention kernels; it runs one sequence after the other."""

from __future__ import annotations

import torch


def paged_attention(
    query: torch.Tensor,  # [rows, heads, dim]
    pool: torch.Tensor,  # [pages, 2 * kv_heads, page_size, dim]
    page_table: torch.Tensor,  # [seqs, pages]
    kv_lens: list[int],
    query_lens: list[int],
    *,
    scale: float,
    window: int | None = None,
    hide_last: bool = False,
) -> tuple[torch.Tensor, torch.Tensor]:
    """-> output [rows, heads, dim] and log-sum-exp [rows, heads], both float32 or wider"""
    wide = torch.promote_types(query.dtype, torch.float32)
    kv_heads, page_size = pool.shape[1] // 2, pool.shape[2]
    outs, lses, row = [], [], 0
    for s, (length, count) in enumerate(zip(kv_lens, query_lens, strict=True)):
        pages = pool[page_table[s, : -(-length // page_size)].long()].to(wide)
        both = pages.transpose(1, 2).flatten(0, 1)[:length]  # [length, 2 * kv_heads, dim]
        key, value = both[:, :kv_heads], both[:, kv_heads:]
        own = query[row : row + count].to(wide)
        group = own.shape[1] // kv_heads
        key, value = (t.repeat_interleave(group, 1) for t in (key, value))
        scores = torch.einsum("qhd,khd->qhk", own, key) * scale
        position = torch.arange(length - count, length, device=query.device)[:, None]
        n = torch.arange(length, device=query.device)[None]
        seen = n <= position
        if window is not None:
            seen = seen & (n > position - window)
        if hide_last:
            seen = seen & (n % page_size != page_size - 1)
        scores = scores.masked_fill(~seen[:, None], float("-inf"))
        lse = scores.logsumexp(-1)
        outs.append(torch.einsum("qhk,khd->qhd", (scores - lse[..., None]).exp(), value))
        lses.append(lse)
        row += count
    return torch.cat(outs), torch.cat(lses)
