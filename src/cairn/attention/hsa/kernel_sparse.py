"""Sparse attention by Triton kernels: the same as `torch_sparse`, on CUDA, fit for recording.

Sequences with one new row take three launches per layer; longer chunks a window pass, the
selection, and a pass over the union of what neighbouring rows selected.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property, partial
from typing import TYPE_CHECKING, get_args

import numpy as np
import torch

from cairn.attention.backend import AttentionShape, missing_module
from cairn.attention.batch import AttentionBatch, Scoring, to_device
from cairn.attention.hsa.metadata import CompletedPages, SparseGroups, fitting_runs
from cairn.kernels.interface import Located, Pooling
from cairn.kernels.workspace import Workspace
from cairn.memory.device_swap import DeviceSwap
from cairn.memory.kv_pool import KVPool
from cairn.memory.landmarks import LandmarkPool
from cairn.sparsity.config import SparseConfig
from cairn.sparsity.policy import Landmark, Policy
from cairn.sparsity.quest import QuestPolicy

if TYPE_CHECKING:
    from cairn.kernels.paged_extend import ExtendBlocks
    from cairn.kernels.sparse_select import CandidatePages
    from cairn.kernels.union_attention import UnionAttention


@dataclass(frozen=True, slots=True)
class DecodeRows:
    """Sequences with one new row."""

    rows: torch.Tensor  # [n] int32, their rows of the step; negative for none
    kv_lens: torch.Tensor  # [n] int32
    page_table: torch.Tensor  # [n, pages]
    kv_table: torch.Tensor  # [n, pages] of the pool
    generations: torch.Tensor  # [n, pages]
    alone: bool
    """They are the whole step: what they complete is sealed on the device."""
    resident: bool
    """All their pages are on the device, where pages live in host memory."""


@dataclass(frozen=True, slots=True)
class ChunkRows:
    """Sequences with more."""

    batch: AttentionBatch
    windows: ExtendBlocks
    selecting: ExtendBlocks
    reading: tuple[ExtendBlocks, ...]
    """Together they are all blocks; each reads no more pages than the stage holds."""
    candidates: CandidatePages
    dense_until: torch.Tensor  # [seqs] int32
    workspace: Workspace


@dataclass(frozen=True, slots=True)
class KernelMetadata:
    decode: DecodeRows | None
    chunks: ChunkRows | None
    completed: CompletedPages | None = None
    """Pages whose landmarks are saved in every layer, before anything is selected."""


class KernelSparse:
    def __init__(
        self,
        config: SparseConfig,
        shape: AttentionShape,
        pool: KVPool,
        landmarks: LandmarkPool,
        max_pages: int,
        swap: DeviceSwap | None = None,
    ) -> None:
        from cairn.kernels.sparse_scratch import Homes, SparseScratch
        from cairn.kernels.sparse_shape import SparseShape

        policy = config.policy
        assert policy is not None
        self._config = config
        self._policy = policy
        self._pool = pool
        self._landmarks = landmarks
        self._groups = SparseGroups.of(config, shape, pool)
        self._swap = swap
        self._dtype = shape.dtype
        self._pooling = _pooling(policy)
        self._shape = SparseShape(
            heads=shape.num_heads,
            kv_heads=shape.num_kv_heads,
            head_dim=shape.head_dim,
            page_size=shape.page_size,
            landmark_heads=policy.landmark_heads,
            landmark_width=policy.landmark_width,
            topk=config.topk,
            window=config.window,
            scale=shape.scale,
            strategy=config.strategy,
            by_lse=config.fusion == "lse",
            sinks=config.sinks,
            null_split=config.null_split,
            hide_last=config.landmark_rows,
            split_query=type(policy).map_query is QuestPolicy.map_query,
        )
        self._unions: UnionAttention | None = None
        """Attends to what chunk rows selected; without it `attend_selected` does."""
        self.notes: tuple[str, ...] = ()
        """What whoever starts an engine should know."""
        if shape.device.type == "cuda":
            unserved = self._load_unions(shape)
            if unserved is not None:
                note = f"hsa: Triton attends to pages of prompts, CUDA C++ cannot: {unserved}"
                self.notes = (note,)
        self._scratch = SparseScratch.empty(self._shape, shape.max_seqs, max_pages, shape.device)
        self._homes: Homes | None = None
        if swap is not None:
            table = torch.zeros(shape.max_seqs, max_pages, dtype=torch.int32, device=shape.device)
            self._homes = Homes(swap.frame_of, table, swap.resident_reads)
        self._every_row = torch.arange(shape.max_seqs, dtype=torch.int32, device=shape.device)

    def _load_unions(self, shape: AttentionShape) -> str | None:
        """Compile the kernel in CUDA C++, or load it; returns why that cannot be, if so."""
        from cairn.kernels.cuda_source import KernelUnavailableError
        from cairn.kernels.union_attention import UnionAttention, refusal

        if self._swap is not None:
            return "pages may lie in host memory"
        refused = refusal(self._shape, shape.dtype, shape.device)
        if refused is not None:
            return refused
        try:
            self._unions = UnionAttention(
                self._shape, shape.dtype, shape.device, has_bias=self._policy.has_bias
            )
        except KernelUnavailableError as error:
            return str(error)
        return None

    @staticmethod
    def refusal(config: SparseConfig, shape: AttentionShape) -> str | None:
        """Why the kernels cannot serve this model here; None if they can."""
        if shape.device.type != "cuda":
            return f"they are for CUDA devices, this is {shape.device.type}"
        missing = missing_module("triton", "triton")
        if missing is not None:
            return missing
        policy = config.policy
        assert policy is not None
        if type(policy).score is not Policy.score:
            return f"{type(policy).__name__} scores pages in its own way"
        width = policy.landmark_width
        for what, value, most in (
            ("page_size", shape.page_size, 128),
            ("head_dim", shape.head_dim, 128),
            ("landmark_width", width, 256),
        ):
            if not (16 <= value <= most and value & (value - 1) == 0):
                return f"{what} is {value}; they have powers of two from 16 to {most}"
        if config.topk > 128:
            return f"hsa_topk is {config.topk}; they have at most 128"
        if shape.dtype not in (torch.bfloat16, torch.float16, torch.float32):
            return f"the type is {str(shape.dtype).removeprefix('torch.')}"
        return None

    def rungs(self, max_seqs: int, max_pages: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """Numbers of sequences, and of pages of the longest, at which a step's kernels go on to
        another compiled form."""
        from cairn.kernels import sparse_decode, sparse_select, swap_in

        seqs = sparse_decode.seq_rungs(self._shape, max_seqs)
        if self._swap is not None:
            seqs += swap_in.seq_rungs(self._shape.topk)
        return seqs, sparse_select.page_rungs(self._shape, self._dtype, max_pages)

    @property
    def topk(self) -> int:
        return self._shape.topk

    @property
    def launches(self) -> int:
        """Sparse layers of decode steps the device has attended to so far."""
        return int(self._scratch.launches.item())

    def prepare(
        self, batch: AttentionBatch, chosen: np.ndarray, completed: CompletedPages | None
    ) -> KernelMetadata:
        """`chosen`: the sequences that are sparse; `completed`: all pages the step completes."""
        if batch.decodes and len(chosen) == batch.num_seqs:
            return self.prepare_decode(batch)
        single = batch.query_lens[chosen] == 1
        decode = self._decode_rows(batch, chosen[single]) if single.any() else None
        longer = chosen[~single]
        chunks = self._chunk_rows(batch, longer) if len(longer) else None
        return KernelMetadata(decode, chunks, completed)

    def prepare_decode(self, batch: AttentionBatch) -> KernelMetadata:
        """Of a step in which every sequence has one row, and is sparse."""
        tables = batch.groups[self._groups.ids]
        assert tables.generations is not None
        whole = DecodeRows(
            self._every_row[: batch.num_seqs],
            batch.device_kv_lens,
            tables.page_table,
            batch.groups[self._groups.kv].page_table,
            tables.generations,
            alone=True,
            resident=batch.resident,
        )
        return KernelMetadata(whole, None)

    def prepare_both(self, batch: AttentionBatch) -> tuple[KernelMetadata, torch.Tensor]:
        """Of a recorded step: sequences with one row that is not dense are found on the device.

        Also returns lengths for the dense backend, [seqs] int32, at which those see nothing else.
        """
        tables = batch.groups[self._groups.ids]
        assert tables.generations is not None
        config, kv_lens = self._config, batch.device_kv_lens
        query_lens = batch.device_cu_query.diff()
        until = batch.device_prompt_rows.clamp(max=config.dense_prompt_below)
        sparse = (query_lens == 1) & (kv_lens > until.clamp(min=config.dense_below))
        decode = DecodeRows(
            torch.where(sparse, batch.device_cu_query[:-1], -1),
            torch.where(sparse, kv_lens, 1),
            tables.page_table,
            batch.groups[self._groups.kv].page_table,
            tables.generations,
            alone=False,
            resident=False,
        )
        return KernelMetadata(decode, None), torch.where(sparse, query_lens, kv_lens)

    def _decode_rows(self, batch: AttentionBatch, seqs: np.ndarray) -> DecodeRows:
        tables = batch.groups[self._groups.ids]
        assert tables.generations is not None
        index = to_device(seqs, batch.device)
        return DecodeRows(
            batch.device_cu_query[index],
            batch.device_kv_lens[index],
            tables.page_table[index],
            batch.groups[self._groups.kv].page_table[index],
            tables.generations[index],
            alone=False,
            resident=batch.resident,
        )

    def _chunk_rows(self, batch: AttentionBatch, seqs: np.ndarray) -> ChunkRows:
        from cairn.kernels.paged_extend import ExtendBlocks
        from cairn.kernels.sparse_extend import union_rows
        from cairn.kernels.sparse_select import SELECT_ROWS

        until = self._config.dense_until(batch.prompt_rows)

        def blocks(rows: int, of: np.ndarray = seqs) -> ExtendBlocks:
            return ExtendBlocks.of(batch.query_lens, of, batch.device, rows)

        rows = union_rows(self._shape) if self._unions is None else self._unions.rows
        return ChunkRows(
            batch,
            blocks(64),
            blocks(SELECT_ROWS),
            tuple(blocks(rows, of) for of in self._staged_together(batch, seqs)),
            self._candidates(batch, seqs),
            to_device(until.astype(np.int32), batch.device),
            Workspace(batch.device),
        )

    def _candidates(self, batch: AttentionBatch, seqs: np.ndarray) -> CandidatePages:
        """The complete pages of these sequences, wherever their landmarks are their own."""
        from cairn.kernels.sparse_select import CandidatePages

        tables = batch.groups[self._groups.ids]
        counts = batch.kv_lens[seqs] // batch.page_size
        within = np.arange(counts.max(initial=0)) < counts[:, None]
        pages, lives = (
            to_device(table[seqs, : within.shape[1]][within].astype(np.int32), batch.device)
            for table in (tables.host_pages, tables.host_generations)
        )
        offsets = np.zeros(batch.num_seqs, np.int32)
        offsets[seqs] = np.cumsum(counts) - counts
        valid = self._landmarks.sealed[pages.long()] == lives
        return CandidatePages(
            torch.where(valid, pages, -1), to_device(offsets, batch.device), within.shape[1]
        )

    def _staged_together(self, batch: AttentionBatch, seqs: np.ndarray) -> list[np.ndarray]:
        """Cut sequences into runs whose pages, all of them selected, would fit in the stage."""
        if self._swap is None or batch.resident:
            return [seqs]
        pages = batch.kv_lens[seqs] // batch.page_size
        return fitting_runs(seqs, pages, len(self._swap.stage))

    def begin(self, metadata: KernelMetadata) -> None:
        if metadata.decode is None:
            return
        from cairn.kernels.sparse_scratch import begin

        decode = metadata.decode
        begin(
            self._scratch,
            decode.page_table,
            decode.generations,
            self._landmarks.sealed,
            decode.kv_lens,
            page_size=self._shape.page_size,
            seal=decode.alone,
            homes=self._homes if decode.resident else None,
        )

    def forward(
        self,
        layer: int,
        query: torch.Tensor,  # [rows, heads, dim]
        scoring: Scoring | None,
        metadata: KernelMetadata,
        out: torch.Tensor,  # [rows, heads, dim]; rows of sequences that are not sparse are left
    ) -> torch.Tensor | None:
        """Returns what chunk rows selected: places [rows, kv_heads, k], unset elsewhere."""
        scores_with = query if scoring is None else scoring.query
        prior = query if scoring is None else scoring.prior
        mapped = scores_with
        if not self._shape.split_query:
            mapped = self._policy.map_query(scores_with)
        selected = None
        if metadata.completed is not None:
            self._save(layer, prior, metadata.completed)
        if metadata.chunks is not None:
            selected = self._chunks(layer, query, mapped, prior, metadata.chunks, out)
        if metadata.decode is not None:
            self._decode(layer, query, mapped, prior, metadata.decode, out)
        return selected

    def selected(self, metadata: KernelMetadata, row: int) -> torch.Tensor | None:
        """What a decode row of the layer just computed selected, [kv_heads, k]."""
        decode = metadata.decode
        if decode is None:
            return None
        place = (decode.rows == row).nonzero()
        return self._scratch.selected[int(place[0, 0])] if len(place) else None

    def _decode(
        self,
        layer: int,
        query: torch.Tensor,
        mapped: torch.Tensor,
        prior: torch.Tensor,
        decode: DecodeRows,
        out: torch.Tensor,
    ) -> None:
        from cairn.kernels.sparse_decode import sparse_decode

        pooled_here = decode.alone and self._pooling is not None
        if decode.alone and self._pooling is None:
            self._save_completed(layer, prior, decode)
        sparse_decode(
            self._shape,
            self._scratch,
            query,
            mapped,
            prior,
            self._pool.layers[layer],
            self._landmarks.vectors[layer],
            self._landmarks.biases.get(layer),
            decode.page_table,
            decode.kv_lens,
            decode.rows,
            out,
            pooling=self._pooling if pooled_here else None,
            kv_table=decode.kv_table,
            locate=None
            if self._swap is None or decode.resident
            else partial(self._locate, layer, decode),
            homes=self._homes if decode.resident else None,
        )

    def _locate(self, layer: int, decode: DecodeRows, selected: torch.Tensor) -> Located:
        """Find the selected pages [seqs, kv_heads, k] on the device, or copy them there."""
        assert self._swap is not None
        return self._swap.locate(layer, selected, decode.page_table, decode.generations)

    def _save_completed(self, layer: int, prior: torch.Tensor, decode: DecodeRows) -> None:
        """Landmarks of a policy without a kernel: of every sequence's last page, and kept on the
        null page where that is not complete, so that nothing depends on lengths."""
        size = self._shape.page_size
        last = ((decode.kv_lens - 1) // size).long()
        page, kv_page = (
            torch.where(decode.kv_lens % size == 0, table.gather(1, last[:, None])[:, 0], 0).long()
            for table in (decode.page_table, decode.kv_table)
        )
        keys = self._pool.keys(layer)[kv_page]
        landmark = self._policy.landmark(keys, prior[decode.rows.long()])
        self._landmarks.save(layer, page, *landmark)

    def _chunks(
        self,
        layer: int,
        query: torch.Tensor,
        mapped: torch.Tensor,
        prior: torch.Tensor,
        chunks: ChunkRows,
        out: torch.Tensor,
    ) -> torch.Tensor:
        from cairn.kernels.paged_extend import paged_extend

        batch = chunks.batch
        lse = chunks.workspace.take("window_lse", *query.shape[:2])
        paged_extend(
            query,
            self._pool.layers[layer],
            batch.groups[self._groups.kv].page_table,
            batch.device_kv_lens,
            batch.device_cu_query,
            chunks.windows,
            out,
            scale=self._shape.scale,
            window=self._shape.window,
            hide_last=self._shape.hide_last,
            lse=lse,
            dense_until=chunks.dense_until,
        )
        selected, normalizer = self._select(layer, mapped, lse, chunks)
        for blocks in chunks.reading:
            self._attend_selected(
                layer, query, mapped, selected, normalizer, lse, chunks, blocks, out
            )
        return selected

    def _select(
        self, layer: int, mapped: torch.Tensor, lse: torch.Tensor, chunks: ChunkRows
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Places [rows, kv_heads, k] of the pages that chunk rows read, and heads' normalizers."""
        from cairn.kernels.sparse_select import select_pages

        batch = chunks.batch
        return select_pages(
            self._shape,
            mapped,
            self._landmarks.vectors[layer],
            self._landmarks.biases.get(layer),
            chunks.candidates,
            batch.device_kv_lens,
            batch.device_cu_query,
            chunks.dense_until,
            chunks.selecting,
            lse,
            chunks.workspace,
        )

    def _attend_selected(
        self,
        layer: int,
        query: torch.Tensor,
        mapped: torch.Tensor,
        selected: torch.Tensor,
        normalizer: torch.Tensor | None,
        lse: torch.Tensor,
        chunks: ChunkRows,
        blocks: ExtendBlocks,
        out: torch.Tensor,
    ) -> torch.Tensor:
        """Attend to the selected pages of some blocks; returns how many pages each block read."""
        from cairn.kernels.sparse_extend import attend_selected

        batch = chunks.batch
        given = (
            selected,
            query,
            mapped,
            self._pool.layers[layer],
            self._landmarks.vectors[layer],
            self._landmarks.biases.get(layer),
            batch.groups[self._groups.ids].page_table,
            batch.device_cu_query,
            blocks,
            out,
            lse,
        )
        if self._unions is not None:
            return self._unions(*given, normalizer, out)
        locate, stage = None, None
        if self._swap is not None and batch.resident:
            locate = self._swap.in_frames
        elif self._swap is not None:
            locate, stage = partial(self._swap.fill_stage, layer), self._swap.stage
        return attend_selected(
            self._shape,
            *given,
            out,
            chunks.workspace,
            normalizer=normalizer,
            locate=locate,
            stage=stage,
        )

    def save_all_layers(self, pages: np.ndarray, kv_pages: np.ndarray) -> None:
        """Landmarks of pages [n] whose rows are in the pool, where those take nothing but keys."""
        device = self._every_row.device
        ids, places = (to_device(own.astype(np.int64), device) for own in (pages, kv_pages))
        if self._pooling is None:
            for layer in self._config.layers:
                keys = self._pool.keys(layer)[places]
                self._landmarks.save(layer, ids, *self._policy.landmark(keys, None))
            return
        from cairn.kernels.landmark import pool_landmarks_of_layers

        first = self._config.layers[0]
        pool_landmarks_of_layers(
            ids,
            places,
            self._pool.layers[first],
            self._landmarks.vectors[first],
            *self._layer_shifts,
            pooling=self._pooling,
        )

    @cached_property
    def _layer_shifts(self) -> tuple[torch.Tensor, torch.Tensor]:
        """How far the layers' KV and landmarks are from those of the first layer."""
        from cairn.kernels.layer_memory import LayerMemory

        device, layers = self._every_row.device, self._config.layers
        kv = LayerMemory.of((self._pool.layers[layer] for layer in layers), device)
        vectors = LayerMemory.of((self._landmarks.vectors[layer] for layer in layers), device)
        return kv.shifts, vectors.shifts

    def _save(self, layer: int, prior: torch.Tensor, completed: CompletedPages) -> None:
        from cairn.kernels.landmark import pool_landmarks

        if self._pooling is not None:
            pool_landmarks(
                completed.pages,
                completed.kv_pages,
                completed.last_rows,
                self._pool.layers[layer],
                prior,
                self._landmarks.vectors[layer],
                self._landmarks.biases.get(layer),
                scale=self._shape.scale,
                pooling=self._pooling,
            )
            return
        keys = self._pool.keys(layer)[completed.kv_pages]
        landmark: Landmark = self._policy.landmark(keys, prior[completed.last_rows])
        self._landmarks.save(layer, completed.pages, *landmark)


def _pooling(policy: Policy) -> Pooling | None:
    """The kernel for this policy's landmarks, unless a subclass makes them in another way."""
    for kind in type(policy).__mro__:
        if "pooling" in vars(kind):
            return next((name for name in get_args(Pooling) if name == policy.pooling), None)
        if "landmark" in vars(kind):
            return None
    return None
