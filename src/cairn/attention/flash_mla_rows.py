"""FlashMLA from SGLang's kernel package: attention over chosen latent rows.

A program of it reads the whole list of a query, so that few queries leave most of a GPU idle. Here
the parts of a list become queries of their own, and a kernel merges what they read.
"""

from __future__ import annotations

from typing import Any

import torch

from cairn.attention.backend import AttentionShape
from cairn.attention.flash_mla_backend import FlashMLABackend
from cairn.kernels.fp8_rows import is_narrow
from cairn.kernels.processors import processors

_LATENT, _ROPE = 512, 64  # all that it has
_HEADS = 64  # of a program
_LEAST = 128  # the length of a list is a multiple of this


class FlashRows:
    def __init__(self, heads: int, device: torch.device) -> None:
        from sgl_kernel.flash_mla import flash_mla_sparse_fwd

        self._attend: Any = flash_mla_sparse_fwd
        self._queries = processors(device) * _HEADS // heads
        """Queries that are computed at once."""

    @staticmethod
    def refusal(shape: AttentionShape, topk: int) -> str | None:
        """Why it cannot serve this model here; None if it can."""
        if (why := FlashMLABackend.unavailable_reason(shape.device)) is not None:
            return why
        if is_narrow(shape.cache_dtype):
            return "rows of the cache have 8 bits (kv_cache_dtype)"
        latent = shape.value_dim or 0
        if (latent, shape.head_dim - latent) != (_LATENT, _ROPE):
            return f"latent rows have {latent} and {shape.head_dim - latent} columns"
        if shape.dtype != torch.bfloat16:
            return f"the type is {str(shape.dtype).removeprefix('torch.')}"
        if shape.num_heads % _HEADS:
            return f"there are {shape.num_heads} heads; it has multiples of {_HEADS}"
        if topk % _LEAST:
            return f"queries read {topk} rows; it has multiples of {_LEAST}"
        return None

    def parts(self, rows: int, topk: int) -> int:
        return parts_of(rows, topk, self._queries)

    def attend(
        self,
        query: torch.Tensor,  # [rows * parts, heads, 576], contiguous
        pool: torch.Tensor,  # [pages, page_size, 576]
        slots: torch.Tensor,  # [rows, k] int32, -1 for none
        scale: float,
    ) -> torch.Tensor:
        """-> [rows, heads, 512]; each query is there once for each part of its list"""
        from cairn.kernels.precompile import is_collecting
        from cairn.kernels.row_attention import merge_parts

        rows, (queries, heads, width) = len(slots), query.shape
        read = query.new_empty(queries, heads, _LATENT)
        lse = torch.empty(queries, heads, dtype=torch.float32, device=query.device)
        if not is_collecting():  # `slots` is not initialised then
            lists = slots.view(queries, 1, -1)
            read, _, lse = self._attend(query, pool.view(-1, 1, width), lists, scale)
        if queries == rows:
            return read
        out = query.new_empty(rows, heads, _LATENT)
        # The logarithm is in base 2, and +inf where nothing is read.
        merge_parts(out, read, lse, queries // rows, base_2=True)
        return out

    def unsplit(
        self, query: torch.Tensor, pool: torch.Tensor, slots: torch.Tensor, scale: float
    ) -> torch.Tensor:
        """As it comes: one list, one query."""
        read: torch.Tensor = self._attend(
            query, pool.view(-1, 1, query.shape[2]), slots[:, None], scale
        )[0]
        return read


def parts_of(rows: int, topk: int, queries: int) -> int:
    """Parts of each of `rows` lists, in equal lengths: as many as give at most `queries` in all."""
    parts = 1
    while 2 * parts * rows <= queries and topk % (2 * parts * _LEAST) == 0:
        parts *= 2
    return parts
