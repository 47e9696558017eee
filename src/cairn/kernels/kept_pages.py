"""Page tables for drafts that read pages which an earlier draft selected, in one launch."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from cairn.kernels.launch import direct
from cairn.kernels.sizes import power_of_two


@direct
@triton.jit(do_not_specialize=["kept_stride", "table_stride", "table_width"])
def _kept_kernel(
    kept,  # [layers, most seqs, KV_HEADS, TOPK]
    kept_from,  # [most seqs]
    page_table,  # [seqs, table_width]
    kv_lens,  # [seqs]
    tables,  # [layers, seqs, KV_HEADS, PAGES]
    lens,  # [seqs]
    kept_stride: tl.int64,  # from layer to layer
    table_stride: tl.int32,
    table_width: tl.int32,
    KV_HEADS: tl.constexpr,
    TOPK: tl.constexpr,
    PAGES: tl.constexpr,
    PAGE_SIZE: tl.constexpr,
    BLOCK: tl.constexpr,
):
    seq, layer = tl.program_id(0), tl.program_id(1)
    first = tl.load(kept_from + seq)
    j = tl.arange(0, BLOCK)
    for head in tl.static_range(KV_HEADS):
        own = kept + layer * kept_stride + (seq * KV_HEADS + head) * TOPK
        place = tl.load(own + j, mask=j < TOPK, other=0)
        place = tl.where(j < TOPK, tl.maximum(place, 0), first + j - TOPK)
        place = tl.minimum(place, table_width - 1)
        page = tl.load(page_table + seq * table_stride + place, mask=j < PAGES, other=0)
        row = (layer * tl.num_programs(0) + seq).to(tl.int64) * KV_HEADS + head
        tl.store(tables + row * PAGES + j, page, mask=j < PAGES)
    if layer == 0:
        tl.store(lens + seq, tl.load(kv_lens + seq) + (TOPK - first) * PAGE_SIZE)


def kept_tables(
    kept: torch.Tensor,  # [layers, most seqs, kv_heads, k] int32, places in the sequence; -1: none
    kept_from: torch.Tensor,  # [most seqs] int32, first page of the window when they were selected
    page_table: torch.Tensor,  # [seqs, pages] int32
    kv_lens: torch.Tensor,  # [seqs] int32
    *,
    pages: int,
    page_size: int,
) -> tuple[torch.Tensor, torch.Tensor]:
    """For each layer and kv head the table [layers, seqs, kv_heads, pages] of a sequence that has
    the selected pages and those from the window on, and its length [seqs]."""
    layers, _, kv_heads, topk = kept.shape
    seqs, width = page_table.shape
    tables = torch.empty(layers, seqs, kv_heads, pages, dtype=torch.int32, device=page_table.device)
    lens = torch.empty_like(kv_lens)
    _kept_kernel[(seqs, layers)](
        kept,
        kept_from,
        page_table,
        kv_lens,
        tables,
        lens,
        kept.stride(0),
        page_table.stride(0),
        width,
        KV_HEADS=kv_heads,
        TOPK=topk,
        PAGES=pages,
        PAGE_SIZE=page_size,
        BLOCK=power_of_two(pages),
        num_warps=1,
    )
    return tables, lens
