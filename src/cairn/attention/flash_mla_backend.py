"""FlashMLA from SGLang's kernel package: decode over latent rows.

It takes the same number of new rows of each sequence, so in steps with prefill every row is a
sequence of its own. `auto` takes it for decode only.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, field
from typing import Any

import torch

from cairn.attention.backend import DENSE_GRAPHS, AttentionShape, DenseBackend, missing_module
from cairn.attention.batch import AttentionBatch
from cairn.memory.kv_pool import KVPool
from cairn.memory.layout import LATENT

_PAGE_SIZE, _LATENT, _ROPE = 64, 512, 64  # all that it has


@dataclass(slots=True)
class _Metadata:
    kv_lens: torch.Tensor  # [rows] int32
    tables: tuple[torch.Tensor, ...]  # per group, [rows, pages] int32
    plan: tuple[Any, ...] = field(default=())
    """How it splits the past, from `begin`."""


class FlashMLABackend(DenseBackend):
    name = "flash_mla"
    dtypes = (torch.bfloat16, torch.float16)
    reads = (LATENT,)
    graphs = DENSE_GRAPHS

    def __init__(self, shape: AttentionShape, pool: KVPool) -> None:
        super().__init__(shape, pool)
        from sgl_kernel.flash_mla import flash_mla_with_kvcache, get_mla_metadata

        self._attend: Any = flash_mla_with_kvcache
        self._split: Any = get_mla_metadata

    @classmethod
    def unavailable_reason(cls, device: torch.device) -> str | None:
        if device.type != "cuda":
            return f"its kernels are for CUDA devices, this is {device.type}"
        major, minor = torch.cuda.get_device_capability(device)
        if major != 9:
            return f"it is built for compute capability 9.0, this is {major}.{minor}"
        return missing_module("sgl_kernel.flashmla_ops", "sglang-kernel")

    @classmethod
    def unsupported_reason(cls, shape: AttentionShape) -> str | None:
        reason = super().unsupported_reason(shape)
        if reason is not None:
            return reason
        latent = shape.value_dim or 0
        if (latent, shape.head_dim - latent) != (_LATENT, _ROPE):
            return (
                f"latent rows have {latent} and {shape.head_dim - latent} columns; it has "
                f"{_LATENT} and {_ROPE}"
            )
        if shape.page_size != _PAGE_SIZE:
            return f"pages have {shape.page_size} rows; it has {_PAGE_SIZE}"
        if any(group.window is not None for group in shape.groups):
            return "it has no sliding windows"
        return None

    def prepare(self, batch: AttentionBatch, groups: Collection[int] | None = None) -> _Metadata:
        return _Metadata(*by_row(batch))

    def begin(self, metadata: _Metadata) -> None:
        metadata.plan = self._split(metadata.kv_lens, self._shape.num_heads, 1)

    def attend(self, layer: int, query: torch.Tensor, metadata: _Metadata) -> torch.Tensor:
        out, _ = self._attend(
            query[:, None],
            self._pool.part(layer, LATENT)[:, :, None],
            metadata.tables[self._pool.group_of[layer]],
            metadata.kv_lens,
            _LATENT,
            *metadata.plan,
            softmax_scale=self._shape.scale,
        )
        attended: torch.Tensor = out[:, 0]
        return attended


def by_row(batch: AttentionBatch) -> tuple[torch.Tensor, tuple[torch.Tensor, ...]]:
    """What each new row of a step reads: its length [rows] int32, and page tables [rows, pages] of
    each group."""
    lens, tables = batch.device_kv_lens, tuple(group.page_table for group in batch.groups)
    if batch.decodes:
        return lens, tables
    ends = batch.device_cu_query[1:]
    row = torch.arange(batch.num_rows, dtype=torch.int32, device=batch.device)
    seq = torch.searchsorted(ends, row, right=True).clamp(max=batch.num_seqs - 1)
    # Rows that pad a recorded step read no more than a sequence has.
    lens = (lens[seq] - (ends[seq] - 1 - row).clamp(min=0)).clamp(min=1).int()
    return lens, tuple(table[seq] for table in tables)
