"""`dsa` with a host tier: index keys stay on the device, and latent rows may leave it.

A decoding sequence reads single rows, which the tier finds: by kernels (`memory/row_swap.py`), or
in plain torch (`hot_rows`). The rows of a chunk together select nearly everything, so all pages of
their sequence are staged, layer by layer (`placing`), unless all are on the device.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace

import numpy as np

from cairn.attention.backend import SparseParts
from cairn.attention.batch import AttentionBatch, to_device
from cairn.attention.clearing import clear_begun_pages
from cairn.attention.dsa_kernels import RowKernels
from cairn.attention.dsa_step import Decoding, Piece, Run, Step, split_rows
from cairn.attention.hot_rows import HotRows
from cairn.attention.placing import Placed, place
from cairn.memory.hisparse import HiSparseCoordinator


class TieredRows:
    def __init__(
        self, parts: SparseParts, tier: HiSparseCoordinator, kernels: RowKernels | None
    ) -> None:
        assert tier.stage is not None and parts.in_stage is not None
        assert (kernels is None) == (tier.row_swap is None)
        self._kernels = kernels
        self._parts = parts
        self._tier = tier
        self._in_stage = parts.in_stage
        self.stage = tier.stage
        self._layers = parts.config.layers
        self._group = parts.pool.group_of[self._layers[0]]

    def prepare(self, batch: AttentionBatch) -> Step:
        dense, kernels = self._parts.dense, self._kernels
        # They compute all rows alike, so that a recorded step gives the same result.
        if kernels is not None and (batch.decodes or (batch.resident and kernels.take(batch))):
            return Step(batch, (Run(dense, None, None, (), kernels=kernels.whole(batch)),))
        if kernels is None:
            clear_begun_pages(self._parts.pool, batch)  # a backend over the stage does not do so
        decodes = batch.query_lens == 1
        placed = place(batch, ~decodes, self._tier)
        staged = [own.staged for own in placed if own.staged is not None]
        fills = [(layer, pages) for layer in self._layers for pages in staged]
        step = Step(batch, tuple(self._run(batch, own) for own in placed))
        step.staging = self.stage.step(fills, ahead=kernels is not None)
        if decodes.any():
            seqs = np.flatnonzero(decodes)
            if kernels is None:
                step.decoding = self._decoding(batch, seqs)
            else:
                own = kernels.decode_some(batch, seqs)
                step.runs += (Run(dense, None, None, (), kernels=own),)
        return step

    def _run(self, batch: AttentionBatch, placed: Placed) -> Run:
        staged = placed.staged is not None
        table, wide = (
            to_device(placed.table.astype(kind), batch.device) for kind in (np.int32, np.int64)
        )
        groups = list(batch.groups)
        own = replace(groups[self._group], host_pages=placed.table, page_table=table)
        groups[self._group] = own
        run = split_rows(
            replace(batch, groups=tuple(groups)),
            placed.seqs,
            self._parts.config.topk,
            self._in_stage if staged else self._parts.dense,
            {self._group},
            table=wide,
            staged=staged,
        )
        if self._kernels is None or not run.pieces:
            return run
        rows = self._kernels.chunks(batch, *run.listed)
        rows.table, rows.pool = table, self.stage if staged else None
        return replace(run, kernels=rows)

    def _decoding(self, batch: AttentionBatch, seqs: np.ndarray) -> Decoding:
        rows, kv_lens = batch.cu_query[seqs], tuple(batch.kv_lens[seqs].tolist())
        pieces = {
            i: Piece(int(s), slice(int(rows[i]), int(rows[i]) + 1), kv_lens[i] - 1)
            for i, s in enumerate(seqs)
            if kv_lens[i] > self._parts.config.topk
        }
        return Decoding(
            to_device(rows, batch.device), kv_lens, pieces, HotRows(self._tier, batch, seqs)
        )

    def launching(self, batch: AttentionBatch) -> None:
        """Count the rows that decoding sequences read in frames, if kernels do not look them up."""
        if self._kernels is not None and batch.resident:
            seen = np.minimum(batch.kv_lens[batch.query_lens == 1], self._parts.config.topk)
            self._tier.read_resident(len(self._layers) * int(seen.sum()))

    @contextmanager
    def filled(self, run: Run, step: Step) -> Iterator[None]:
        """Inside, the stage holds the pages of a run that is read from it. If the step fails there,
        `abandon` frees them."""
        if not run.staged:
            yield
            return
        assert step.staging is not None
        self.stage.fill(step.staging)
        if run.metadata is not None:  # now, since staged runs share one backend
            run.dense.begin(run.metadata)
        yield
        self.stage.release(step.staging)

    def abandon(self) -> None:
        """After a failed step, forget rows that not all layers of a plan have copied, and free the
        layer that was in the stage."""
        self._tier.forget()
        self.stage.abandon()
