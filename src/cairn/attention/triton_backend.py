"""Cairn's own Triton kernels. Decode rows are split along the past, longer chunks into blocks of
rows."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import torch

from cairn.attention.backend import DENSE_GRAPHS, AttentionShape, DenseBackend, missing_module
from cairn.attention.batch import AttentionBatch, to_device
from cairn.memory.kv_pool import KVPool

if TYPE_CHECKING:
    from cairn.kernels.paged_extend import ExtendBlocks


@dataclass(frozen=True, slots=True)
class _Metadata:
    decode_rows: torch.Tensor | None  # [n] rows of sequences with one new row; None without any
    decode_lens: torch.Tensor  # [n] their lengths
    decode_tables: tuple[torch.Tensor, ...]  # per group, [n, pages]
    blocks: ExtendBlocks | None  # of the other sequences
    batch: AttentionBatch
    groups: Collection[int]


class TritonBackend(DenseBackend):
    name = "triton"
    dtypes = (torch.bfloat16, torch.float16, torch.float32)
    hides_rows = True
    graphs = DENSE_GRAPHS

    def __init__(self, shape: AttentionShape, pool: KVPool) -> None:
        super().__init__(shape, pool)
        from cairn.kernels.paged_decode import DecodeSplits

        self._splits = [
            DecodeSplits.empty(
                shape.max_seqs, shape.num_heads, shape.num_kv_heads, shape.head_dim, shape.device
            )
            for _ in shape.groups
        ]
        self._every_row = torch.arange(shape.max_seqs, dtype=torch.int32, device=shape.device)

    @classmethod
    def unavailable_reason(cls, device: torch.device) -> str | None:
        if device.type != "cuda":
            return f"its kernels are for CUDA devices, this is {device.type}"
        return missing_module("triton", "triton")

    def prepare(self, batch: AttentionBatch, groups: Collection[int] | None = None) -> _Metadata:
        from cairn.kernels.paged_extend import ExtendBlocks

        lens = batch.device_kv_lens
        tables = tuple(group.page_table for group in batch.groups)
        rows: torch.Tensor | None = None
        blocks: ExtendBlocks | None = None
        if batch.decodes:
            rows = self._every_row[: batch.num_seqs]
        elif batch.recorded is not None:
            query_lens = batch.device_cu_query.diff()
            single = query_lens == 1
            rows, lens = batch.device_cu_query[:-1], torch.where(single, lens, 0)
            blocks = ExtendBlocks.on_device(query_lens.masked_fill(single, 0), batch.num_rows)
        else:
            chunks = np.flatnonzero(batch.query_lens > 1)
            blocks = ExtendBlocks.of(batch.query_lens, chunks, batch.device)
            decoding = np.flatnonzero(batch.query_lens == 1)
            if len(decoding):
                index = to_device(decoding, batch.device)
                rows, lens = batch.device_cu_query[index], lens[index]
                tables = tuple(table[index] for table in tables)
        if groups is None:
            groups = range(len(batch.groups))
        return _Metadata(rows, lens, tables, blocks, batch, groups)

    def begin(self, metadata: _Metadata) -> None:
        if metadata.decode_rows is None:
            return
        from cairn.kernels.paged_decode import plan_splits

        for g in metadata.groups:
            plan_splits(
                self._splits[g],
                metadata.decode_lens,
                kv_heads=self._shape.num_kv_heads,
                page_size=self._shape.page_size,
                window=self._shape.groups[g].window,
            )

    def attend(self, layer: int, query: torch.Tensor, metadata: _Metadata) -> torch.Tensor:
        from cairn.kernels.paged_decode import paged_decode
        from cairn.kernels.paged_extend import paged_extend

        out = torch.empty(query.shape, dtype=query.dtype, device=query.device)
        g = self._pool.group_of[layer]
        window = self._shape.groups[g].window
        pool = self._pool.part(layer)
        hide = self._shape.hides_landmark_rows
        if metadata.decode_rows is not None:
            paged_decode(
                query,
                pool,
                metadata.decode_tables[g],
                metadata.decode_lens,
                metadata.decode_rows,
                self._splits[g],
                out,
                scale=self._shape.scale,
                window=window,
                hide_last=hide,
            )
        if metadata.blocks is not None:
            batch = metadata.batch
            paged_extend(
                query,
                pool,
                batch.groups[g].page_table,
                batch.device_kv_lens,
                batch.device_cu_query,
                metadata.blocks,
                out,
                scale=self._shape.scale,
                window=window,
                hide_last=hide,
            )
        return out
