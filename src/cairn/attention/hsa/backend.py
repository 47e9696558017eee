"""`--attention-backend hsa`: computes sparse layers, and passes the others to a dense backend."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import torch

from cairn.attention.backend import AttentionShape, Graph, Replayable, SparseBackend, SparseParts
from cairn.attention.batch import AttentionBatch, GraphKind, Scoring, to_device, unit_ids
from cairn.attention.clearing import clear_begun_pages
from cairn.attention.hsa.cpu_sparse import CpuSparse
from cairn.attention.hsa.kernel_sparse import KernelMetadata, KernelSparse
from cairn.attention.hsa.landmark_maker import LandmarkMaker
from cairn.attention.hsa.metadata import (
    CompletedPages,
    SparseGroups,
    Tile,
    completed_pages,
    make_tiles,
    traced_tiles,
)
from cairn.attention.hsa.tiered_dense import TieredDense
from cairn.attention.hsa.torch_sparse import TorchSparse
from cairn.memory.layout import QUERY
from cairn.sparsity.config import SparseConfig
from cairn.sparsity.selection import Selection


@dataclass(frozen=True, slots=True)
class HSAMetadata:
    dense: Any
    """The dense backend's metadata for layers that are not sparse."""
    dense_rows: Any
    """Metadata of the dense backend, or of `TieredDense`, for the sequences that sparse layers read
    densely; None if there are none."""
    dense_seqs: np.ndarray  # [seqs] bool, those sequences
    kernels: KernelMetadata | None
    tiles: tuple[Tile, ...]
    """Rows that are computed on a CPU or in torch; with kernels only the traced rows."""
    completed: CompletedPages | None
    """Pages whose landmarks are made in torch."""
    batch: AttentionBatch
    selections: dict[int, dict[int, Selection]] = field(default_factory=dict)
    """Filled as layers run: row of the step -> layer -> the selection of that row."""

    @property
    def selects(self) -> bool:
        """Whether some rows read selected pages."""
        return bool(self.tiles) or (self.kernels is not None and self.kernels.has_rows)


