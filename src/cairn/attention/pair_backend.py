"""One backend for sequences with several new rows, another for those with one: `PREFILL,DECODE`."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
import torch

from cairn.attention.backend import AttentionBackend, DenseBackend
from cairn.attention.batch import AttentionBatch, Scoring, to_device
from cairn.sparsity.selection import Selection


@dataclass(frozen=True, slots=True)
class _Part:
    backend: AttentionBackend
    metadata: Any
    rows: torch.Tensor | None  # of the step; None for all


class PairBackend:
    name: ClassVar[str] = "pair"

    def __init__(self, prefill: DenseBackend, decode: DenseBackend) -> None:
        self._prefill = prefill
        self._decode = decode
        self.graphs = decode.graphs

    def prepare(self, batch: AttentionBatch, groups: Collection[int] | None = None) -> list[_Part]:
        decoding = batch.query_lens == 1
        parts = []
        for backend, chosen in ((self._prefill, ~decoding), (self._decode, decoding)):
            if chosen.all():
                parts.append(_Part(backend, backend.prepare(batch, groups), None))
            elif chosen.any():
                taken, rows = batch.take(np.flatnonzero(chosen))
                index = to_device(rows, batch.device)
                parts.append(_Part(backend, backend.prepare(taken, groups), index))
        return parts

    def begin(self, metadata: list[_Part]) -> None:
        for part in metadata:
            part.backend.begin(part.metadata)

    def refresh(self, metadata: list[_Part], batch: AttentionBatch) -> None:
        for part in metadata:
            part.backend.refresh(part.metadata, batch)

    def forward(
        self,
        layer: int,
        query: torch.Tensor,
        metadata: list[_Part],
        scoring: Scoring | None = None,
    ) -> torch.Tensor:
        if len(metadata) == 1:
            return metadata[0].backend.forward(layer, query, metadata[0].metadata, scoring)
        out = torch.empty_like(query)
        for part in metadata:
            assert part.rows is not None
            own = query[part.rows]
            out[part.rows] = part.backend.forward(layer, own, part.metadata, scoring)
        return out

    def selections(self, metadata: list[_Part], row: int) -> dict[int, Selection]:
        return {}

    def abandon(self, batch: AttentionBatch) -> None:
        pass
