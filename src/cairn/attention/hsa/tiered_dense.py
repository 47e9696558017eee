"""Dense rows of sparse layers, with a host tier: read in frames or in the stage (`placing`)."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch

from cairn.attention.backend import AttentionBackend
from cairn.attention.batch import AttentionBatch, to_device
from cairn.attention.hsa.metadata import SparseGroups
from cairn.attention.placing import place
from cairn.memory.hisparse import HiSparseCoordinator
from cairn.memory.prompt_stage import StagedStep


@dataclass(frozen=True, slots=True)
class _Run:
    """Sequences that a backend attends to at once. It sees an empty past for the others."""

    backend: AttentionBackend
    batch: AttentionBatch
    metadata: Any
    """The backend's metadata. None if there are several staged runs: some backends hold only one
    plan, so it is made again before each run."""
    rows: torch.Tensor | None  # [n] int64, rows of the step; None for all, in the first run
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
        """`in_frames` is a backend over the pool, `in_stage` one over the tier's stage."""
        assert tier.stage is not None
        self._in_frames = in_frames
        self._in_stage = in_stage
        self._tier = tier
        self._stage = tier.stage
        self._layers = layers
        self._groups = groups

    def prepare(self, batch: AttentionBatch, dense: np.ndarray, *, ahead: bool) -> TieredRows:
        """Plan a step. `dense` [seqs] are the sequences with dense rows only. `ahead` means that
        nothing else uses the stage in this step, so that it can be filled ahead."""
        group = self._groups.kv
        placed = place(batch, dense, self._tier)
        staged = [own.staged for own in placed if own.staged is not None]
        runs: list[_Run] = []
        for seqs, table, pages in placed:
            own = _batch_of(batch, seqs, group, table)
            backend = self._in_frames if pages is None else self._in_stage
            alone = pages is None or len(staged) == 1
            metadata = backend.prepare(own, {group}) if alone else None
            rows = _rows_of(batch, seqs) if runs else None
            runs.append(_Run(backend, own, metadata, rows, staged=pages is not None))
        fills = [(layer, pages) for layer in self._layers for pages in staged]
        return TieredRows(tuple(runs), self._stage.step(fills, ahead=ahead))

    def begin(self, rows: TieredRows) -> None:
        self._stage.begin(rows.staging)
        for run in rows.runs:
            if run.metadata is not None:
                run.backend.begin(run.metadata)

    def forward(self, layer: int, query: torch.Tensor, rows: TieredRows) -> torch.Tensor:
        """The output for dense rows; rows of other sequences are undefined."""
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
    """The batch with `table` [seqs, pages] as the group's table, and with an empty past for all
    sequences but `seqs`."""
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
