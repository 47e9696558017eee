"""FlashInfer's paged attention. It plans on the host, once per step and layer group."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

import numpy as np
import torch

from cairn.attention.backend import AttentionShape, DenseBackend, missing_module
from cairn.attention.batch import AttentionBatch
from cairn.memory.kv_pool import KVPool
from cairn.memory.layout import KV

_WORKSPACE = 256 * 2**20


class FlashInferBackend(DenseBackend):
    name = "flashinfer"
    head_dims = (64, 128, 256)
    keeps_one_plan = True

    def __init__(self, shape: AttentionShape, pool: KVPool) -> None:
        super().__init__(shape, pool)
        workspace = torch.empty(_WORKSPACE, dtype=torch.uint8, device=shape.device)
        import flashinfer

        self._decode: list[Any] = [
            flashinfer.BatchDecodeWithPagedKVCacheWrapper(
                workspace, "HND", use_tensor_cores=shape.num_heads > shape.num_kv_heads
            )
            for _ in shape.groups
        ]
        self._extend: list[Any] = [
            flashinfer.BatchPrefillWithPagedKVCacheWrapper(workspace, "HND") for _ in shape.groups
        ]

    @classmethod
    def unavailable_reason(cls, device: torch.device) -> str | None:
        if device.type != "cuda":
            return f"its kernels are for CUDA devices, this is {device.type}"
        return missing_module("flashinfer", "flashinfer-python")

    def prepare(self, batch: AttentionBatch, groups: Collection[int] | None = None) -> list[Any]:
        """One planned FlashInfer wrapper for each group."""
        size = batch.page_size
        counts = -(-batch.kv_lens // size)
        indptr = torch.from_numpy(np.concatenate(([0], np.cumsum(counts))).astype(np.int32))
        last = torch.from_numpy(((batch.kv_lens - 1) % size + 1).astype(np.int32))
        held = np.arange(counts.max()) < counts[:, None]  # [seqs, pages]
        shape = self._shape
        wrappers = self._decode if batch.decodes else self._extend
        for g, (wrapper, tables) in enumerate(zip(wrappers, batch.groups, strict=True)):
            if groups is not None and g not in groups:
                continue  # `forward` is not called for this group
            group = shape.groups[g]
            pages = torch.from_numpy(tables.host_pages[:, : held.shape[1]][held])
            common = {
                "sm_scale": shape.scale,
                "window_left": -1 if group.window is None else group.window - 1,
                "q_data_type": shape.dtype,
                "kv_data_type": group.layout.part(KV).dtype,
            }
            heads = (shape.num_heads, shape.num_kv_heads, shape.head_dim, size)
            if batch.decodes:
                wrapper.plan(indptr, pages.to(batch.device), last, *heads, **common)
            else:
                cu_query = torch.from_numpy(batch.cu_query.astype(np.int32))
                wrapper.plan(
                    cu_query, indptr, pages.to(batch.device), last, *heads, causal=True, **common
                )
        return wrappers

    def attend(self, layer: int, query: torch.Tensor, metadata: list[Any]) -> torch.Tensor:
        pool = self._pool.part(layer)
        # [pages, 2, kv_heads, page_size, dim]
        paired = pool.view(pool.shape[0], 2, -1, *pool.shape[2:])
        wrapper = metadata[self._pool.group_of[layer]]
        out: torch.Tensor = wrapper.run(query.contiguous(), paired)
        return out
