"""Sequences of a step with several new rows, prepared for the kernels of sparse attention."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import torch

from cairn.attention.batch import AttentionBatch, to_device
from cairn.attention.hsa.metadata import SparseGroups
from cairn.attention.placing import fitting_runs
from cairn.kernels.workspace import Workspace
from cairn.memory.device_swap import DeviceSwap
from cairn.memory.landmarks import LandmarkPool
from cairn.sparsity.config import SparseConfig

if TYPE_CHECKING:
    from cairn.kernels.paged_extend import ExtendBlocks
    from cairn.kernels.sparse_select import CandidatePages
    from cairn.kernels.sparse_shape import SparseShape

_WINDOW_ROWS = 64  # of a block that attends to its window


@dataclass(frozen=True, slots=True)
class ChunkRows:
    """Sequences with several new rows."""

    batch: AttentionBatch
    windows: ExtendBlocks
    selecting: ExtendBlocks
    reading: tuple[ExtendBlocks, ...]
    """All blocks, in parts whose pages fit into the stage."""
    candidates: CandidatePages
    dense_until: torch.Tensor  # [seqs] int32
    workspace: Workspace


@dataclass(frozen=True, slots=True)
class ChunkPlanner:
    config: SparseConfig
    shape: SparseShape
    dtype: torch.dtype
    landmarks: LandmarkPool
    groups: SparseGroups
    union_rows: int
    """Number of neighbouring rows that read the union of their pages."""
    swap: DeviceSwap | None

    def of(self, batch: AttentionBatch, seqs: np.ndarray) -> ChunkRows:
        """The sequences `seqs` of a step."""
        from cairn.kernels.paged_extend import ExtendBlocks
        from cairn.kernels.sparse_select import SELECT_ROWS

        until = self.config.dense_until(batch.prompt_rows)

        def blocks(rows: int, of: np.ndarray = seqs) -> ExtendBlocks:
            return ExtendBlocks.of(batch.query_lens, of, batch.device, rows)

        return ChunkRows(
            batch,
            windows=blocks(_WINDOW_ROWS),
            selecting=blocks(SELECT_ROWS),
            reading=tuple(blocks(self.union_rows, of) for of in self._staged_together(batch, seqs)),
            candidates=self._candidates(batch, seqs),
            dense_until=to_device(until.astype(np.int32), batch.device),
            workspace=Workspace(batch.device),
        )

    def _candidates(self, batch: AttentionBatch, seqs: np.ndarray) -> CandidatePages:
        """The complete pages of these sequences; -1 where a landmark is of another generation."""
        from cairn.kernels.sparse_select import CandidatePages

        tables = batch.groups[self.groups.selected]
        counts = batch.kv_lens[seqs] // batch.page_size
        within = np.arange(counts.max(initial=0)) < counts[:, None]
        pages, lives = (
            to_device(table[seqs, : within.shape[1]][within].astype(np.int32), batch.device)
            for table in (tables.host_pages, tables.host_generations)
        )
        offsets = np.zeros(batch.num_seqs, np.int32)
        offsets[seqs] = np.cumsum(counts) - counts
        valid = self.landmarks.sealed[pages.long()] == lives
        return CandidatePages(
            torch.where(valid, pages, -1), to_device(offsets, batch.device), within.shape[1]
        )

    def _staged_together(self, batch: AttentionBatch, seqs: np.ndarray) -> list[np.ndarray]:
        """Split sequences into runs whose pages fit into the stage even if all are selected."""
        if self.swap is None or batch.resident:
            return [seqs]
        pages = batch.kv_lens[seqs] // batch.page_size
        return fitting_runs(seqs, pages, len(self.swap.stage))

    # -- recorded steps -----------------------------------------------------------------------

    def fit(self, kv_lens: np.ndarray) -> bool:
        """Whether chunks that end at these lengths have so few candidates that `on_device` serves
        them."""
        candidates = (kv_lens - self.shape.window) // self.shape.page_size
        return bool((candidates <= self._most_candidates).all())

    def on_device(self, batch: AttentionBatch) -> ChunkRows:
        """All sequences with several new rows, of a recorded step without dense rows. Only the
        device knows the lengths."""
        from cairn.kernels.paged_extend import ExtendBlocks
        from cairn.kernels.sparse_select import SELECT_ROWS

        query_lens = batch.device_cu_query.diff()
        new = query_lens.masked_fill(query_lens == 1, 0)

        def blocks(rows: int) -> ExtendBlocks:
            return ExtendBlocks.on_device(new, batch.num_rows, rows)

        return ChunkRows(
            batch,
            windows=blocks(_WINDOW_ROWS),
            selecting=blocks(SELECT_ROWS),
            reading=(blocks(self.union_rows),),
            candidates=self._first_candidates(batch),
            dense_until=torch.zeros_like(query_lens),
            workspace=Workspace(batch.device),
        )

    def _first_candidates(self, batch: AttentionBatch) -> CandidatePages:
        """The first pages of all sequences."""
        from cairn.kernels.sparse_select import CandidatePages

        tables = batch.groups[self.groups.selected]
        assert tables.generations is not None
        count = min(self._most_candidates, tables.page_table.shape[1])
        pages = tables.page_table[:, :count]
        valid = self.landmarks.sealed[pages.long()] == tables.generations[:, :count]
        first = torch.arange(batch.num_seqs, dtype=torch.int32, device=batch.device) * count
        longest = count + self.shape.window // self.shape.page_size
        return CandidatePages(torch.where(valid, pages, -1).flatten(), first, longest)

    @property
    def _most_candidates(self) -> int:
        from cairn.kernels.sparse_select import most_few

        return most_few(self.shape, self.dtype)
