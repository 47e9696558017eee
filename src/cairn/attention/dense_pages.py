"""How dense attention spreads over the pages of a sequence, for comparison with a selection."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

from cairn.attention.backend import AttentionBackend, Graph, Replayable
from cairn.attention.batch import AttentionBatch, Scoring, unit_ids
from cairn.memory.geometry import PageGeometry
from cairn.memory.kv_pool import KVPool

_BLOCK = 256  # pages at a time


@dataclass(frozen=True, slots=True)
class DenseRow:
    """A traced row, and the share of dense attention that each page gets."""

    row: int  # of its step
    cache_row: int  # of its sequence
    pages: tuple[np.ndarray, ...]
    """Ids of the pages or units of its sequence up to this row, by layer group."""
    shares: dict[int, torch.Tensor] = field(default_factory=dict)
    """By layer, [heads, pages] float32 on the host."""


class DensePages:
    """An attention backend that delegates to `inner`. In addition it computes the full softmax of
    the traced rows in `layers`, in plain torch, from the keys in the pool."""

    def __init__(
        self,
        inner: AttentionBackend,
        pool: KVPool,
        selected: PageGeometry,
        *,
        layers: Collection[int],
        scale: float,
    ) -> None:
        """`selected` is the geometry of what queries select: pages, or their units."""
        self._inner = inner
        self._pool = pool
        self._layers = frozenset(layers)
        self._scale = scale
        self._selected = selected
        self._units = pool.page_size // selected.page_size
        self._taken: list[DenseRow] = []
        self._rows: list[DenseRow] = []  # of the step that was prepared last

    def take(self) -> list[DenseRow]:
        """The rows since the last call, in the order they ran."""
        taken, self._taken = self._taken, []
        return taken

    @property
    def name(self) -> str:
        return self._inner.name

    @property
    def graphs(self) -> Collection[Graph]:
        return self._inner.graphs

    def graph_for(self, batch: AttentionBatch, *, mixed: bool) -> Graph | None:
        return None if len(batch.traced_rows) else self._inner.graph_for(batch, mixed=mixed)

    def replayable(self, metadata: Any) -> Replayable | None:
        return None if self._rows else self._inner.replayable(metadata)

    def prepare(self, batch: AttentionBatch, groups: Collection[int] | None = None) -> Any:
        self._rows = []
        for row in batch.traced_rows.tolist():
            s = int(np.searchsorted(batch.cu_query, row, side="right")) - 1
            cache_row = int(row - batch.cu_query[s] + batch.kv_lens[s] - batch.query_lens[s])
            places = np.arange(cache_row // self._selected.page_size + 1)
            pages = tuple(
                unit_ids(group.host_pages, s, places, self._units) for group in batch.groups
            )
            self._rows.append(DenseRow(row, cache_row, pages))
        self._taken += self._rows
        return self._inner.prepare(batch, groups)

    def begin(self, metadata: Any) -> None:
        self._inner.begin(metadata)

    def forward(
        self, layer: int, query: torch.Tensor, metadata: Any, scoring: Scoring | None = None
    ) -> torch.Tensor:
        if layer in self._layers:
            for row in self._rows:
                row.shares[layer] = self._shares(layer, query[row.row], row).cpu()
        return self._inner.forward(layer, query, metadata, scoring)

    def forward_rows(
        self,
        layer: int,
        query: torch.Tensor,
        rows: torch.Tensor,
        metadata: Any,
        scoring: Scoring | None = None,
    ) -> torch.Tensor | None:
        if self._rows:
            return None
        return self._inner.forward_rows(layer, query, rows, metadata, scoring)

    def _shares(self, layer: int, query: torch.Tensor, row: DenseRow) -> torch.Tensor:
        """Shares [heads, pages] of dense attention for query [heads, dim]."""
        wide = torch.promote_types(query.dtype, torch.float32)
        kv_heads, size = self._pool.kv_heads(layer), self._selected.page_size
        own = query.to(wide).view(kv_heads, -1, query.shape[-1]) * self._scale
        pages = torch.from_numpy(row.pages[self._pool.group_of[layer]]).to(query.device)
        masses = []
        for begin in range(0, len(pages), _BLOCK):
            keys = self._pool.read_keys(layer, pages[begin : begin + _BLOCK], wide, self._units)
            scores = torch.einsum("hgd,pshd->hgps", own, keys)
            place = torch.arange(keys.shape[0] * size, device=query.device) + begin * size
            hidden = place > row.cache_row
            if self._selected.has_landmark_row:
                hidden |= place % size == size - 1
            scores.masked_fill_(hidden.view(-1, size), float("-inf"))
            masses.append(scores.logsumexp(-1))
        return torch.cat(masses, -1).flatten(0, 1).softmax(-1).float()
