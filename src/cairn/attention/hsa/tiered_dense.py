"""Rows of sparse layers that see everything, where pages live in host memory.

Sequences whose pages are all in frames are read there. The pages of the others are gathered in the
stage, in runs of sequences that fit into it together (`memory/prompt_stage.py`).
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch

from cairn.attention.backend import AttentionBackend
from cairn.attention.batch import AttentionBatch, to_device
from cairn.attention.hsa.metadata import SparseGroups, fitting_runs
from cairn.memory.hisparse import HiSparseCoordinator
from cairn.memory.prompt_stage import StagedPages, StagedStep


@dataclass(frozen=True, slots=True)
class _Run:
    """Sequences that a backend attends to at once; the others are short for it."""

    backend: AttentionBackend
    batch: AttentionBatch
    metadata: Any
    """The backend's. None if there are several staged runs: some backends hold only one plan, so it
    is made again before each run."""
    rows: torch.Tensor | None  # [n] int64, rows of the step; None for the first run: all of them
    staged: bool


@dataclass(frozen=True, slots=True)
class TieredRows:
    runs: tuple[_Run, ...]
    staging: StagedStep


class TieredDense:
    def __init__(
        self,
        in_frames: AttentionBackend,
        in_stage: AttentionBackend,
        tier: HiSparseCoordinator,
        layers: tuple[int, ...],
        groups: SparseGroups,
    ) -> None:
        """Backends over the pool and over the tier's stage."""
        assert tier.stage is not None
        self._in_frames = in_frames
        self._in_stage = in_stage
        self._frames = tier.frames
        self._stage = tier.stage
        self._layers = layers
        self._groups = groups

    def prepare(self, batch: AttentionBatch, dense: np.ndarray, *, ahead: bool) -> TieredRows:
        """`dense` [seqs]: whose rows see everything. `ahead`: nobody else uses the stage in this
        step."""
        groups = self._groups
        ids = batch.groups[groups.selected].host_pages
        counts = -(-batch.kv_lens // batch.page_size)
        held = np.arange(ids.shape[1]) < counts[:, None]
        frames = np.where(held, self._frames[ids], 0)
        away = dense & (held & (frames == 0)).any(1)
        resident = np.flatnonzero(dense & ~away)
        runs: list[_Run] = []
        if len(resident):
            own = _batch_of(batch, resident, groups.kv, frames)
            metadata = self._in_frames.prepare(own, {groups.kv})
            runs.append(_Run(self._in_frames, own, metadata, None, staged=False))
        together: list[np.ndarray] = []
        if away.any():
            together = fitting_runs(np.flatnonzero(away), counts[away], self._stage.room)
        staged: list[StagedPages] = []
        for seqs in together:
            which = held & np.isin(np.arange(batch.num_seqs), seqs)[:, None]
            pages, places = self._stage.arrange(ids[which])
            table = np.zeros_like(ids)
            table[which] = places
            own = _batch_of(batch, seqs, groups.kv, table)
            alone = len(together) == 1
            metadata = self._in_stage.prepare(own, {groups.kv}) if alone else None
            rows = _rows_of(batch, seqs) if runs else None
            runs.append(_Run(self._in_stage, own, metadata, rows, staged=True))
            staged.append(pages)
        fills = [(layer, pages) for layer in self._layers for pages in staged]
        return TieredRows(tuple(runs), self._stage.step(fills, ahead=ahead))

    def begin(self, rows: TieredRows) -> None:
        self._stage.begin(rows.staging)
        for run in rows.runs:
            if run.metadata is not None:
                run.backend.begin(run.metadata)

    def forward(self, layer: int, query: torch.Tensor, rows: TieredRows) -> torch.Tensor:
        """Rows of other sequences are not to be read."""
        out: torch.Tensor | None = None
        for run in rows.runs:
            metadata = run.metadata
            if metadata is None:
                metadata = run.backend.prepare(run.batch, {self._groups.kv})
                run.backend.begin(metadata)
            if run.staged:
                self._stage.fill(rows.staging)
            attended = run.backend.forward(layer, query, metadata)
            if run.staged:
                self._stage.release(rows.staging)
            if out is None:
                out = attended
            else:
                out[run.rows] = attended[run.rows]
        assert out is not None
        return out

    def abandon(self) -> None:
        self._stage.abandon()


def _batch_of(
    batch: AttentionBatch, seqs: np.ndarray, group: int, table: np.ndarray
) -> AttentionBatch:
    """These sequences with `table` [seqs, pages] in place of the group's; the others are short."""
    others = np.ones(batch.num_seqs, dtype=bool)
    others[seqs] = False
    own = batch.shortened(others) if others.any() else batch
    tables = list(own.groups)
    mine = np.where(others[:, None], 0, table).astype(np.int32)
    on_device = to_device(mine, batch.device)
    tables[group] = replace(tables[group], host_pages=mine, page_table=on_device)
    return replace(own, groups=tuple(tables))


def _rows_of(batch: AttentionBatch, seqs: np.ndarray) -> torch.Tensor:
    rows = [np.arange(batch.cu_query[s], batch.cu_query[s + 1]) for s in seqs]
    return to_device(np.concatenate(rows), batch.device)
