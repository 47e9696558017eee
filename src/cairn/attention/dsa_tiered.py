"""`dsa` with a host tier: index keys stay on the device, and latent rows may leave it.

A decoding sequence reads single rows, which the tier finds (`hot_rows`). The rows of a chunk
together select nearly everything, so all pages of their sequence are staged, layer by layer
(`placing`).
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace

import numpy as np

from cairn.attention.backend import SparseParts
from cairn.attention.batch import AttentionBatch, to_device
from cairn.attention.clearing import clear_begun_pages
from cairn.attention.dsa_step import Decoding, Piece, Run, Step, split_rows
from cairn.attention.hot_rows import HotRows
from cairn.attention.placing import Placed, place
from cairn.memory.hisparse import HiSparseCoordinator


class TieredRows:
    def __init__(self, parts: SparseParts, tier: HiSparseCoordinator) -> None:
        assert tier.stage is not None and parts.in_stage is not None
        self._parts = parts
        self._tier = tier
        self._in_stage = parts.in_stage
        self.stage = tier.stage
        self._layers = parts.config.layers
        self._group = parts.pool.group_of[self._layers[0]]

    def prepare(self, batch: AttentionBatch) -> Step:
        clear_begun_pages(self._parts.pool, batch)  # a backend over the stage does not do so
        decodes = batch.query_lens == 1
        placed = place(batch, ~decodes, self._tier)
        staged = [own.staged for own in placed if own.staged is not None]
        fills = [(layer, pages) for layer in self._layers for pages in staged]
        return Step(
            batch,
            tuple(self._run(batch, own) for own in placed),
            decoding=self._decoding(batch, np.flatnonzero(decodes)) if decodes.any() else None,
            staging=self.stage.step(fills, ahead=False),
        )

    def _run(self, batch: AttentionBatch, placed: Placed) -> Run:
        staged = placed.staged is not None
        table, wide = (
            to_device(placed.table.astype(kind), batch.device) for kind in (np.int32, np.int64)
        )
        groups = list(batch.groups)
        own = replace(groups[self._group], host_pages=placed.table, page_table=table)
        groups[self._group] = own
        return split_rows(
            replace(batch, groups=tuple(groups)),
            placed.seqs,
            self._parts.config.topk,
            self._in_stage if staged else self._parts.dense,
            {self._group},
            table=wide,
            staged=staged,
        )

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

    @contextmanager
    def filled(self, run: Run, step: Step) -> Iterator[None]:
        """Inside, the stage holds the pages of a run that is read from it. If the step fails there,
        `abandon` frees them."""
        if not run.staged:
            yield
            return
        assert step.staging is not None
        self.stage.fill(step.staging)
        yield
        self.stage.release(step.staging)

    def abandon(self) -> None:
        """After a failed step, forget rows that not all layers of a plan have copied, and free the
        layer that was in the stage."""
        self._tier.forget()
        self.stage.abandon()
