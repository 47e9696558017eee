"""`--attention-backend hsa`: sparse layers here, all others through a dense backend."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, field
from typing import Any, ClassVar

import numpy as np
import torch

from cairn.attention.backend import AttentionBackend, AttentionShape
from cairn.attention.batch import AttentionBatch, Scoring, to_device
from cairn.attention.clearing import clear_begun_pages
from cairn.attention.hsa.metadata import CompletedPages, Tile, completed_pages, make_tiles
from cairn.attention.hsa.torch_sparse import TorchSparse
from cairn.memory.kv_pool import KVPool
from cairn.memory.landmarks import LandmarkPool
from cairn.sparsity.config import SparseConfig
from cairn.sparsity.selection import Selection


@dataclass(frozen=True, slots=True)
class HSAMetadata:
    dense: Any
    """The dense backend's own, for all layers that are not sparse."""
    prompt: Any
    """The dense backend's, for the sequences that sparse layers read densely."""
    prompt_rows: torch.Tensor | None  # [n] their rows
    tiles: tuple[Tile, ...]
    completed: CompletedPages | None
    selections: dict[int, dict[int, Selection]] = field(default_factory=dict)
    """Filled as layers run: row of the step -> layer -> its selection, one row each."""


class HSABackend:
    name: ClassVar[str] = "hsa"
    graphs: ClassVar[bool] = False

    def __init__(
        self,
        shape: AttentionShape,
        pool: KVPool,
        *,
        config: SparseConfig,
        landmarks: LandmarkPool,
        dense: AttentionBackend,
    ) -> None:
        self._pool = pool
        self._config = config
        self._landmarks = landmarks
        self._dense = dense
        self._sparse = TorchSparse(config, pool, landmarks, shape.scale)
        self._sparse_layers = frozenset(config.layers)
        dense_layers = pool.layers.keys() - self._sparse_layers
        self._dense_groups = {pool.group_of[layer] for layer in dense_layers}
        self._group = pool.group_of[config.layers[0]]
        self._wide = torch.promote_types(shape.dtype, torch.float32)

    def prepare(self, batch: AttentionBatch, groups: Collection[int] | None = None) -> HSAMetadata:
        seq, place, rows = completed_pages(batch)
        completed = None
        if len(seq):
            tables = batch.groups[self._group]
            pages = tables.host_pages[seq, place].astype(np.int64)
            self._landmarks.seal(pages, tables.host_generations[seq, place])
            completed = CompletedPages(
                to_device(pages, batch.device), to_device(rows, batch.device)
            )
        dense = None
        if self._dense_groups:
            dense = self._dense.prepare(batch, self._dense_groups)
        clear_begun_pages(self._pool, batch)
        # Prompts that are read densely go to the dense backend whole; a sequence that resumes
        # with generated rows behind its prompt is tiled, with windows that reach back to its start.
        in_prompt = np.zeros(batch.num_seqs, dtype=bool)
        if self._config.dense_prompt:
            in_prompt = batch.kv_lens <= batch.prompt_rows
        prompt = prompt_rows = None
        if in_prompt.any():
            taken, of_step = batch.take(np.flatnonzero(in_prompt))
            prompt = self._dense.prepare(taken, {self._group})
            prompt_rows = to_device(of_step, batch.device)
        tiles = make_tiles(batch, self._group, self._config, np.flatnonzero(~in_prompt))
        return HSAMetadata(dense, prompt, prompt_rows, tiles, completed)

    def begin(self, metadata: HSAMetadata) -> None:
        if metadata.dense is not None:
            self._dense.begin(metadata.dense)
        if metadata.prompt is not None:
            self._dense.begin(metadata.prompt)

    def forward(
        self, layer: int, query: torch.Tensor, metadata: HSAMetadata, scoring: Scoring | None = None
    ) -> torch.Tensor:
        if layer not in self._sparse_layers:
            return self._dense.forward(layer, query, metadata.dense)
        if metadata.completed is not None:
            self._save_landmarks(layer, metadata.completed, scoring)
        out = torch.empty_like(query)
        if metadata.prompt_rows is not None:
            rows = metadata.prompt_rows
            out[rows] = self._dense.forward(layer, query[rows], metadata.prompt)
        scores_with = query if scoring is None else scoring.query
        for tile in metadata.tiles:
            attended, selection = self._sparse.forward(
                layer,
                tile,
                query[tile.rows].to(self._wide),
                scores_with[tile.rows].to(self._wide),
            )
            out[tile.rows] = attended.to(out.dtype)
            if selection is not None:
                for i, row in enumerate(tile.traced_rows):
                    metadata.selections.setdefault(row, {})[layer] = selection.row(i)
        return out

    def selections(self, metadata: HSAMetadata, row: int) -> dict[int, Selection]:
        return metadata.selections.get(row, {})

    def abandon(self, batch: AttentionBatch) -> None:
        seq, place, _ = completed_pages(batch)
        self._landmarks.invalidate(batch.groups[self._group].host_pages[seq, place])
        self._dense.abandon(batch)

    def _save_landmarks(
        self, layer: int, completed: CompletedPages, scoring: Scoring | None
    ) -> None:
        # [pages, size, kv_heads, dim]; all rows of a completed page are in the pool by now.
        keys = self._pool.keys(layer)[completed.pages]
        prior = None if scoring is None else scoring.prior[completed.last_rows]
        vectors, bias = self._config.policy.landmark(keys, prior)
        self._landmarks.save(layer, completed.pages, vectors, bias)
