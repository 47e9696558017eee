"""FlashAttention-3 as SGLang's kernel package has it, over Cairn's paged cache."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from typing import Any

import torch

from cairn.attention.backend import AttentionShape, DenseBackend, missing_module
from cairn.attention.batch import AttentionBatch
from cairn.memory.kv_pool import KVPool


@dataclass(frozen=True, slots=True)
class _Metadata:
    kv_lens: torch.Tensor
    cu_query: torch.Tensor
    max_query: int
    tables: tuple[torch.Tensor, ...]


class SglKernelBackend(DenseBackend):
    name = "sgl_kernel"
    head_dims = (64, 96, 128, 192, 256)
    graph_kinds = ("dense",)
    mixed_kinds = ("dense",)

    def __init__(self, shape: AttentionShape, pool: KVPool) -> None:
        super().__init__(shape, pool)
        from sgl_kernel.flash_attn import flash_attn_with_kvcache

        self._attend: Any = flash_attn_with_kvcache

    @staticmethod
    def unavailable_reason(device: torch.device) -> str | None:
        if device.type != "cuda":
            return f"its kernels are for CUDA devices, this is {device.type}"
        major, minor = torch.cuda.get_device_capability(device)
        if major not in (8, 9):
            return f"it is built for compute capability 8.x and 9.0, this is {major}.{minor}"
        return missing_module("sgl_kernel.flash_attn", "sglang-kernel")

    def prepare(self, batch: AttentionBatch, groups: Collection[int] | None = None) -> _Metadata:
        return _Metadata(
            batch.device_kv_lens,
            batch.device_cu_query,
            int(batch.query_lens.max()),
            tuple(group.page_table for group in batch.groups),
        )

    def attend(self, layer: int, query: torch.Tensor, metadata: _Metadata) -> torch.Tensor:
        g = self._pool.group_of[layer]
        window = self._shape.groups[g].window
        out: torch.Tensor = self._attend(
            query,
            self._pool.keys(layer),
            self._pool.values(layer),
            cache_seqlens=metadata.kv_lens,
            page_table=metadata.tables[g],
            cu_seqlens_q=metadata.cu_query,
            max_seqlen_q=metadata.max_query,
            softmax_scale=self._shape.scale,
            causal=True,
            window_size=(-1, -1) if window is None else (window - 1, 0),
        )
        return out
