"""FlashInfer's paged attention, over keys and values or over latent rows.

It plans on the host, once per step and layer group.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

import numpy as np
import torch

from cairn.attention.backend import AttentionShape, DenseBackend, missing_module
from cairn.attention.batch import AttentionBatch, to_device
from cairn.errors import ConfigError
from cairn.memory.groups import LayerGroup
from cairn.memory.kv_pool import KVPool
from cairn.memory.layout import KV, LATENT

_WORKSPACE = 256 * 2**20
_LATENT, _ROPE = 512, 64  # columns of the latent rows that all its kernels have
_TILE = 128  # pairs of a new row and a head; a causal tile must end where a row's heads end


class FlashInferBackend(DenseBackend):
    name = "flashinfer"
    head_dims = (64, 128, 256)
    keeps_one_plan = True
    reads_latents = True

    def __init__(self, shape: AttentionShape, pool: KVPool) -> None:
        super().__init__(shape, pool)
        workspace = torch.empty(_WORKSPACE, dtype=torch.uint8, device=shape.device)
        import flashinfer
        import flashinfer.mla

        self._decode: list[Any]
        self._extend: list[Any]
        if shape.value_dim is not None:
            hopper = torch.cuda.get_device_capability(shape.device)[0] == 9
            kernel = "fa3" if hopper else "auto"
            self._decode = self._extend = [
                flashinfer.mla.BatchMLAPagedAttentionWrapper(workspace, backend=kernel)
                for _ in shape.groups
            ]
            return
        self._decode = [
            flashinfer.BatchDecodeWithPagedKVCacheWrapper(
                workspace, "HND", use_tensor_cores=shape.num_heads > shape.num_kv_heads
            )
            for _ in shape.groups
        ]
        self._extend = [
            flashinfer.BatchPrefillWithPagedKVCacheWrapper(workspace, "HND") for _ in shape.groups
        ]

    @classmethod
    def unavailable_reason(cls, device: torch.device) -> str | None:
        if device.type != "cuda":
            return f"its kernels are for CUDA devices, this is {device.type}"
        return missing_module("flashinfer", "flashinfer-python")

    @classmethod
    def unsupported_reason(cls, shape: AttentionShape) -> str | None:
        reason = super().unsupported_reason(shape)
        if reason is not None or shape.value_dim is None:
            return reason
        columns = shape.value_dim, shape.head_dim - shape.value_dim
        if columns != (_LATENT, _ROPE):
            return (
                f"latent rows have {columns[0]} and {columns[1]} columns; it has {_LATENT} and "
                f"{_ROPE}"
            )
        if _TILE % shape.num_heads:
            return f"{shape.num_heads} heads read latent rows; it has divisors of {_TILE}"
        if any(group.window is not None for group in shape.groups):
            return "it has no sliding windows over latent rows"
        from flashinfer import mla

        if not hasattr(mla, "MLAPlanMetadata"):
            return "flashinfer-python is too old for latent rows; pip install -U flashinfer-python"
        return None

    def prepare(self, batch: AttentionBatch, groups: Collection[int] | None = None) -> list[Any]:
        """One planned FlashInfer wrapper for each group."""
        counts = -(-batch.kv_lens // batch.page_size)
        indptr = torch.from_numpy(np.concatenate(([0], np.cumsum(counts))).astype(np.int32))
        held = np.arange(counts.max()) < counts[:, None]  # [seqs, pages]
        plan = self._plan if self._shape.value_dim is None else self._plan_latents
        wrappers = self._decode if batch.decodes else self._extend
        for g, (wrapper, tables) in enumerate(zip(wrappers, batch.groups, strict=True)):
            if groups is not None and g not in groups:
                continue  # `forward` is not called for this group
            pages = to_device(tables.host_pages[:, : held.shape[1]][held], batch.device)
            plan(wrapper, batch, self._shape.groups[g], indptr, pages)
        return wrappers

    def _plan(
        self,
        wrapper: Any,
        batch: AttentionBatch,
        group: LayerGroup,
        indptr: torch.Tensor,
        pages: torch.Tensor,
    ) -> None:
        shape, size = self._shape, batch.page_size
        last = torch.from_numpy(((batch.kv_lens - 1) % size + 1).astype(np.int32))
        common = {
            "sm_scale": shape.scale,
            "window_left": -1 if group.window is None else group.window - 1,
            "q_data_type": shape.dtype,
            "kv_data_type": group.layout.part(KV).dtype,
        }
        heads = (shape.num_heads, shape.num_kv_heads, shape.head_dim, size)
        if batch.decodes:
            wrapper.plan(indptr, pages, last, *heads, **common)
        else:
            cu_query = torch.from_numpy(batch.cu_query.astype(np.int32))
            wrapper.plan(cu_query, indptr, pages, last, *heads, causal=True, **common)

    def _plan_latents(
        self,
        wrapper: Any,
        batch: AttentionBatch,
        group: LayerGroup,
        indptr: torch.Tensor,
        pages: torch.Tensor,
    ) -> None:
        from flashinfer.mla import MLAPlanMetadata

        cu_query, kv_lens = (
            torch.from_numpy(array.astype(np.int32)) for array in (batch.cu_query, batch.kv_lens)
        )
        try:
            wrapper.plan(
                metadata=MLAPlanMetadata.csr(cu_query, indptr, pages, kv_lens),
                num_heads=self._shape.num_heads,
                head_dim_ckv=_LATENT,
                head_dim_kpe=_ROPE,
                page_size=batch.page_size,
                causal=not batch.decodes,
                sm_scale=self._shape.scale,
                q_data_type=self._shape.dtype,
                kv_data_type=group.layout.part(LATENT).dtype,
            )
        except ValueError as error:  # the step has too many tiles
            raise ConfigError(
                f"attention_backend 'flashinfer' cannot plan a step of {batch.num_rows} rows: "
                f"{error}; lower chunked_prefill_size, or use auto"
            ) from error

    def attend(self, layer: int, query: torch.Tensor, metadata: list[Any]) -> torch.Tensor:
        wrapper = metadata[self._pool.group_of[layer]]
        out: torch.Tensor
        if self._shape.value_dim is not None:
            rows = self._pool.part(layer, LATENT)  # [pages, page_size, latent + rope]
            out = wrapper.run(query=query.contiguous(), kv_cache=rows)
            return out
        pool = self._pool.part(layer)
        # [pages, 2, kv_heads, page_size, dim]
        paired = pool.view(pool.shape[0], 2, -1, *pool.shape[2:])
        out = wrapper.run(query.contiguous(), paired)
        return out
