"""One backend for steps that only decode, another for all others: `PREFILL,DECODE`.

A step that does both goes to the first as a whole: splitting it would cost more launches than the
better decode kernel saves.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from typing import Any, ClassVar

import torch

from cairn.attention.backend import DenseBackend, Graph
from cairn.attention.batch import AttentionBatch, GraphKind, HostBatch, Scoring
from cairn.sparsity.selection import Selection


@dataclass(frozen=True, slots=True)
class _Chosen:
    backend: DenseBackend
    metadata: Any


class PairBackend:
    name: ClassVar[str] = "pair"
    reads_generations: ClassVar[bool] = False

    def __init__(self, prefill: DenseBackend, decode: DenseBackend) -> None:
        self._prefill = prefill
        self._decode = decode
        self.graph_kinds = decode.graph_kinds
        self.mixed_kinds = prefill.mixed_kinds

    def graph_kind(self, batch: HostBatch, *, mixed: bool) -> GraphKind | None:
        return (self._prefill if mixed else self._decode).graph_kind(batch, mixed=mixed)

    def launching(self, batch: HostBatch, graph: Graph | None) -> None:
        pass

    def replayed(self, batch: HostBatch, graph: Graph) -> None:
        pass

    def prepare(self, batch: AttentionBatch, groups: Collection[int] | None = None) -> _Chosen:
        backend = self._decode if batch.decodes else self._prefill
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

    def selections(self, metadata: _Chosen, row: int) -> dict[int, Selection]:
        return {}

    def abandon(self, batch: HostBatch) -> None:
        pass
