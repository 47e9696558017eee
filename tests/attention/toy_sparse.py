"""A sparse backend from outside the package, in one file: `tests.attention.toy_sparse:ToySparse`.

In sparse layers a row reads the first page, its own page, and a window of rows before it.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.nn.functional as F

from cairn.attention.backend import SparseBackend, SparseParts
from cairn.attention.batch import AttentionBatch, Scoring


def visible(row: np.ndarray, key: np.ndarray, window: int, page_size: int) -> np.ndarray:
    """Whether a row reads a key, both given by their places in the sequence."""
    near = (key > row - window) | (key // page_size == row // page_size)
    seen: np.ndarray = (key <= row) & (near | (key < page_size))
    return seen


class _Sequence(NamedTuple):
    rows: slice  # of the step
    pages: torch.Tensor  # [n] in the pool
    mask: torch.Tensor  # [rows, n * page_size] True where a key is visible


class _Metadata(NamedTuple):
    dense: Any
    sequences: list[_Sequence]


class ToySparse(SparseBackend):
    name = "toy"
    options = frozenset({"layers", "window"})

    def __init__(self, parts: SparseParts) -> None:
        super().__init__(parts)
        pool, layers = parts.pool, frozenset(parts.config.layers)
        self._group = pool.group_of[parts.config.layers[0]]
        self._dense_groups = {pool.group_of[x] for x in pool.group_of if x not in layers}

    def prepare(self, batch: AttentionBatch, groups: Collection[int] | None = None) -> _Metadata:
        size, window = batch.page_size, self._parts.config.window
        sequences = []
        for s, (new, total) in enumerate(zip(batch.query_lens, batch.kv_lens, strict=True)):
            rows = np.arange(total - new, total)
            places = np.arange(-(-total // size))
            keys = places[:, None] * size + np.arange(size)
            sees = visible(rows[:, None, None], keys, window, size)  # [rows, pages, page_size]
            read = sees.any((0, 2))
            pages = batch.groups[self._group].host_pages[s, places[read]].astype(np.int64)
            mask = torch.from_numpy(sees[:, read].reshape(len(rows), -1))
            own = slice(int(batch.cu_query[s]), int(batch.cu_query[s + 1]))
            sequences.append(_Sequence(own, torch.from_numpy(pages), mask))
        dense = self._parts.dense.prepare(batch, self._dense_groups) if self._dense_groups else None
        return _Metadata(dense, sequences)

    def begin(self, metadata: _Metadata) -> None:
        if metadata.dense is not None:
            self._parts.dense.begin(metadata.dense)

    def forward(
        self, layer: int, query: torch.Tensor, metadata: _Metadata, scoring: Scoring | None = None
    ) -> torch.Tensor:
        if layer not in self._parts.config.layers:
            return self._parts.dense.forward(layer, query, metadata.dense)
        out = torch.empty_like(query)
        pool = self._parts.pool
        for own in metadata.sequences:
            keys, values = (
                held[own.pages].flatten(0, 1).transpose(0, 1)  # [kv_heads, keys, dim]
                for held in (pool.keys(layer), pool.values(layer))
            )
            seen = own.mask.any(0)  # others may hold anything, NaN included
            out[own.rows] = F.scaled_dot_product_attention(
                query[own.rows].transpose(0, 1)[None],
                keys[None, :, seen],
                values[None, :, seen],
                attn_mask=own.mask[:, seen],
                scale=self._parts.shape.scale,
                enable_gqa=True,
            )[0].transpose(0, 1)
        return out
