"""DeepSeek sparse attention: an index scores all earlier rows, and heads read the best of them.

The selection is exact: the k rows with the highest scores, the earlier row of equal scores. A query
that sees at most k rows reads all of them, densely. Only selected latent rows are copied, so the
work of a query does not grow with its past, except for the scan of index keys. With a host tier,
`dsa_tiered` says where rows are.
"""

from __future__ import annotations

from collections.abc import Collection
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace

import numpy as np
import torch

from cairn.attention.backend import AttentionShape, Graph, SparseBackend, SparseParts
from cairn.attention.batch import AttentionBatch, GraphKind, IndexQuery
from cairn.attention.dsa_kernels import RowKernels, RowStep
from cairn.attention.dsa_step import Decoding, Piece, Run, Step, split_rows
from cairn.attention.dsa_tiered import TieredRows
from cairn.attention.fused import attention
from cairn.attention.latent import LatentHeads
from cairn.kernels.fp8_rows import unpack_rows, widen
from cairn.kernels.interface import LISTED_ROWS
from cairn.memory.kv_pool import KVPool
from cairn.memory.layout import INDEX, LATENT
from cairn.sparsity.config import SparseConfig
from cairn.sparsity.selection import Selection, top_rows

_SCORED = 2**24  # products of index heads and rows at once
_COPIED = 2**23  # numbers of selected latent rows at once


