"""`--attention-backend hsa`: sparse layers here, all others through a dense backend."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, field
from typing import Any, ClassVar

import numpy as np
import torch

from cairn.attention.backend import AttentionBackend, AttentionShape
from cairn.attention.batch import AttentionBatch, HostBatch, Scoring, to_device
from cairn.attention.clearing import clear_begun_pages
from cairn.attention.hsa.kernel_sparse import KernelMetadata, KernelSparse
from cairn.attention.hsa.metadata import (
    CompletedPages,
    SparseGroups,
    Tile,
    completed_pages,
    make_tiles,
    traced_tiles,
)
from cairn.attention.hsa.torch_sparse import TorchSparse
from cairn.memory.hisparse import HiSparseCoordinator
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
    kernels: KernelMetadata | None
    tiles: tuple[Tile, ...]
    """Rows that are computed in torch; with kernels those whose selection is to be told."""
    completed: CompletedPages | None
    selections: dict[int, dict[int, Selection]] = field(default_factory=dict)
    """Filled as layers run: row of the step -> layer -> its selection, one row each."""


class HSABackend:
    name: ClassVar[str] = "hsa"

    def __init__(
        self,
        shape: AttentionShape,
        pool: KVPool,
        *,
        config: SparseConfig,
        landmarks: LandmarkPool,
        dense: AttentionBackend,
        kernels: KernelSparse | None = None,
        tier: HiSparseCoordinator | None = None,
    ) -> None:
        self._pool = pool
        self._config = config
        self._landmarks = landmarks
        self._dense = dense
        self.kernels = kernels
        self._torch = TorchSparse(config, pool, landmarks, shape.scale, tier)
        self._sparse_layers = frozenset(config.layers)
        dense_layers = pool.layers.keys() - self._sparse_layers
        self._dense_groups = {pool.group_of[layer] for layer in dense_layers}
        self._groups = SparseGroups.of(config, shape, pool)
        self._wide = torch.promote_types(shape.dtype, torch.float32)
        self.graphs = kernels is not None and (dense.graphs or not self._dense_groups)

    @property
    def reads_generations(self) -> bool:
        return self.kernels is not None

    @property
    def launches(self) -> int:
        """Sparse layers of decode steps that kernels have attended to."""
        return 0 if self.kernels is None else self.kernels.launches

    def replayable(self, batch: HostBatch) -> bool:
        if not self.graphs or len(batch.traced_rows):
            return False
        return not self._in_prompt(batch).any()

    def launching(self, batch: HostBatch, *, replayed: bool) -> None:
        seq, place, _ = completed_pages(batch)
        if not len(seq):
            return
        tables = batch.groups[self._groups.ids]
        # Where every row is by itself, the kernels seal pages themselves.
        apart = replayed or ((batch.query_lens == 1).all() and not self._in_prompt(batch).any())
        self._landmarks.seal(
            tables.host_pages[seq, place].astype(np.int64),
            tables.host_generations[seq, place],
            on_device=self.kernels is None or not apart,
        )

    def _in_prompt(self, batch: HostBatch) -> np.ndarray:
        """Sequences whose rows, in sparse layers, see everything."""
        if self._config.dense_prompt:
            return batch.kv_lens <= batch.prompt_rows
        return np.zeros(batch.num_seqs, dtype=bool)

    def prepare(self, batch: AttentionBatch, groups: Collection[int] | None = None) -> HSAMetadata:
        seq, place, rows = completed_pages(batch)
        completed = None
        if len(seq):
            pages, kv_pages = (
                to_device(batch.groups[g].host_pages[seq, place].astype(np.int64), batch.device)
                for g in self._groups
            )
            completed = CompletedPages(pages, kv_pages, to_device(rows, batch.device))
        dense = None
        if self._dense_groups:
            dense = self._dense.prepare(batch, self._dense_groups)
        # Prompts that are read densely go to the dense backend whole; a sequence that resumes
        # with generated rows behind its prompt is not: its windows reach back to its start.
        in_prompt = self._in_prompt(batch)
        prompt = prompt_rows = None
        if in_prompt.any():
            taken, of_step = batch.take(np.flatnonzero(in_prompt))
            prompt = self._dense.prepare(taken, {self._groups.kv})
            prompt_rows = to_device(of_step, batch.device)
        sparse = np.flatnonzero(~in_prompt)
        kernels = None
        if self.kernels is None:
            clear_begun_pages(self._pool, batch)
            tiles = make_tiles(batch, self._groups, self._config, sparse)
        else:
            kernels = self.kernels.prepare(batch, sparse, completed)
            tiles = traced_tiles(batch, self._groups, self._config, in_prompt)
        return HSAMetadata(dense, prompt, prompt_rows, kernels, tiles, completed)

    def begin(self, metadata: HSAMetadata) -> None:
        if metadata.dense is not None:
            self._dense.begin(metadata.dense)
        if metadata.prompt is not None:
            self._dense.begin(metadata.prompt)
        if metadata.kernels is not None and self.kernels is not None:
            self.kernels.begin(metadata.kernels)

    def forward(
        self, layer: int, query: torch.Tensor, metadata: HSAMetadata, scoring: Scoring | None = None
    ) -> torch.Tensor:
        if layer not in self._sparse_layers:
            return self._dense.forward(layer, query, metadata.dense)
        out = torch.empty(query.shape, dtype=query.dtype, device=query.device)
        if metadata.kernels is not None:
            self._forward_kernels(layer, query, metadata, scoring, out)
        else:
            self._forward_torch(layer, query, metadata, scoring, out)
        if metadata.prompt_rows is not None:
            rows = metadata.prompt_rows
            out[rows] = self._dense.forward(layer, query[rows], metadata.prompt)
        return out

    def _forward_kernels(
        self,
        layer: int,
        query: torch.Tensor,
        metadata: HSAMetadata,
        scoring: Scoring | None,
        out: torch.Tensor,
    ) -> None:
        kernels = self.kernels
        assert kernels is not None and metadata.kernels is not None
        selected = kernels.forward(layer, query, scoring, metadata.kernels, out)
        for tile in metadata.tiles:
            (row,) = tile.traced_rows
            index = kernels.selected(metadata.kernels, row)
            if index is None:
                assert selected is not None
                index = selected[row]
            self._attend_tile(layer, tile, query, metadata, scoring, index[None].long())

    def _forward_torch(
        self,
        layer: int,
        query: torch.Tensor,
        metadata: HSAMetadata,
        scoring: Scoring | None,
        out: torch.Tensor,
    ) -> None:
        if metadata.completed is not None:
            self._save_landmarks(layer, metadata.completed, scoring)
        for tile in metadata.tiles:
            attended = self._attend_tile(layer, tile, query, metadata, scoring)
            out[tile.rows] = attended.to(out.dtype)

    def _attend_tile(
        self,
        layer: int,
        tile: Tile,
        query: torch.Tensor,
        metadata: HSAMetadata,
        scoring: Scoring | None,
        index: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """A tile's output; the selections of its traced rows are noted."""
        scores_with = query if scoring is None else scoring.query
        attended, selection = self._torch.forward(
            layer,
            tile,
            query[tile.rows].to(self._wide),
            scores_with[tile.rows].to(self._wide),
            index,
        )
        if selection is not None:
            for i, row in enumerate(tile.traced_rows):
                metadata.selections.setdefault(row, {})[layer] = selection.row(i)
        return attended

    def selections(self, metadata: HSAMetadata, row: int) -> dict[int, Selection]:
        return metadata.selections.get(row, {})

    def abandon(self, batch: HostBatch) -> None:
        seq, place, _ = completed_pages(batch)
        self._landmarks.invalidate(batch.groups[self._groups.ids].host_pages[seq, place])
        self._dense.abandon(batch)

    def _save_landmarks(
        self, layer: int, completed: CompletedPages, scoring: Scoring | None
    ) -> None:
        # [pages, size, kv_heads, dim]; all rows of a completed page are in the pool by now.
        keys = self._pool.keys(layer)[completed.kv_pages]
        prior = None if scoring is None else scoring.prior[completed.last_rows]
        vectors, bias = self._config.policy.landmark(keys, prior)
        self._landmarks.save(layer, completed.pages, vectors, bias)
