"""FlashAttention-3 from SGLang's kernel package, over Cairn's paged cache."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
import torch

from cairn.attention.backend import (
    DENSE_GRAPHS,
    AttentionShape,
    DenseBackend,
    Graph,
    missing_module,
)
from cairn.attention.batch import AttentionBatch, Scoring, to_device
from cairn.kernels.fp8_rows import page_rows
from cairn.kernels.workspace import Workspace
from cairn.memory.kv_pool import KVPool

_TILE = 128
"""Rows of a key tile. Pages whose size is a multiple of this are loaded by TMA. Smaller pages are
loaded row by row, which is 9 % slower for long prompts."""
_MOST_GATHERED = 4 * 2**30
"""Most bytes to copy for one layer."""


@dataclass(frozen=True, slots=True)
class _Gathered:
    """A group's small pages, combined into large pages, for one layer at a time."""

    pages: torch.Tensor  # [n] int32, small pages of each large page, in order
    table: torch.Tensor  # [seqs, large pages] int32
    workspace: Workspace


@dataclass(frozen=True, slots=True)
class SglMetadata:
    kv_lens: torch.Tensor
    cu_query: torch.Tensor
    max_query: int
    tables: tuple[torch.Tensor, ...]
    gathered: dict[int, _Gathered]  # by group


class SglKernelBackend(DenseBackend):
    name = "sgl_kernel"
    head_dims: ClassVar[tuple[int, ...] | None] = (64, 96, 128, 192, 256)
    reads_widened = True
    graphs = DENSE_GRAPHS
    gather_from = 3000
    """First copy a layer's pages into large pages if, on average, more new rows than this read
    each cached row. The copy already pays off from about half this number."""

    def __init__(self, shape: AttentionShape, pool: KVPool) -> None:
        super().__init__(shape, pool)
        from sgl_kernel.flash_attn import flash_attn_with_kvcache

        self._attend: Any = flash_attn_with_kvcache
        self._tile = _TILE  # rows of a large page

    @classmethod
    def unavailable_reason(cls, device: torch.device) -> str | None:
        if device.type != "cuda":
            return f"its kernels are for CUDA devices, this is {device.type}"
        major, minor = torch.cuda.get_device_capability(device)
        if major not in (8, 9):
            return f"it is built for compute capability 8.x and 9.0, this is {major}.{minor}"
        return missing_module("sgl_kernel.flash_attn", "sglang-kernel")

    def prepare(self, batch: AttentionBatch, groups: Collection[int] | None = None) -> SglMetadata:
        gathered = {}
        if batch.recorded is None and self._pays_to_gather(batch):
            gathered = {
                g: _gather(batch, g, self._tile)
                for g in (range(len(batch.groups)) if groups is None else groups)
                if self._shape.groups[g].window is None
            }
        return SglMetadata(
            batch.device_kv_lens,
            batch.device_cu_query,
            int(batch.query_lens.max()),
            tuple(group.page_table for group in batch.groups),
            gathered,
        )

    def graph_for(self, batch: AttentionBatch, *, mixed: bool) -> Graph | None:
        gathers = mixed and self._pays_to_gather(batch)
        return None if gathers else super().graph_for(batch, mixed=mixed)

    def _pays_to_gather(self, batch: AttentionBatch) -> bool:
        if self._tile % batch.page_size or batch.page_size == self._tile:
            return False
        row_bytes = max(group.layout.page_bytes(1) for group in self._shape.groups)
        cached = int(batch.kv_lens.sum())
        if cached * row_bytes > _MOST_GATHERED:
            return False
        return bool(batch.query_lens @ batch.kv_lens > self.gather_from * cached)

    def attend(self, layer: int, query: torch.Tensor, metadata: SglMetadata) -> torch.Tensor:
        g = self._pool.group_of[layer]
        window = self._shape.groups[g].window
        pool, table = self._pool.part(layer), metadata.tables[g]
        pages = pool[:, :, : page_rows(pool)]
        if g in metadata.gathered:
            pages, table = self._gathered(pages, metadata.gathered[g]), metadata.gathered[g].table
        keys, values = pages.transpose(1, 2).chunk(2, dim=2)
        out: torch.Tensor = self._attend(
            query,
            keys,
            values,
            cache_seqlens=metadata.kv_lens,
            page_table=table,
            cu_seqlens_q=metadata.cu_query,
            max_seqlen_q=metadata.max_query,
            softmax_scale=self._shape.scale,
            causal=True,
            window_size=(-1, -1) if window is None else (window - 1, 0),
            **self._descales(layer, len(metadata.kv_lens)),
        )
        return out

    def _descales(self, layer: int, seqs: int) -> dict[str, torch.Tensor]:
        """Scales of the numbers that the kernel reads."""
        return {}

    def forward_rows(
        self,
        layer: int,
        query: torch.Tensor,
        rows: torch.Tensor,
        metadata: SglMetadata,
        scoring: Scoring | None = None,
    ) -> torch.Tensor | None:
        """Each row as a sequence of its own."""
        if not len(rows):
            return query[:0]
        seq = torch.searchsorted(metadata.cu_query[1:], rows.int(), right=True)
        later = metadata.cu_query[1:][seq] - 1 - rows  # rows of the sequence behind this one
        own = SglMetadata(
            (metadata.kv_lens[seq] - later).int(),
            torch.arange(len(rows) + 1, dtype=torch.int32, device=rows.device),
            1,
            tuple(table[seq] for table in metadata.tables),
            {},
        )
        return self.attend(layer, query[rows], own)

    def _gathered(self, pages: torch.Tensor, gathered: _Gathered) -> torch.Tensor:
        """Large pages of a layer whose pages are [pages, 2 * kv_heads, page_size, dim]."""
        from cairn.kernels.gather_pages import gather_pages

        _, parts, page_size, dim = pages.shape
        ratio = self._tile // page_size
        size = (len(gathered.pages) // ratio, parts, self._tile, dim)
        large = gathered.workspace.take("pages", *size, dtype=pages.dtype)
        gather_pages(pages, gathered.pages, ratio, large)
        return large


def _gather(batch: AttentionBatch, group: int, tile: int) -> _Gathered:
    ratio = tile // batch.page_size
    counts = -(-batch.kv_lens // tile)
    most = int(counts.max())
    held = batch.groups[group].host_pages
    padded = np.zeros((len(counts), most * ratio), dtype=np.int32)
    width = min(held.shape[1], padded.shape[1])
    padded[:, :width] = held[:, :width]
    within = np.arange(most) < counts[:, None]  # [seqs, large pages]
    pages = padded.reshape(len(counts), most, ratio)[within]
    table = np.arange(most) + (np.cumsum(counts) - counts)[:, None]
    return _Gathered(
        to_device(pages.reshape(-1), batch.device),
        to_device(np.where(within, table, 0).astype(np.int32), batch.device),
        Workspace(batch.device),
    )