class DSABackend(SparseBackend):
    name = "dsa"
    options = frozenset()
    reads_index = True
    reads_8_bits = True
    serves_tier = True
    selecting_rows = LISTED_ROWS

    def __init__(self, parts: SparseParts) -> None:
        super().__init__(parts)
        self._kernels: RowKernels | None = None
        refused = RowKernels.refusal(parts.config, parts.shape)
        if refused is None:
            self._kernels = RowKernels(parts)
            if parts.tier is None:
                dense = [graph for graph in parts.dense.graphs if graph.kind == "dense"]
                self.graphs = [*dense, Graph("sparse", mixed=False), Graph("sparse", mixed=True)]
            else:  # dense backends do not find pages that left the device
                self.graphs = [Graph("resident", mixed=own) for own in (False, True)]
                self.graphs.append(Graph("sparse", mixed=False))
                self.reads_generations = True
            self.notes = self._kernels.notes
        elif parts.shape.device.type == "cuda":
            self.notes = (f"dsa runs in plain torch, its kernels cannot: {refused}",)
        self._tiered: TieredRows | None = None
        if parts.tier is not None:
            self._tiered = TieredRows(parts, parts.tier, self._kernels)

    @classmethod
    def kernel_refusal(cls, config: SparseConfig, shape: AttentionShape) -> str | None:
        return RowKernels.refusal(config, shape)

    @classmethod
    def buffer_bytes(cls, shape: AttentionShape) -> int:
        return RowKernels.buffer_bytes(shape)

    def graph_for(self, batch: AttentionBatch, *, mixed: bool) -> Graph | None:
        if len(batch.traced_rows):
            return None
        kind: GraphKind = "resident" if batch.resident else "sparse"
        graph: Graph | None = Graph(kind, mixed, few=not mixed and not batch.decodes)
        if self._tiered is None and (batch.kv_lens <= self._parts.config.topk).all():
            graph = self._parts.dense.graph_for(batch, mixed=mixed)
        return graph if graph in self.graphs else None

    def launching(self, batch: AttentionBatch, graph: Graph | None) -> None:
        if self._tiered is not None:
            self._tiered.launching(batch)

    def prepare(self, batch: AttentionBatch, groups: Collection[int] | None = None) -> Step:
        dense, topk = self._parts.dense, self._parts.config.topk
        if self._tiered is not None:
            return self._tiered.prepare(batch)
        if batch.recorded == "dense":
            return Step(batch, (Run(dense, dense.prepare(batch, groups), None, ()),))
        kernels, selects = self._kernels, (batch.kv_lens > topk).any()
        # They compute all rows alike, so that a recorded step gives the same result.
        if kernels is not None and (batch.recorded or (selects and kernels.take(batch))):
            return Step(batch, (Run(dense, None, None, (), kernels=kernels.whole(batch)),))
        run = split_rows(batch, np.arange(batch.num_seqs), topk, dense, groups)
        if kernels is not None and run.pieces:
            run = replace(run, kernels=kernels.chunks(batch, *run.listed))
        return Step(batch, (run,))

    def begin(self, metadata: Step) -> None:
        for run in metadata.runs:
            if run.metadata is not None and not run.staged:
                run.dense.begin(run.metadata)
            if run.kernels is not None and self._kernels is not None:
                self._kernels.begin(run.kernels)
        if self._tiered is not None and metadata.staging is not None:
            self._tiered.stage.begin(metadata.staging)

    def abandon(self, batch: AttentionBatch) -> None:
        if self._tiered is not None:
            self._tiered.abandon()

    def forward_indexed(
        self,
        layer: int,
        query: torch.Tensor,
        heads: LatentHeads,
        metadata: Step,
        index: IndexQuery | None,
    ) -> torch.Tensor:
        step = metadata
        if self._kernels is not None:
            return self._by_kernels(self._kernels, layer, query, heads, step, index)
        if index is not None:
            step.selected = {
                piece.rows.start: self.select(layer, piece, index, step) for piece in step.pieces
            }
        out = query.new_empty(*query.shape[:2], heads.value.shape[2])
        for run in step.runs:
            with self._filled(run, step):
                if run.metadata is not None and run.dense_rows is None:
                    return run.dense.forward_latent(layer, query, heads, run.metadata)
                self._run(layer, query, heads, run, step, out)
        if step.decoding is not None:
            absorbed = heads.absorb(query[step.decoding.rows])
            read = self._decode(layer, absorbed, step.decoding, step, again=index is None)
            out[step.decoding.rows] = heads.values(read)
        return out

    def _filled(self, run: Run, step: Step) -> AbstractContextManager[None]:
        """Inside, a run's pages can be read."""
        return nullcontext() if self._tiered is None else self._tiered.filled(run, step)

    def _run(
        self,
        layer: int,
        query: torch.Tensor,
        heads: LatentHeads,
        run: Run,
        step: Step,
        out: torch.Tensor,
    ) -> None:
        """Write the output of a run's rows."""
        if run.metadata is not None:
            own = query[run.dense_rows]
            out[run.dense_rows] = run.dense.forward_latent(layer, own, heads, run.metadata)
        for piece in run.pieces:
            positions = step.selected[piece.rows.start]
            absorbed = heads.absorb(query[piece.rows])
            out[piece.rows] = heads.values(self.attend(layer, absorbed, piece, positions, step))

    def _decode(
        self, layer: int, query: torch.Tensor, decoding: Decoding, step: Step, *, again: bool
    ) -> torch.Tensor:
        """Absorbed query [seqs, heads, width] of decoding sequences -> [seqs, heads, latent].
        `again` means that the layer reads what the last one read."""
        if not again:
            decoding.hot.select(
                [
                    step.selected[decoding.pieces[i].rows.start][0]
                    if i in decoding.pieces
                    else torch.arange(count, device=query.device)
                    for i, count in enumerate(decoding.kv_lens)
                ]
            )
        out = []
        pool = self._parts.pool.part(layer, LATENT).flatten(0, 1)
        for first, places in decoding.hot.swap_in(layer):
            for i, own in enumerate(places, first):
                piece, row = decoding.pieces.get(i), query[i : i + 1]
                if piece is None:  # it reads all rows that it sees
                    own = own[: decoding.kv_lens[i]]
                    out.append(self._attend(row, self._rows(pool, own[None])))
                else:
                    step.found[piece.rows.start] = own[None]
                    positions = step.selected[piece.rows.start]
                    out.append(self.attend(layer, row, piece, positions, step))
        return torch.cat(out)

    def _by_kernels(
        self,
        kernels: RowKernels,
        layer: int,
        query: torch.Tensor,
        heads: LatentHeads,
        step: Step,
        index: IndexQuery | None,
    ) -> torch.Tensor:
        out = None
        for run in step.runs:
            rows, slots = run.kernels, None
            if rows is not None:  # copies into the stage run beside this
                slots = kernels.chosen(layer, rows, index)
            with self._filled(run, step):
                if run.metadata is not None and run.dense_rows is None:
                    return run.dense.forward_latent(layer, query, heads, run.metadata)
                if run.metadata is not None:
                    own = query[run.dense_rows]
                    if out is None:
                        out = query.new_empty(*query.shape[:2], heads.value.shape[2])
                    out[run.dense_rows] = run.dense.forward_latent(layer, own, heads, run.metadata)
                if rows is not None and slots is not None:
                    out = kernels.forward(layer, query, heads, rows, slots, out)
                    if len(step.batch.traced_rows):
                        self._trace(layer, query, heads, step, rows, slots)
        assert out is not None
        return out

    def _trace(
        self,
        layer: int,
        query: torch.Tensor,
        heads: LatentHeads,
        step: Step,
        rows: RowStep,
        slots: torch.Tensor,
    ) -> None:
        """Keep which pages traced rows read."""
        shape, batch, ids = self._parts.shape, step.batch, self._parts.pool.ids_of[layer]
        for row in np.intersect1d(batch.traced_rows, rows.rows).tolist():
            seq = int(np.searchsorted(batch.cu_query, row, side="right")) - 1
            if batch.kv_lens[seq] - (batch.cu_query[seq + 1] - 1 - row) <= self._parts.config.topk:
                continue  # it reads all that it sees
            place = int(np.searchsorted(rows.rows, row))
            kept = (rows.pool or self._parts.pool).part(layer, LATENT).flatten(0, 1)
            kept = self._rows(kept, slots[place][None])[0]
            scores = (heads.absorb(query[row : row + 1])[0] @ kept.t()).float() * shape.scale
            pages = rows.positions[place].long() // batch.page_size
            table = batch.groups[ids].page_table[seq].long()
            step.traced.setdefault(row, {})[layer] = _by_page(scores, pages, table)

    def select(self, layer: int, piece: Piece, index: IndexQuery, step: Step) -> torch.Tensor:
        """The positions that each row of a piece reads, [rows, k] ascending."""
        size = step.batch.page_size
        pages = self._ids(layer, piece, step)[: -(-piece.end // size)]
        keys = self._parts.pool.part(layer, INDEX).index_select(0, pages)
        keys = widen(keys, index.query.dtype).flatten(0, 1)[: piece.end].t()  # [width, rows]
        query, weights = index.query[piece.rows], index.weights[piece.rows]
        at_once = max(1, _SCORED // (query.shape[1] * piece.end))
        selected = []
        for begin in range(0, len(query), at_once):
            own = query[begin : begin + at_once]
            products = torch.matmul(own, keys).relu_()  # [rows, index heads, rows of the past]
            scores = torch.bmm(weights[begin : begin + at_once, None], products.to(weights.dtype))
            last = torch.arange(len(own), device=keys.device) + piece.first + begin
            unseen = torch.arange(piece.end, device=keys.device) > last[:, None]
            scores = scores[:, 0].masked_fill_(unseen, float("-inf"))
            selected.append(top_rows(scores, self._parts.config.topk))
        return torch.cat(selected)

    def attend(
        self,
        layer: int,
        query: torch.Tensor,
        piece: Piece,
        positions: torch.Tensor,
        step: Step,
    ) -> torch.Tensor:
        """Absorbed query [rows, heads, width] over the rows at `positions` -> [rows, heads,
        latent]"""
        size, places = step.batch.page_size, step.found.get(piece.rows.start)
        if places is None:
            table = self._table(layer, piece, step) if piece.table is None else piece.table
            places = table[positions // size] * size + positions % size
        pool: KVPool = self._parts.pool
        if piece.staged and self._tiered is not None:
            pool = self._tiered.stage
        rows = pool.part(layer, LATENT).flatten(0, 1)
        at_once = max(1, _COPIED // (positions.shape[1] * rows.shape[1]))
        out = []
        for begin in range(0, len(query), at_once):
            own = query[begin : begin + at_once]
            kept = self._rows(rows, places[begin : begin + at_once])
            out.append(self._attend(own, kept))
            for row in step.batch.traced_rows.tolist():
                place = row - piece.rows.start - begin
                if 0 <= place < len(own):
                    scores = (own[place] @ kept[place].t()) * self._parts.shape.scale
                    pages = positions[begin + place] // size
                    ids = self._ids(layer, piece, step)
                    step.traced.setdefault(row, {})[layer] = _by_page(scores, pages, ids)
        return torch.cat(out)

    def _rows(self, pool: torch.Tensor, places: torch.Tensor) -> torch.Tensor:
        """A copy of the latent rows of a pool [rows, ...] at places [n, k], [n, k, width]."""
        copied = pool.index_select(0, places.flatten()).view(*places.shape, -1)
        return unpack_rows(copied, self._parts.shape.head_dim, self._parts.shape.dtype)

    def _attend(self, query: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
        """Absorbed query [n, heads, width] over latent rows [n, k, width] -> [n, heads, latent]"""
        shape, kept = self._parts.shape, rows[:, None]
        read = attention(query[:, None], kept, kept, shape.scale)
        return read[:, 0, :, : shape.value_dim]

    def _table(self, layer: int, piece: Piece, step: Step) -> torch.Tensor:
        """Where the pages of a sequence are."""
        group = self._parts.pool.group_of[layer]
        return step.batch.groups[group].page_table[piece.seq].long()

    def _ids(self, layer: int, piece: Piece, step: Step) -> torch.Tensor:
        """The ids of these pages, by which index keys are found."""
        group = self._parts.pool.ids_of[layer]
        return step.batch.groups[group].page_table[piece.seq].long()

    def selections(self, metadata: Step, row: int) -> dict[int, Selection]:
        if row in metadata.traced:
            return metadata.traced[row]
        alone = Selection.window_only(self._parts.shape.num_heads, 1)
        return dict.fromkeys(self._parts.config.layers, alone)


def _by_page(scores: torch.Tensor, pages: torch.Tensor, table: torch.Tensor) -> Selection:
    """What one row read, [heads, k] scores of rows, gathered by the page of each row."""
    found, place = torch.unique(pages, return_inverse=True)
    shares = scores.softmax(-1)
    weights = shares.new_zeros(len(shares), len(found)).index_add_(1, place, shares)
    none = scores.new_zeros(1, len(scores))
    ids, index = table[found][None, None], found[None, None]
    return Selection(ids, index, weights[None].log(), weights[None], none, none)
