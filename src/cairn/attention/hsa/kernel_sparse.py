"""Sparse attention by Triton kernels: computes the same as `torch_sparse`, and can be recorded.

Sequences with one new row take three launches per layer. Longer chunks take a window pass, the
selection, and a pass over the union of the pages that neighbouring rows selected.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

import numpy as np
import torch

from cairn.attention.backend import AttentionShape, missing_module
from cairn.attention.batch import AttentionBatch, Scoring, to_device
from cairn.attention.hsa.chunk_rows import ChunkPlanner, ChunkRows
from cairn.attention.hsa.landmark_maker import LandmarkMaker
from cairn.attention.hsa.metadata import CompletedPages, SparseGroups, completed_on_device
from cairn.kernels.fp8_rows import is_narrow
from cairn.kernels.interface import Located
from cairn.memory.device_swap import DeviceSwap
from cairn.memory.kv_pool import KVPool
from cairn.memory.landmarks import LandmarkPool
from cairn.sparsity.config import SparseConfig
from cairn.sparsity.policy import Policy
from cairn.sparsity.quest import QuestPolicy
from cairn.sparsity.spread import SpreadPolicy

if TYPE_CHECKING:
    from cairn.kernels.paged_extend import ExtendBlocks
    from cairn.kernels.union_attention import UnionAttention

_SPLITS: Mapping[Any, Literal["signs", "squares"]] = {
    QuestPolicy.map_query: "signs",
    SpreadPolicy.map_query: "squares",
}
"""What kernels do themselves instead of a policy's `map_query`."""


@dataclass(frozen=True, slots=True)
class DecodeRows:
    """Sequences with one new row."""

    rows: torch.Tensor  # [n] int32, row of the step; negative to skip the sequence
    kv_lens: torch.Tensor  # [n] int32
    page_table: torch.Tensor  # [n, pages]
    kv_table: torch.Tensor  # [n, pages] pages of the pool
    generations: torch.Tensor  # [n, pages]
    alone: bool
    """The step has no other rows. The kernels then seal the pages that these rows complete."""
    resident: bool
    """See `AttentionBatch.resident`."""


class LayerRows(NamedTuple):
    """The rows of a layer, each tensor [rows, heads, ...]."""

    layer: int
    query: torch.Tensor
    mapped: torch.Tensor  # query to score landmarks with
    prior: torch.Tensor | None  # query to pool landmarks with; None if keys are enough
    out: torch.Tensor


@dataclass(slots=True)
class KeptPages:
    """Sequences with one new row, which read the pages that were selected before and their window,
    as sequences of these pages alone."""

    batch: AttentionBatch
    tables: torch.Tensor  # [layers, seqs, kv_heads, pages], made by `begin`
    kv_lens: torch.Tensor  # [seqs]


@dataclass(frozen=True, slots=True)
class KernelMetadata:
    decode: DecodeRows | None
    chunks: ChunkRows | None
    completed: CompletedPages | None = None
    """Pages whose landmarks every layer saves before it selects pages. If no row of the step does,
    the last layer saves them for all layers, where keys are all that landmarks need."""
    kept: KeptPages | None = None

    @property
    def has_rows(self) -> bool:
        return not (self.decode is None and self.chunks is None and self.kept is None)


