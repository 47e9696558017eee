"""`PREFILL,DECODE`: one backend for steps that only decode, another for all other steps.

A step with both prefill and decode goes to the prefill backend as a whole. Splitting it would cost
more in launches than the better decode kernel saves.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from typing import Any, ClassVar

import torch

from cairn.attention.backend import DenseBackend, Graph
from cairn.attention.batch import AttentionBatch, Scoring
from cairn.attention.latent import LatentHeads


@dataclass(frozen=True, slots=True)
class _Chosen:
    backend: DenseBackend
    metadata: Any


class PairBackend:
    name: ClassVar[str] = "pair"

    def __init__(self, prefill: DenseBackend, decode: DenseBackend) -> None:
        self._prefill = prefill
        self._decode = decode
        self.notes = (*prefill.notes, *decode.notes)
        own = ((decode, False), (prefill, True))
        self.graphs = [g for kind, mixed in own for g in kind.graphs if g.mixed == mixed]

    def graph_for(self, batch: AttentionBatch, *, mixed: bool) -> Graph | None:
        return (self._prefill if mixed else self._decode).graph_for(batch, mixed=mixed)

    def prepare(self, batch: AttentionBatch, groups: Collection[int] | None = None) -> _Chosen:
        backend = self._decode if batch.decodes or batch.few else self._prefill
        return _Chosen(backend, backend.prepare(batch, groups))

    def begin(self, metadata: _Chosen) -> None:
        metadata.backend.begin(metadata.metadata)

    def forward(
        self,
        layer: int,
        query: torch.Tensor,
        metadata: _Chosen,
        scoring: Scoring | None = None,
    ) -> torch.Tensor:
        return metadata.backend.forward(layer, query, metadata.metadata, scoring)

    def forward_latent(
        self, layer: int, query: torch.Tensor, heads: LatentHeads, metadata: _Chosen
    ) -> torch.Tensor:
        return metadata.backend.forward_latent(layer, query, heads, metadata.metadata)

    def forward_rows(
        self,
        layer: int,
        query: torch.Tensor,
        rows: torch.Tensor,
        metadata: _Chosen,
        scoring: Scoring | None = None,
    ) -> torch.Tensor | None:
        return metadata.backend.forward_rows(layer, query, rows, metadata.metadata, scoring)

    def replayable(self, metadata: _Chosen) -> None:
        return None
