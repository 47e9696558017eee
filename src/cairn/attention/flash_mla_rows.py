"""FlashMLA from SGLang's kernel package: attention over selected latent rows.

One program reads the whole list of a query, so few queries leave most of a GPU idle.
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
        self._tiles, self._processors = heads // _HEADS, processors(device)

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

    def suits(self, rows: int) -> bool:
        """Whether it was faster than our own kernel for this number of rows, on an H200."""
        return 2 * rows * self._tiles > self._processors

    def attend(
        self,
        query: torch.Tensor,  # [rows, heads, 576], contiguous
        pool: torch.Tensor,  # [pages, page_size, 576]
        slots: torch.Tensor,  # [rows, k] int32, -1 for none
        scale: float,
    ) -> torch.Tensor:
        """-> [rows, heads, 512]"""
        from cairn.kernels.precompile import is_collecting

        if is_collecting():  # `slots` is not initialised then
            return query.new_empty(*query.shape[:2], _LATENT)
        rows = pool.view(-1, 1, query.shape[2])
        read: torch.Tensor = self._attend(query, rows, slots[:, None], scale)[0]
        return read