class KernelSparse:
    def __init__(
        self,
        config: SparseConfig,
        shape: AttentionShape,
        pool: KVPool,
        landmarks: LandmarkPool,
        maker: LandmarkMaker,
        max_pages: int,
        swap: DeviceSwap | None = None,
        *,
        drafts: bool = False,
    ) -> None:
        """With `drafts`, the pages that a step selects are kept for drafts after it."""
        from cairn.kernels.sparse_extend import union_rows
        from cairn.kernels.sparse_scratch import ResidentFrames, SparseScratch
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
        self._maker = maker
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
            split_query=_SPLITS.get(type(policy).map_query),
            reach=policy.reach,
        )
        self._unions: UnionAttention | None = None
        """CUDA C++ kernel for the selected pages of chunks; if None, `attend_selected` runs."""
        self.notes: tuple[str, ...] = ()
        """Messages for the user about how it runs."""
        if shape.device.type == "cuda":
            unserved = self._load_unions(shape)
            if unserved is not None:
                note = f"hsa: Triton attends to pages of prompts, CUDA C++ cannot: {unserved}"
                self.notes = (note,)
        self.chunks = ChunkPlanner(
            config,
            self._shape,
            shape.dtype,
            landmarks,
            self._groups,
            union_rows(self._shape) if self._unions is None else self._unions.rows,
            swap,
        )
        self._scratch = SparseScratch.empty(self._shape, shape.max_seqs, max_pages, shape.device)
        self._frames: ResidentFrames | None = None
        if swap is not None:
            table = torch.zeros(shape.max_seqs, max_pages, dtype=torch.int32, device=shape.device)
            self._frames = ResidentFrames(swap.frame_of, table, swap.resident_reads)
        self._every_row = torch.arange(shape.max_seqs, dtype=torch.int32, device=shape.device)
        self._kept: torch.Tensor | None = None  # [layers, seqs, kv_heads, k] places, -1 for none
        if drafts:
            from cairn.kernels.paged_decode import DecodeSplits

            size = (len(config.layers), *self._scratch.selected.shape)
            self._kept = torch.zeros(size, dtype=torch.int32, device=shape.device)
            self._kept_from = torch.zeros_like(self._every_row)  # [seqs] page of the window then
            heads = shape.num_heads, shape.num_kv_heads, shape.head_dim
            own = shape.device, shape.cache_dtype
            self._splits = DecodeSplits.empty(shape.max_seqs, *heads, *own)

    def _load_unions(self, shape: AttentionShape) -> str | None:
        """Compile or load the CUDA C++ kernel; returns why it is not available, else None."""
        from cairn.kernels.cuda_source import KernelUnavailableError
        from cairn.kernels.union_attention import UnionAttention, refusal

        if self._swap is not None:
            return "pages may lie in host memory"
        if is_narrow(shape.cache_dtype):
            return "rows of the cache have 8 bits"
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
        if policy.observed:
            return f"{type(policy).__name__} looks back at the prompt"
        if config.units > 1:
            return f"pages have {config.units} units, and they read whole pages"
        by_lse = config.fusion == "lse"
        if policy.reach and not by_lse:
            return f"{type(policy).__name__} has deviations, which they add with hsa_fusion=lse"
        # Queries of 16 bits read rows of 8 bits as two products of half the columns.
        halves = is_narrow(shape.cache_dtype) and shape.dtype.itemsize == 2
        for what, value, least, most in (
            ("page_size", shape.page_size, 8 if by_lse else 16, 128),
            ("head_dim", shape.head_dim, 32 if halves else 16, 128),
            ("landmark_width", policy.landmark_width, 16, 256),
        ):
            if not (least <= value <= most and value & (value - 1) == 0):
                return f"{what} is {value}; they have powers of two from {least} to {most}"
        if config.top_p is not None or config.budgets is not None:
            return "they read equally many pages in every row and layer"
        if config.topk > 128:
            return f"hsa_topk is {config.topk}; they have at most 128"
        if shape.dtype not in (torch.bfloat16, torch.float16, torch.float32):
            return f"the type is {str(shape.dtype).removeprefix('torch.')}"
        return None

    def rungs(self, max_seqs: int, max_pages: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """See `SparseBackend.rungs`."""
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
        """Number of sparse decode layers that the device has computed so far."""
        return int(self._scratch.launches.item())

    def prepare(
        self, batch: AttentionBatch, chosen: np.ndarray, completed: CompletedPages | None
    ) -> KernelMetadata:
        """Metadata of a step; `chosen` are the sparse sequences, `completed` all pages that the
        step completes."""
        if batch.decodes and len(chosen) == batch.num_seqs:
            return self.prepare_decode(batch)
        single = batch.query_lens[chosen] == 1
        decode = None
        if single.any():
            seqs = to_device(chosen[single], batch.device)
            rows, kv_lens = batch.device_cu_query[seqs], batch.device_kv_lens[seqs]
            decode = self._decode_rows(batch, rows, kv_lens, seqs, resident=batch.resident)
        longer = chosen[~single]
        chunks = self.chunks.of(batch, longer) if len(longer) else None
        return KernelMetadata(decode, chunks, completed)

    def prepare_decode(self, batch: AttentionBatch) -> KernelMetadata:
        """Metadata of a step in which every sequence is sparse and has one new row."""
        rows = self._every_row[: batch.num_seqs]
        whole = self._decode_rows(
            batch, rows, batch.device_kv_lens, alone=True, resident=batch.resident
        )
        return KernelMetadata(whole, None)

    def prepare_kept(self, batch: AttentionBatch) -> KernelMetadata:
        """Metadata of a step in which every sequence reads pages that were selected before."""
        kept = KeptPages(batch, self._every_row, batch.device_kv_lens)
        return KernelMetadata(None, None, kept=kept)

    def _begin_kept(self, kept: KeptPages) -> None:
        """Make a page table of each layer and kv head: selected pages, then those of the window."""
        from cairn.kernels.kept_pages import kept_tables
        from cairn.kernels.paged_decode import plan_splits

        assert self._kept is not None
        size, count, batch = self._shape.page_size, self._shape.topk, kept.batch
        # Enough for the window and a page of rows since then, rounded up so that the tables of
        # layers are aligned to 16 bytes.
        pages = -(-(count + self._shape.window // size + 3) // 4) * 4
        kept.tables, kept.kv_lens = kept_tables(
            self._kept,
            self._kept_from,
            batch.groups[self._groups.kv].page_table,
            batch.device_kv_lens,
            pages=pages,
            page_size=size,
        )
        heads = self._shape.kv_heads
        plan_splits(self._splits, kept.kv_lens, kv_heads=heads, page_size=size, window=None)

    def _read_kept(self, own: LayerRows, kept: KeptPages) -> None:
        from cairn.kernels.paged_decode import paged_decode

        paged_decode(
            own.query,
            self._pool.part(own.layer),
            kept.tables[self._config.layers.index(own.layer)],
            kept.kv_lens,
            self._every_row[: len(kept.kv_lens)],
            self._splits,
            own.out,
            scale=self._shape.scale,
        )

    def prepare_both(self, batch: AttentionBatch) -> tuple[KernelMetadata, torch.Tensor]:
        """Metadata of a recorded step that finds its sparse sequences on the device: those with one
        new row that is not dense.

        Also returns the lengths for the dense backend, [seqs] int32, which give the sparse
        sequences an empty past.
        """
        config, kv_lens = self._config, batch.device_kv_lens
        query_lens = batch.device_cu_query.diff()
        until = batch.device_prompt_rows.clamp(max=config.dense_prompt_below)
        sparse = (query_lens == 1) & (kv_lens > until.clamp(min=config.dense_below))
        rows = torch.where(sparse, batch.device_cu_query[:-1], -1)
        decode = self._decode_rows(batch, rows, torch.where(sparse, kv_lens, 1))
        return KernelMetadata(decode, None), torch.where(sparse, query_lens, kv_lens)

    def prepare_mixed(self, batch: AttentionBatch) -> KernelMetadata:
        """Metadata of a recorded step without dense rows. Sequences may have any number of new
        rows, which only the device knows; those with several fit `ChunkPlanner.on_device`."""
        singles, _ = self.prepare_both(batch)
        completed = completed_on_device(batch, self._groups)
        return replace(singles, chunks=self.chunks.on_device(batch), completed=completed)

    def _decode_rows(
        self,
        batch: AttentionBatch,
        rows: torch.Tensor,
        kv_lens: torch.Tensor,
        seqs: torch.Tensor | None = None,
        *,
        alone: bool = False,
        resident: bool = False,
    ) -> DecodeRows:
        """`seqs` [n] are the sequences of these rows; None for all sequences of the batch."""
        own, kv = batch.groups[self._groups.selected], batch.groups[self._groups.kv]
        assert own.generations is not None
        pages, kv_pages, lives = own.page_table, kv.page_table, own.generations
        if seqs is not None:
            pages, kv_pages, lives = pages[seqs], kv_pages[seqs], lives[seqs]
        return DecodeRows(rows, kv_lens, pages, kv_pages, lives, alone, resident)

    def begin(self, metadata: KernelMetadata) -> None:
        if metadata.kept is not None:
            self._begin_kept(metadata.kept)
        if metadata.decode is None:
            return
        from cairn.kernels.sparse_scratch import begin

        decode = metadata.decode
        if self._kept is not None:
            first = (decode.kv_lens - self._shape.window).clamp(min=0) // self._shape.page_size
            self._kept_from[: len(first)].copy_(first)
        begin(
            self._scratch,
            decode.page_table,
            decode.generations,
            self._landmarks.sealed,
            decode.kv_lens,
            page_size=self._shape.page_size,
            seal=decode.alone,
            frames=self._frames if decode.resident else None,
        )

    def forward(
        self,
        layer: int,
        query: torch.Tensor,  # [rows, heads, dim]
        scoring: Scoring | None,
        metadata: KernelMetadata,
        out: torch.Tensor,  # [rows, heads, dim]; rows of other sequences are kept
    ) -> torch.Tensor | None:
        """Write the output of sparse rows to `out`. Returns the pages that chunk rows selected, as
        places in the sequence [rows, kv_heads, k]; other rows are unset."""
        self.save(layer, query, scoring, metadata)
        if not metadata.has_rows:
            return None
        mapped = query if scoring is None else scoring.query
        if self._shape.split_query is None:
            mapped = self._policy.map_query(mapped)
        own = LayerRows(layer, query, mapped, None if scoring is None else scoring.prior, out)
        selected = None
        if metadata.chunks is not None:
            selected = self._chunks(own, metadata.chunks)
        if metadata.decode is not None:
            self._decode(own, metadata.decode)
        if metadata.kept is not None:
            self._read_kept(own, metadata.kept)
        return selected

    def selected(
        self, metadata: KernelMetadata, rows: tuple[int, ...], of_chunks: torch.Tensor | None
    ) -> torch.Tensor:
        """What the one traced row of a tile selected in the layer that was computed last,
        [1, kv_heads, k]; `of_chunks` is the result of `forward`."""
        (row,) = rows
        if metadata.decode is not None:
            place = (metadata.decode.rows == row).nonzero()
            if len(place):
                return self._scratch.selected[place[0]].long()
        assert of_chunks is not None
        return of_chunks[row : row + 1].long()

    def _decode(self, own: LayerRows, decode: DecodeRows) -> None:
        from cairn.kernels.sparse_decode import sparse_decode

        if decode.alone and self._maker.pooling is None:
            self._save_last_pages(own, decode)
        searches = self._swap is not None and not decode.resident
        sparse_decode(
            self._shape,
            self._scratch,
            *(own.query, own.mapped, own.query if own.prior is None else own.prior),
            self._pool.part(own.layer),
            *self._landmarks.of_layer(own.layer),
            *(decode.page_table, decode.kv_lens, decode.rows),
            own.out,
            pooling=self._maker.pooling if decode.alone else None,
            kv_table=decode.kv_table,
            locate=partial(self._locate, own.layer, decode) if searches else None,
            frames=self._frames if decode.resident else None,
        )
        if self._kept is not None:
            chosen = self._scratch.selected[: len(decode.rows)]
            self._kept[self._config.layers.index(own.layer), : len(chosen)].copy_(chosen)

    def _locate(self, layer: int, decode: DecodeRows, selected: torch.Tensor) -> Located:
        """Find the selected pages [seqs, kv_heads, k] on the device, or copy them there."""
        assert self._swap is not None
        return self._swap.locate(layer, selected, decode.page_table, decode.generations)

    def _chunks(self, own: LayerRows, chunks: ChunkRows) -> torch.Tensor:
        from cairn.kernels.paged_extend import paged_extend

        batch = chunks.batch
        lse = chunks.workspace.take("window_lse", *own.query.shape[:2])
        paged_extend(
            own.query,
            self._pool.part(own.layer),
            batch.groups[self._groups.kv].page_table,
            batch.device_kv_lens,
            batch.device_cu_query,
            chunks.windows,
            own.out,
            scale=self._shape.scale,
            window=self._shape.window,
            hide_last=self._shape.hide_last,
            lse=lse,
            dense_until=chunks.dense_until,
        )
        selected, normalizer = self._select(own, lse, chunks)
        for blocks in chunks.reading:
            self._attend_selected(own, selected, normalizer, lse, chunks, blocks)
        return selected

    def _select(
        self, own: LayerRows, lse: torch.Tensor, chunks: ChunkRows
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Places [rows, kv_heads, k] of the pages that chunk rows select, and the normalizers of
        the heads."""
        from cairn.kernels.sparse_select import select_pages

        return select_pages(
            self._shape,
            own.mapped,
            *self._landmarks.of_layer(own.layer),
            chunks.candidates,
            chunks.batch.device_kv_lens,
            chunks.batch.device_cu_query,
            chunks.dense_until,
            chunks.selecting,
            lse,
            chunks.workspace,
        )

    def _attend_selected(
        self,
        own: LayerRows,
        selected: torch.Tensor,
        normalizer: torch.Tensor | None,
        lse: torch.Tensor,
        chunks: ChunkRows,
        blocks: ExtendBlocks,
    ) -> torch.Tensor:
        """Attend to the selected pages of some blocks; returns the number of pages per block."""
        from cairn.kernels.sparse_extend import attend_selected

        batch, swap = chunks.batch, self._swap
        given = (
            *(selected, own.query, own.mapped),
            self._pool.part(own.layer),
            *self._landmarks.of_layer(own.layer),
            batch.groups[self._groups.selected].page_table,
            batch.device_cu_query,
            *(blocks, own.out, lse),
        )
        if self._unions is not None:
            return self._unions(*given, normalizer, own.out)
        locate, stage = None, None
        if swap is not None and batch.resident:
            locate = swap.in_frames
        elif swap is not None:
            locate, stage = partial(swap.fill_stage, own.layer), swap.stage
        return attend_selected(
            self._shape,
            *given,
            own.out,
            chunks.workspace,
            normalizer=normalizer,
            locate=locate,
            stage=stage,
        )

    # -- landmarks ----------------------------------------------------------------------------

    def save(
        self, layer: int, query: torch.Tensor, scoring: Scoring | None, metadata: KernelMetadata
    ) -> None:
        """Save the landmarks of pages that the step completes, except for those of single rows."""
        if metadata.completed is None:
            return
        if self._config.reads_densely and self._swap is None and not metadata.has_rows:
            if layer == self._config.layers[-1]:
                self._maker.of_all_layers(*metadata.completed[:2])
            return
        self._maker.of_layer(layer, metadata.completed, query, scoring)

    def _save_last_pages(self, own: LayerRows, decode: DecodeRows) -> None:
        """Save the landmark of every sequence's last page. Landmarks of incomplete pages go to the
        null page, so that no shape depends on lengths."""
        size = self._shape.page_size
        last = ((decode.kv_lens - 1) // size).long()
        page, kv_page = (
            torch.where(decode.kv_lens % size == 0, table.gather(1, last[:, None])[:, 0], 0).long()
            for table in (decode.page_table, decode.kv_table)
        )
        prior = None if own.prior is None else own.prior[decode.rows.long()]
        self._maker.by_policy(own.layer, page, kv_page, prior)
