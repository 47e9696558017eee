"""The share of dense attention that each page has, for the rows whose selection is traced.

An attention backend that wraps another one. Beside it, it computes the whole softmax of a few rows
in plain torch, from the keys in the pool.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import Any, NamedTuple

import numpy as np
import torch

from cairn.attention.backend import AttentionBackend
from cairn.attention.batch import AttentionBatch, GraphKind, HostBatch, Scoring
from cairn.memory.kv_pool import KVPool
from cairn.sparsity.selection import Selection

_BLOCK = 256  # pages at a time


class DenseRow(NamedTuple):
    cache_row: int
    """Position of the row in the cache of its sequence."""
    shares: dict[int, torch.Tensor]
    """layer -> share of each page, [heads, pages] float32 on the host"""


class _Row(NamedTuple):
    row: int  # of the step
    pages: tuple[np.ndarray, ...]  # page ids of its sequence up to it, by layer group
    record: DenseRow


class _Metadata(NamedTuple):
    inner: Any
    rows: list[_Row]


class DensePages:
    """Wraps `inner`, and keeps a DenseRow over `layers` for each traced row."""

    def __init__(
        self,
        inner: AttentionBackend,
        pool: KVPool,
        *,
        layers: Collection[int],
        scale: float,
        landmark_rows: bool,
    ) -> None:
        self._inner = inner
        self._pool = pool
        self._layers = frozenset(layers)
        self._scale = scale
        self._landmark_rows = landmark_rows
        self._taken: list[DenseRow] = []

    def __getattr__(self, name: str) -> Any:
        """Everything that is not changed here is the inner backend's."""
        return getattr(self._inner, name)

    def take(self) -> list[DenseRow]:
        """The rows since it was last called, in the order they ran."""
        taken, self._taken = self._taken, []
        return taken

    def graph_kind(self, batch: HostBatch, *, mixed: bool) -> GraphKind | None:
        return None if len(batch.traced_rows) else self._inner.graph_kind(batch, mixed=mixed)

    def prepare(self, batch: AttentionBatch, groups: Collection[int] | None = None) -> Any:
        rows = []
        for row in batch.traced_rows.tolist():
            s = int(np.searchsorted(batch.cu_query, row, side="right")) - 1
            cache_row = int(row - batch.cu_query[s] + batch.kv_lens[s] - batch.query_lens[s])
            count = cache_row // batch.page_size + 1
            tables = tuple(tables.host_pages[s, :count].astype(np.int64) for tables in batch.groups)
            rows.append(_Row(row, tables, DenseRow(cache_row, {})))
        self._taken += [row.record for row in rows]
        return _Metadata(self._inner.prepare(batch, groups), rows)

    def begin(self, metadata: _Metadata) -> None:
        self._inner.begin(metadata.inner)

    def forward(
        self, layer: int, query: torch.Tensor, metadata: _Metadata, scoring: Scoring | None = None
    ) -> torch.Tensor:
        if layer in self._layers:
            for row in metadata.rows:
                row.record.shares[layer] = self._shares(layer, query[row.row], row).cpu()
        return self._inner.forward(layer, query, metadata.inner, scoring)

    def selections(self, metadata: _Metadata, row: int) -> dict[int, Selection]:
        return self._inner.selections(metadata.inner, row)

    def _shares(self, layer: int, query: torch.Tensor, row: _Row) -> torch.Tensor:
        """query [heads, dim] -> [heads, pages]"""
        wide = torch.promote_types(query.dtype, torch.float32)
        kv_heads, size = self._pool.kv_heads, self._pool.page_size
        own = query.to(wide).view(kv_heads, -1, query.shape[-1]) * self._scale
        pages = torch.from_numpy(row.pages[self._pool.group_of[layer]]).to(query.device)
        masses = []
        for begin in range(0, len(pages), _BLOCK):
            keys = self._pool.keys(layer)[pages[begin : begin + _BLOCK]].to(wide)
            scores = torch.einsum("hgd,pshd->hgps", own, keys)
            place = torch.arange(keys.shape[0] * size, device=query.device) + begin * size
            hidden = place > row.record.cache_row
            if self._landmark_rows:
                hidden |= place % size == size - 1
            scores.masked_fill_(hidden.view(-1, size), float("-inf"))
            masses.append(scores.logsumexp(-1))
        return torch.cat(masses, -1).flatten(0, 1).softmax(-1).float()