class HSABackend(SparseBackend):
    """Selects pages in sparse layers, and passes all other layers to a dense backend.

    In sparse layers a row's position alone decides whether it is sparse or dense (`SparseConfig`).
    If some sequence has only dense rows, the dense backend gets all rows of the step. It sees an
    empty past for the other sequences, whose output the sparse kernels then overwrite.
    """

    name = "hsa"
    needs_landmarks = True
    options = frozenset(
        {
            *("policy", "unit_size", "topk", "selection_strategy", "top_p", "budget"),
            *("window", "sinks", "fusion", "layers", "dense_layers", "prefill", "dense_below"),
        }
    )
    serves_trained = True
    serves_tier = True
    reads_8_bits = True

    def __init__(self, parts: SparseParts, *, kernels: bool | None = None) -> None:
        """`kernels` chooses between kernels and torch; by default kernels run if they can."""
        shape, pool, config, dense = parts.shape, parts.pool, parts.config, parts.dense
        landmarks, tier = parts.landmarks, parts.tier
        assert landmarks is not None and config.policy is not None
        refused = self.kernel_refusal(config, shape)
        by_kernels = refused is None if kernels is None else kernels
        self._maker = LandmarkMaker(config, shape, pool, landmarks, kernels=by_kernels)
        self.kernels: KernelSparse | None = None
        if by_kernels:
            swap = None if tier is None else tier.swap
            own = landmarks, self._maker, parts.max_pages, swap
            self.kernels = KernelSparse(config, shape, pool, *own, drafts=parts.drafts)
            self.notes = self.kernels.notes
            self.reads_generations = True
        elif shape.device.type == "cuda":
            self.notes = (f"hsa runs in plain torch, its kernels cannot: {refused}",)
        self._pool = pool
        self._config = config
        self.units = config.units
        self._policy = config.policy
        self._landmarks = landmarks
        self._dense = dense
        self._torch = TorchSparse(config, pool, landmarks, shape.scale, tier)
        self._cpu: CpuSparse | None = None
        if not by_kernels and tier is None and CpuSparse.serves(config, shape, pool, landmarks):
            self._cpu = CpuSparse(config, shape, pool, landmarks)
        self._shape = shape
        self._sparse_layers = frozenset(config.layers)
        dense_layers = pool.group_of.keys() - self._sparse_layers
        self._dense_groups = {pool.group_of[layer] for layer in dense_layers}
        self._groups = SparseGroups.of(config, shape, pool)
        self._tiered: TieredDense | None = None
        if tier is not None and parts.in_stage is not None:
            self._tiered = TieredDense(dense, parts.in_stage, tier, config.layers, self._groups)
        self._wide = torch.promote_types(shape.dtype, torch.float32)
        self._has_tier = tier is not None
        self.graphs = self._recordable()
        if parts.drafts and Graph("sparse", mixed=False) in self.graphs:
            self.graphs.append(Graph("kept", mixed=False))

    def _recordable(self) -> list[Graph]:
        has_tier = self._has_tier
        dense = {graph.mixed for graph in self._dense.graphs}
        decodes, mixes = False in dense, True in dense
        if self.kernels is None or (self._dense_groups and not decodes):
            return []
        decode: tuple[GraphKind, ...] = ("sparse", "resident") if has_tier else ("sparse",)
        mixed: tuple[GraphKind, ...] = ()
        if not has_tier and self._config.reads_densely and decodes:
            decode = ("dense", "sparse", "both")
            # Chunks whose rows select pages are not recorded beside dense rows.
            mixed = ("dense", "both") if mixes else ()
        elif not has_tier and not self._config.reads_densely and (mixes or not self._dense_groups):
            mixed = ("sparse",)
        few = Graph("dense", mixed=False, few=True)
        return [
            *(Graph(kind, False) for kind in decode),
            *(Graph(kind, True) for kind in mixed),
            *((few,) if "dense" in decode and few in self._dense.graphs else ()),
        ]

    @classmethod
    def kernel_refusal(cls, config: SparseConfig, shape: AttentionShape) -> str | None:
        return KernelSparse.refusal(config, shape)

    def rungs(
        self, max_seqs: int, max_pages: int
    ) -> tuple[tuple[int, ...], tuple[int, ...]] | None:
        return None if self.kernels is None else self.kernels.rungs(max_seqs, max_pages)

    @property
    def launches(self) -> int:
        """Number of sparse decode layers that kernels have computed."""
        return 0 if self.kernels is None else self.kernels.launches

    def graph_for(self, batch: AttentionBatch, *, mixed: bool) -> Graph | None:
        if len(batch.traced_rows):
            return None
        dense = self._dense_seqs(batch)
        count = np.count_nonzero(dense)
        kind: GraphKind = "resident" if batch.resident else "kept" if batch.kept else "sparse"
        if count or (mixed and self._config.reads_densely):
            kind = "dense" if count == len(dense) else "both"
        graph = Graph(kind, mixed, few=not mixed and not batch.decodes)
        if graph not in self.graphs:
            return None
        if mixed:
            selecting = batch.kv_lens[(batch.query_lens > 1) & ~dense]
            fits = self.kernels is not None and self.kernels.chunks.fit(selecting)
            if len(selecting) and not (kind == "sparse" and fits):
                return None
        seen = batch
        if kind == "both":
            seen = replace(batch, kv_lens=np.where(dense, batch.kv_lens, batch.query_lens))
        elif kind != "dense" and not (mixed and self._dense_groups):
            return graph
        return None if self._dense.graph_for(seen, mixed=mixed) is None else graph

    def launching(self, batch: AttentionBatch, graph: Graph | None) -> None:
        if graph is not None and graph.kind == "kept":
            return  # pages that drafts complete get their landmarks when they are checked
        seq, place, _ = completed_pages(batch, self.units)
        if not len(seq):
            return
        tables = batch.groups[self._groups.selected]
        self._landmarks.seal(
            unit_ids(tables.host_pages, seq, place, self.units),
            tables.host_generations[seq, place // self.units],
            on_device=not self._seals_itself(batch, graph),
        )

    def _seals_itself(self, batch: AttentionBatch, graph: Graph | None) -> bool:
        """Whether the step's own kernels make and seal the landmarks of completed pages, as they do
        in sparse decode steps."""
        if self.kernels is None:
            return False
        if graph is not None:
            return not graph.mixed and graph.kind in ("sparse", "resident", "kept")
        return batch.decodes and not self._dense_seqs(batch).any()

    def replayed(self, batch: AttentionBatch, graph: Graph) -> None:
        """Make the landmarks of pages that the step completed outside sparse kernels."""
        if graph.kind not in ("dense", "both"):
            return
        seq, place, _ = completed_pages(batch, self.units)
        if len(seq):
            self._maker.of_all_layers(*self._sent(batch, seq, place))

    def _sent(
        self, batch: AttentionBatch, seq: np.ndarray, place: np.ndarray
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Ids of pages [n] on the device: those of landmarks, and those of keys."""
        selected, kv = (
            to_device(
                unit_ids(batch.groups[g].host_pages, seq, place, self.units), self._shape.device
            )
            for g in self._groups
        )
        return selected, kv

    def _dense_seqs(self, batch: AttentionBatch) -> np.ndarray:
        """The sequences with dense rows only, [seqs] bool."""
        return batch.kv_lens <= self._config.dense_until(batch.prompt_rows)

    def prepare(self, batch: AttentionBatch, groups: Collection[int] | None = None) -> HSAMetadata:
        dense = None
        if self._dense_groups:
            dense = self._dense.prepare(batch, self._dense_groups)
        if batch.recorded is not None:
            return self._prepare_recorded(batch, dense)
        seq, place, rows = completed_pages(batch, self.units)
        completed = None
        if len(seq):
            pages, kv_pages = self._sent(batch, seq, place)
            completed = CompletedPages(pages, kv_pages, to_device(rows, batch.device))
        dense_seqs = self._dense_seqs(batch)
        if self._tiered is not None:  # sparse kernels do not find all pages that dense rows read
            begun = batch.kv_lens - batch.query_lens < batch.prompt_rows
            assert not (begun & ~dense_seqs).any(), "a chunk has rows of a prompt and of an answer"
        dense_rows = self._prepare_dense(batch, dense_seqs) if dense_seqs.any() else None
        sparse = np.flatnonzero(~dense_seqs)
        if self.kernels is None:
            clear_begun_pages(self._pool, batch)
            tiles = make_tiles(batch, self._groups, self._config, sparse)
            return HSAMetadata(dense, dense_rows, dense_seqs, None, tiles, completed, batch)
        kernels = self.kernels.prepare(batch, sparse, completed)
        tiles = traced_tiles(batch, self._groups, self._config, dense_seqs)
        return HSAMetadata(dense, dense_rows, dense_seqs, kernels, tiles, None, batch)

    def _prepare_dense(self, batch: AttentionBatch, dense: np.ndarray) -> Any:
        """Metadata for the dense rows; `dense` [seqs] are the sequences with only such rows."""
        if self._tiered is not None:
            selecting = ~dense & (batch.query_lens > 1)  # such chunks also use the stage
            ahead = batch.resident or not selecting.any()
            return self._tiered.prepare(batch, dense, ahead=ahead)
        own = batch if dense.all() else batch.shortened(~dense)
        return self._dense.prepare(own, {self._groups.kv})

    def _prepare_recorded(self, batch: AttentionBatch, dense: Any) -> HSAMetadata:
        """Metadata of a recorded step, whose lengths only the device knows."""
        assert self.kernels is not None
        none = np.zeros(batch.num_seqs, dtype=bool)
        dense_rows = kernels = None
        if batch.recorded == "dense":
            dense_rows = self._dense.prepare(batch, {self._groups.kv})
        elif batch.recorded == "both":
            kernels, kv_lens = self.kernels.prepare_both(batch)
            own = replace(batch, device_kv_lens=kv_lens)
            dense_rows = self._dense.prepare(own, {self._groups.kv})
        elif batch.recorded == "kept":
            kernels = self.kernels.prepare_kept(batch)
        elif batch.decodes:
            kernels = self.kernels.prepare_decode(batch)
        else:
            kernels = self.kernels.prepare_mixed(batch)
        return HSAMetadata(dense, dense_rows, none, kernels, (), None, batch)

    def begin(self, metadata: HSAMetadata) -> None:
        if metadata.dense_rows is not None:
            (self._tiered or self._dense).begin(metadata.dense_rows)
        # This must come second. If dense and sparse layers share a group, both calls write the same
        # plan, and the one with the whole lengths serves both.
        if metadata.dense is not None:
            self._dense.begin(metadata.dense)
        if metadata.kernels is not None and self.kernels is not None:
            self.kernels.begin(metadata.kernels)

    def forward(
        self, layer: int, query: torch.Tensor, metadata: HSAMetadata, scoring: Scoring | None = None
    ) -> torch.Tensor:
        if layer not in self._sparse_layers:
            return self._dense.forward(layer, query, metadata.dense)
        self._observe(layer, query, metadata)
        if metadata.dense_rows is not None:
            out = (self._tiered or self._dense).forward(layer, query, metadata.dense_rows)
        else:
            out = torch.empty(query.shape, dtype=query.dtype, device=query.device)
        selected = None
        if metadata.kernels is not None and self.kernels is not None:
            selected = self.kernels.forward(layer, query, scoring, metadata.kernels, out)
        if metadata.completed is not None:
            self._maker.of_layer(layer, metadata.completed, query, scoring)
        scores_with = query if scoring is None else scoring.query
        for tile in metadata.tiles:
            index = None
            in_torch = self.kernels is None
            if metadata.kernels is not None and self.kernels is not None:
                index = self.kernels.selected(metadata.kernels, tile.traced_rows, selected)
            elif self._cpu is not None and tile.single:
                index = self._cpu.forward(layer, tile, query, scores_with, out)
                in_torch = False
                if tile.traced is None:
                    continue
            own, scored = (rows[tile.rows].to(self._wide) for rows in (query, scores_with))
            attended, selection = self._torch.forward(layer, tile, own, scored, index)
            if selection is not None:
                for i, row in enumerate(tile.traced_rows):
                    metadata.selections.setdefault(row, {})[layer] = selection.row(i)
            if in_torch:
                out[tile.rows] = attended.to(out.dtype)
        return out

    def forward_rows(
        self,
        layer: int,
        query: torch.Tensor,
        rows: torch.Tensor,
        metadata: HSAMetadata,
        scoring: Scoring | None = None,
    ) -> torch.Tensor | None:
        if layer not in self._sparse_layers:
            return self._dense.forward_rows(layer, query, rows, metadata.dense)
        if self._has_tier:  # it moves pages layer by layer
            return None
        kernels = metadata.kernels
        found: torch.Tensor | None = query[:0]
        if len(rows):
            found = None
            if metadata.dense_rows is not None and not metadata.selects:
                found = self._dense.forward_rows(layer, query, rows, metadata.dense_rows)
        elif kernels is not None and kernels.decode is not None:
            return None  # kernels for single rows also make landmarks
        if found is None:
            return None
        self._observe(layer, query, metadata)
        if kernels is not None and self.kernels is not None:
            self.kernels.save(layer, query, scoring, kernels)
        if metadata.completed is not None:
            self._maker.of_layer(layer, metadata.completed, query, scoring)
        return found

    def _observe(self, layer: int, query: torch.Tensor, metadata: HSAMetadata) -> None:
        """Keep the query, for policies that ask for it."""
        if self._policy.observed:
            batch = metadata.batch
            pages = batch.groups[self._groups.kv].row_pages
            self._pool.write(layer, pages, batch.row_offsets, query, QUERY)

    def replayable(self, metadata: HSAMetadata) -> Replayable | None:
        """Steps of single rows that are all dense. No row reads the landmarks of pages that it
        completes, so these are saved at the end."""
        if (
            self.kernels is not None
            or self._tiered is not None
            or self._policy.observed
            or metadata.tiles
            or metadata.dense_rows is None
        ):
            return None
        steps = [part for part in (metadata.dense, metadata.dense_rows) if part is not None]
        found = [self._dense.replayable(part) for part in steps]
        if None in found:
            return None
        inputs = [tensor for one in found if one is not None for tensor in one.inputs]
        completed = metadata.completed

        def finish() -> None:
            if completed is not None:
                self._maker.of_all_layers(*completed[:2])

        return Replayable(inputs, replace(metadata, completed=None), finish)

    def selections(self, metadata: HSAMetadata, row: int) -> dict[int, Selection]:
        seq = int(np.searchsorted(metadata.batch.cu_query, row, side="right")) - 1
        if metadata.dense_seqs[seq]:
            everything = Selection.window_only(self._shape.num_heads, self._shape.num_kv_heads)
            return dict.fromkeys(self._config.layers, everything)
        return metadata.selections.get(row, {})

    def forget(self, pages: np.ndarray) -> None:
        self._landmarks.invalidate(pages[self._groups.selected])

    def abandon(self, batch: AttentionBatch) -> None:
        seq, place, _ = completed_pages(batch, self.units)
        pages = batch.groups[self._groups.selected].host_pages
        self._landmarks.invalidate(unit_ids(pages, seq, place, self.units))
        if self._tiered is not None:
            self._tiered.abandon()
