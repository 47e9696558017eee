"""DeepSeek sparse attention: an index scores all earlier rows, and heads read the best of them.

Which rows a query reads is exact: the k rows of highest score, the earlier one of equal scores. A
query that sees at most k rows reads all of them, densely. Only selected latent rows are copied, so
the work of a query does not grow with its past, but for the scan of index keys.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F

from cairn.attention.backend import AttentionShape, Graph, SparseBackend, SparseParts
from cairn.attention.batch import AttentionBatch, IndexQuery, to_device
from cairn.attention.dsa_kernels import RowKernels, RowStep
from cairn.attention.latent import LatentHeads
from cairn.memory.layout import INDEX, LATENT
from cairn.sparsity.config import SparseConfig
from cairn.sparsity.selection import Selection, top_rows

_SCORED = 2**24  # products of index heads and rows at once
_COPIED = 2**23  # numbers of selected latent rows at once


@dataclass(frozen=True, slots=True)
class _Piece:
    """Consecutive new rows of a sequence that each see more than k rows."""

    seq: int
    rows: slice  # of the step
    first: int  # position of the first one

    @property
    def end(self) -> int:
        """Rows that the last one sees."""
        return self.first + int(self.rows.stop - self.rows.start)


@dataclass(slots=True)
class _Step:
    batch: AttentionBatch
    dense: Any  # metadata of the dense backend, for rows that see at most k rows
    dense_rows: torch.Tensor | None  # those rows of the step; None for all
    pieces: tuple[_Piece, ...]
    selected: list[torch.Tensor] = field(default_factory=list)
    """Positions [rows, k] of each piece, from the last layer with an index."""
    traced: dict[int, dict[int, Selection]] = field(default_factory=dict)
    """By row of the step, then by layer."""
    kernels: RowStep | None = None
    """The rows of `pieces`, or all rows of a decode step, where kernels compute them."""


class DSABackend(SparseBackend):
    name = "dsa"
    options = frozenset()
    reads_index = True

    def __init__(self, parts: SparseParts) -> None:
        super().__init__(parts)
        self._kernels: RowKernels | None = None
        refused = RowKernels.refusal(parts.shape)
        if refused is None:
            self._kernels = RowKernels(parts)
            dense = [graph for graph in parts.dense.graphs if graph.kind == "dense"]
            self.graphs = [*dense, Graph("sparse", mixed=False)]
        elif parts.shape.device.type == "cuda":
            self.notes = (f"dsa runs in plain torch, its kernels cannot: {refused}",)

    @classmethod
    def kernel_refusal(cls, config: SparseConfig, shape: AttentionShape) -> str | None:
        return RowKernels.refusal(shape)

    def graph_for(self, batch: AttentionBatch, *, mixed: bool) -> Graph | None:
        if len(batch.traced_rows):
            return None
        graph = Graph("sparse", mixed)
        if (batch.kv_lens <= self._parts.config.topk).all():
            graph = Graph("dense", mixed)
            if self._parts.dense.graph_for(batch, mixed=mixed) is None:
                return None
        return graph if graph in self.graphs else None

    def prepare(self, batch: AttentionBatch, groups: Collection[int] | None = None) -> _Step:
        dense = self._parts.dense
        if batch.recorded == "dense":
            return _Step(batch, dense.prepare(batch, groups), None, ())
        if batch.recorded is not None:
            return self._decode_step(batch)
        past = batch.kv_lens - batch.query_lens
        counts = np.clip(self._parts.config.topk - past, 0, batch.query_lens)  # of dense rows
        if (counts == batch.query_lens).all():
            return _Step(batch, dense.prepare(batch, groups), None, ())
        if batch.decodes and self._kernels is not None:
            return self._decode_step(batch)
        starts = batch.cu_query[:-1] + counts
        ends = batch.cu_query[1:].tolist()
        pieces = tuple(
            _Piece(s, slice(int(starts[s]), ends[s]), int(past[s] + counts[s]))
            for s in np.flatnonzero(counts < batch.query_lens).tolist()
        )
        metadata, rows = None, []
        seqs = np.flatnonzero(counts)
        if len(seqs):
            metadata = dense.prepare(_part_of(batch, seqs, counts[seqs]), groups)
            rows = [np.arange(batch.cu_query[s], starts[s]) for s in seqs]
        dense_rows = np.concatenate([*rows, np.empty(0, dtype=np.int64)])
        step = _Step(batch, metadata, to_device(dense_rows, batch.device), pieces)
        if self._kernels is not None:
            owners, own = zip(*((piece.seq, piece.rows) for piece in pieces), strict=True)
            step.kernels = self._kernels.chunks(batch, owners, own)
        return step

    def _decode_step(self, batch: AttentionBatch) -> _Step:
        """By kernels, all rows alike, so that a step gives the same recorded and not recorded."""
        assert self._kernels is not None
        return _Step(batch, None, None, (), kernels=self._kernels.decode(batch))

    def begin(self, metadata: _Step) -> None:
        if metadata.dense is not None:
            self._parts.dense.begin(metadata.dense)
        if metadata.kernels is not None and self._kernels is not None:
            self._kernels.begin(metadata.kernels)

    def forward_indexed(
        self,
        layer: int,
        query: torch.Tensor,
        heads: LatentHeads,
        metadata: _Step,
        index: IndexQuery | None,
    ) -> torch.Tensor:
        dense, step = self._parts.dense, metadata
        if step.dense is not None and step.dense_rows is None:
            return dense.forward_latent(layer, query, heads, step.dense)
        if step.kernels is not None:
            return self._by_kernels(layer, query, heads, step, step.kernels, index)
        if index is not None:
            step.selected = [self.select(layer, piece, index, step) for piece in step.pieces]
        out = query.new_empty(*query.shape[:2], heads.value.shape[2])
        if step.dense is not None:
            own = query[step.dense_rows]
            out[step.dense_rows] = dense.forward_latent(layer, own, heads, step.dense)
        for piece, positions in zip(step.pieces, step.selected, strict=True):
            absorbed = heads.absorb(query[piece.rows])
            out[piece.rows] = heads.values(self.attend(layer, absorbed, piece, positions, step))
        return out

    def _by_kernels(
        self,
        layer: int,
        query: torch.Tensor,
        heads: LatentHeads,
        step: _Step,
        rows: RowStep,
        index: IndexQuery | None,
    ) -> torch.Tensor:
        assert self._kernels is not None
        out = None
        if step.dense is not None:
            own = query[step.dense_rows]
            out = query.new_empty(*query.shape[:2], heads.value.shape[2])
            out[step.dense_rows] = self._parts.dense.forward_latent(layer, own, heads, step.dense)
        out = self._kernels.forward(layer, query, heads, rows, index, out)
        shape, batch = self._parts.shape, step.batch
        pool = self._parts.pool.part(layer, LATENT).flatten(0, 1)
        group = self._parts.pool.group_of[layer]
        for row in np.intersect1d(batch.traced_rows, rows.rows).tolist():
            seq = int(np.searchsorted(batch.cu_query, row, side="right")) - 1
            if batch.kv_lens[seq] - (batch.cu_query[seq + 1] - 1 - row) <= self._parts.config.topk:
                continue  # it reads all that it sees
            place = int(np.searchsorted(rows.rows, row))
            kept = pool[rows.slots[group][place]]
            scores = (heads.absorb(query[row : row + 1])[0] @ kept.t()).float() * shape.scale
            pages = rows.positions[place].long() // batch.page_size
            table = batch.groups[group].page_table[seq].long()
            step.traced.setdefault(row, {})[layer] = _by_page(scores, pages, table)
        return out

    def select(self, layer: int, piece: _Piece, index: IndexQuery, step: _Step) -> torch.Tensor:
        """The positions that each row of a piece reads, [rows, k] ascending."""
        size = step.batch.page_size
        pages = self._table(layer, piece, step)[: -(-piece.end // size)]
        keys = self._parts.pool.part(layer, INDEX).index_select(0, pages).flatten(0, 1)
        keys = keys[: piece.end].to(index.query.dtype).t()  # [width, rows]
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
        piece: _Piece,
        positions: torch.Tensor,
        step: _Step,
    ) -> torch.Tensor:
        """Absorbed query [rows, heads, width] over the rows at `positions` -> [rows, heads,
        latent]"""
        size, shape = step.batch.page_size, self._parts.shape
        pool = self._parts.pool.part(layer, LATENT)
        rows_of_pool, width = pool.view(-1, pool.shape[-1]), pool.shape[-1]
        slots = self._table(layer, piece, step)[positions // size] * size + positions % size
        at_once = max(1, _COPIED // (positions.shape[1] * width))
        out = []
        for begin in range(0, len(query), at_once):
            own, places = query[begin : begin + at_once], slots[begin : begin + at_once]
            kept = rows_of_pool.index_select(0, places.flatten()).view(len(own), 1, -1, width)
            read = F.scaled_dot_product_attention(own[:, None], kept, kept, scale=shape.scale)
            out.append(read[:, 0, :, : shape.value_dim])
            for row in step.batch.traced_rows.tolist():
                place = row - piece.rows.start - begin
                if 0 <= place < len(own):
                    scores = (own[place] @ kept[place, 0].t()) * shape.scale
                    pages = positions[begin + place] // size
                    table = self._table(layer, piece, step)
                    step.traced.setdefault(row, {})[layer] = _by_page(scores, pages, table)
        return torch.cat(out)

    def _table(self, layer: int, piece: _Piece, step: _Step) -> torch.Tensor:
        group = self._parts.pool.group_of[layer]
        return step.batch.groups[group].page_table[piece.seq].long()

    def selections(self, metadata: _Step, row: int) -> dict[int, Selection]:
        if row in metadata.traced:
            return metadata.traced[row]
        alone = Selection.window_only(self._parts.shape.num_heads, 1)
        return dict.fromkeys(self._parts.config.layers, alone)


def _part_of(batch: AttentionBatch, seqs: np.ndarray, counts: np.ndarray) -> AttentionBatch:
    """The first `counts` new rows of some sequences, as a batch of their own."""
    index = to_device(seqs, batch.device)
    kv_lens = (batch.kv_lens - batch.query_lens)[seqs] + counts
    cu_query = np.concatenate(([0], np.cumsum(counts)))
    groups = tuple(
        replace(
            group,
            host_pages=group.host_pages[seqs],
            host_generations=group.host_generations[seqs],
            page_table=group.page_table[index],
        )
        for group in batch.groups
    )
    return replace(
        batch,
        query_lens=counts,
        kv_lens=kv_lens,
        cu_query=cu_query,
        groups=groups,
        prompt_rows=batch.prompt_rows[seqs],
        traced_rows=np.empty(0, dtype=np.int64),
        device_kv_lens=to_device(kv_lens.astype(np.int32), batch.device),
        device_cu_query=to_device(cu_query.astype(np.int32), batch.device),
        device_prompt_rows=batch.device_prompt_rows[index],
    )


def _by_page(scores: torch.Tensor, pages: torch.Tensor, table: torch.Tensor) -> Selection:
    """What one row read, [heads, k] scores of rows, gathered by the page of each row."""
    found, place = torch.unique(pages, return_inverse=True)
    shares = scores.softmax(-1)
    weights = shares.new_zeros(len(shares), len(found)).index_add_(1, place, shares)
    none = scores.new_zeros(1, len(scores))
    ids, index = table[found][None, None], found[None, None]
    return Selection(ids, index, weights[None].log(), weights[None], none, none)
