"""Cairn's own Triton kernels. Decode rows are split along the past, longer chunks into blocks of
rows. Keys and values of heads have kernels of their own, and so have latent rows."""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Protocol

import numpy as np
import torch

from cairn.attention.backend import (
    DENSE_GRAPHS,
    AttentionShape,
    DenseBackend,
    Graph,
    missing_module,
)
from cairn.attention.batch import AttentionBatch, to_device
from cairn.attention.latent import LatentHeads
from cairn.kernels.fp8_rows import is_narrow, spans_refusal, unpack_rows
from cairn.memory.kv_pool import KVPool
from cairn.memory.layout import LATENT

if TYPE_CHECKING:
    from cairn.kernels.paged_extend import ExtendBlocks


_EXPANDED = 2**29  # numbers of keys and values that are made at once, by heads
_MOST_LATENT, _MOST_ROPE = 512, 64  # columns of a latent row that fit into a program's memory


@dataclass(frozen=True, slots=True)
class _Metadata:
    decode_rows: torch.Tensor | None
    """[n] rows of sequences with one new row; None without any. If `batch.few`, [n + 1]: the first
    row of each sequence, and the end."""
    decode_lens: torch.Tensor  # [n] their lengths
    decode_tables: tuple[torch.Tensor, ...]  # per group, [n, pages]
    blocks: ExtendBlocks | None  # of the other sequences
    batch: AttentionBatch
    groups: Collection[int]


@dataclass(frozen=True, slots=True)
class _Forms:
    """Which rows of a step are read in which form (`attention/latent.py`). Steps that are recorded
    know no lengths; all their rows are read in absorbed form."""

    step: _Metadata
    expanded: tuple[int, ...]  # sequences
    others: torch.Tensor  # [n] rows of the other sequences
    absorbed: _Metadata  # of these rows


class _Kernels(Protocol):
    """The kernels of one cache layout."""

    rows_per_block: int
    """Rows of a sequence that a program of `extend` handles."""
    notes: tuple[str, ...]
    """Messages for the user about how they run."""

    def plan(self, group: int, metadata: _Metadata) -> None:
        """Plan the decode rows of a step."""

    def decode(
        self, layer: int, query: torch.Tensor, metadata: _Metadata, out: torch.Tensor
    ) -> None:
        """Attention of `decode_rows`."""

    def extend(
        self, layer: int, query: torch.Tensor, metadata: _Metadata, out: torch.Tensor
    ) -> None:
        """Attention of the rows in `blocks`."""


class _HeadKernels:
    """Of keys and values of heads."""

    notes: tuple[str, ...] = ()

    rows_per_block = 64

    def __init__(self, shape: AttentionShape, pool: KVPool) -> None:
        from cairn.kernels.paged_decode import DecodeSplits

        self._shape, self._pool = shape, pool
        self._most_rows = shape.most_rows if self.reads_few(shape) else 1
        self._splits = [
            DecodeSplits.empty(
                shape.max_seqs,
                shape.num_heads,
                shape.num_kv_heads,
                shape.head_dim,
                shape.device,
                shape.cache_dtype,
                self._most_rows,
            )
            for _ in shape.groups
        ]

    @staticmethod
    def reads_few(shape: AttentionShape) -> bool:
        """Whether a decode program has room for all rows of a sequence."""
        from cairn.kernels.paged_decode import MOST_TILE_ROWS

        heads = shape.num_heads // shape.num_kv_heads
        return 1 < shape.most_rows <= MOST_TILE_ROWS // heads

    def plan(self, group: int, metadata: _Metadata) -> None:
        from cairn.kernels.paged_decode import plan_splits

        plan_splits(
            self._splits[group],
            metadata.decode_lens,
            kv_heads=self._shape.num_kv_heads,
            page_size=self._shape.page_size,
            window=self._shape.groups[group].window,
            rows_per_seq=self._most_rows if metadata.batch.few else 1,
        )

    def decode(
        self, layer: int, query: torch.Tensor, metadata: _Metadata, out: torch.Tensor
    ) -> None:
        from cairn.kernels.paged_decode import paged_decode

        g = self._pool.group_of[layer]
        assert metadata.decode_rows is not None
        paged_decode(
            query,
            self._pool.part(layer),
            metadata.decode_tables[g],
            metadata.decode_lens,
            metadata.decode_rows,
            self._splits[g],
            out,
            scale=self._shape.scale,
            window=self._shape.groups[g].window,
            hide_last=self._shape.hides_landmark_rows,
            rows_per_seq=self._most_rows if metadata.batch.few else 1,
        )

    def extend(
        self, layer: int, query: torch.Tensor, metadata: _Metadata, out: torch.Tensor
    ) -> None:
        from cairn.kernels.paged_extend import paged_extend

        g = self._pool.group_of[layer]
        batch = metadata.batch
        assert metadata.blocks is not None
        paged_extend(
            query,
            self._pool.part(layer),
            batch.groups[g].page_table,
            batch.device_kv_lens,
            batch.device_cu_query,
            metadata.blocks,
            out,
            scale=self._shape.scale,
            window=self._shape.groups[g].window,
            hide_last=self._shape.hides_landmark_rows,
        )


class _LatentKernels:
    """Of latent rows."""

    notes: tuple[str, ...] = ()

    def __init__(self, shape: AttentionShape, pool: KVPool) -> None:
        from cairn.kernels.cuda_source import KernelUnavailableError
        from cairn.kernels.latent import LatentShares, latent_decode, rows_per_block
        from cairn.kernels.latent_decode import LatentDecode, refusal

        assert shape.value_dim is not None
        self._shape, self._pool = shape, pool
        self.rows_per_block = rows_per_block(shape.num_heads, shape.dtype)
        self._shares = [
            LatentShares.empty(
                shape.max_seqs, shape.num_heads, shape.value_dim, shape.dtype, shape.device
            )
            for _ in shape.groups
        ]
        self._decode: Callable[..., None] = latent_decode
        latent, rope = shape.value_dim, shape.head_dim - shape.value_dim
        size = shape.num_heads, latent, rope, shape.page_size, shape.dtype, shape.device
        if refusal(*size) is None and not is_narrow(shape.cache_dtype):
            try:
                self._decode = LatentDecode(
                    shape.num_heads, shape.page_size, shape.max_seqs, shape.dtype, shape.device
                )
            except KernelUnavailableError as error:
                self.notes = (f"latent decode runs in Triton, not in CUDA C++: {error}",)

    def plan(self, group: int, metadata: _Metadata) -> None:
        from cairn.kernels.latent import share_pages

        share_pages(self._shares[group], metadata.decode_lens, self._shape.page_size)

    def decode(
        self, layer: int, query: torch.Tensor, metadata: _Metadata, out: torch.Tensor
    ) -> None:
        g = self._pool.group_of[layer]
        assert metadata.decode_rows is not None
        self._decode(
            query,
            self._pool.part(layer, LATENT),
            metadata.decode_tables[g],
            metadata.decode_lens,
            metadata.decode_rows,
            self._shares[g],
            out,
            scale=self._shape.scale,
        )

    def extend(
        self, layer: int, query: torch.Tensor, metadata: _Metadata, out: torch.Tensor
    ) -> None:
        from cairn.kernels.latent import latent_extend

        batch = metadata.batch
        assert metadata.blocks is not None
        latent_extend(
            query,
            self._pool.part(layer, LATENT),
            batch.groups[self._pool.group_of[layer]].page_table,
            batch.device_kv_lens,
            batch.device_cu_query,
            metadata.blocks,
            out,
            scale=self._shape.scale,
        )


class TritonBackend(DenseBackend):
    name = "triton"
    dtypes = (torch.bfloat16, torch.float16, torch.float32)
    hides_rows = True
    reads_latents = True
    reads_8_bits = True
    reads_widened = True
    graphs: Collection[Graph] = DENSE_GRAPHS

    def __init__(self, shape: AttentionShape, pool: KVPool) -> None:
        super().__init__(shape, pool)
        if shape.value_dim is None and _HeadKernels.reads_few(shape):
            self.graphs = (*DENSE_GRAPHS, Graph("dense", mixed=False, few=True))
            # The output where sequences have few rows. Padding rows belong to no sequence, so
            # nobody writes them, and they must be numbers: `begin` clears them.
            size = shape.max_seqs * shape.most_rows, shape.num_heads, shape.head_dim
            self._few_out = torch.zeros(size, dtype=shape.dtype, device=shape.device)
        kernels = _HeadKernels if shape.value_dim is None else _LatentKernels
        self._kernels: _Kernels = kernels(shape, pool)
        self.notes = self._kernels.notes
        self._forms: _Forms | None = None  # of the step computed last
        self._every_row = torch.arange(shape.max_seqs, dtype=torch.int32, device=shape.device)

    @classmethod
    def unavailable_reason(cls, device: torch.device) -> str | None:
        if device.type != "cuda":
            return f"its kernels are for CUDA devices, this is {device.type}"
        return missing_module("triton", "triton")

    @classmethod
    def unsupported_reason(cls, shape: AttentionShape) -> str | None:
        if shape.value_dim is not None:
            if any(group.window is not None for group in shape.groups):
                return "it has no sliding windows over latent rows"
            rope = shape.head_dim - shape.value_dim
            if is_narrow(shape.cache_dtype) and (why := spans_refusal(shape.value_dim, rope)):
                return why
            if shape.value_dim > _MOST_LATENT or rope > _MOST_ROPE:
                return (
                    f"latent rows have {shape.value_dim} and {rope} columns; it has up to "
                    f"{_MOST_LATENT} and {_MOST_ROPE}"
                )
        return super().unsupported_reason(shape)

    def prepare(
        self,
        batch: AttentionBatch,
        groups: Collection[int] | None = None,
        *,
        chunks: np.ndarray | None = None,
    ) -> _Metadata:
        """`chunks` [n] are the sequences with several rows to compute; None for all of them."""
        from cairn.kernels.paged_extend import ExtendBlocks

        lens = batch.device_kv_lens
        tables = tuple(group.page_table for group in batch.groups)
        rows: torch.Tensor | None = None
        blocks: ExtendBlocks | None = None
        if batch.decodes:
            rows = self._every_row[: batch.num_seqs]
        elif batch.few:
            rows = batch.device_cu_query
        elif batch.recorded is not None:
            query_lens = batch.device_cu_query.diff()
            single = query_lens == 1
            rows, lens = batch.device_cu_query[:-1], torch.where(single, lens, 0)
            if chunks is None:
                new = query_lens.masked_fill(single, 0)
                blocks = ExtendBlocks.on_device(new, batch.num_rows, self._kernels.rows_per_block)
        else:
            if chunks is None:
                chunks = np.flatnonzero(batch.query_lens > 1)
            if len(chunks):
                size = self._kernels.rows_per_block
                blocks = ExtendBlocks.of(batch.query_lens, chunks, batch.device, size)
            decoding = np.flatnonzero(batch.query_lens == 1)
            if len(decoding):
                index = to_device(decoding, batch.device)
                rows, lens = batch.device_cu_query[index], lens[index]
                tables = tuple(table[index] for table in tables)
        if groups is None:
            groups = range(len(batch.groups))
        return _Metadata(rows, lens, tables, blocks, batch, groups)

    def begin(self, metadata: _Metadata) -> None:
        if metadata.batch.few:
            self._few_out[: metadata.batch.num_rows].zero_()
        if metadata.decode_rows is not None:
            for g in metadata.groups:
                self._kernels.plan(g, metadata)

    def attend(
        self,
        layer: int,
        query: torch.Tensor,
        metadata: _Metadata,
        out: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """With `out`, only the rows of `metadata` are written."""
        if out is None:
            width = self._shape.value_dim or query.shape[2]
            if metadata.batch.few:
                out = self._few_out[: len(query)]
            else:
                out = query.new_empty(*query.shape[:2], width)
        if metadata.decode_rows is not None:
            self._kernels.decode(layer, query, metadata, out)
        if metadata.blocks is not None:
            self._kernels.extend(layer, query, metadata, out)
        return out

    def forward_latent(
        self, layer: int, query: torch.Tensor, heads: LatentHeads, metadata: _Metadata
    ) -> torch.Tensor:
        forms = None
        if metadata.blocks is not None and metadata.batch.recorded is None:
            forms = self._forms_of(query, heads, metadata)
        if forms is None or not forms.expanded:
            return super().forward_latent(layer, query, heads, metadata)
        rows, num_heads, _ = query.shape
        out = query.new_empty(rows, num_heads, heads.value.shape[2])
        if len(forms.others):
            absorbed = query.new_empty(rows, num_heads, self._shape.head_dim)
            absorbed[forms.others] = heads.absorb(query[forms.others])
            read = self.attend(layer, absorbed, forms.absorbed)
            out[forms.others] = heads.values(read[forms.others])
        batch = metadata.batch
        for seq in forms.expanded:
            own = slice(int(batch.cu_query[seq]), int(batch.cu_query[seq + 1]))
            self._expand(layer, seq, query[own], heads, batch, out[own])
        return out

    def _expand(
        self,
        layer: int,
        seq: int,
        query: torch.Tensor,
        heads: LatentHeads,
        batch: AttentionBatch,
        out: torch.Tensor,
    ) -> None:
        """Attention of one sequence's new rows over keys and values of each head."""
        from cairn.kernels.latent_prompt import latent_prompt

        length = int(batch.kv_lens[seq])
        table = batch.groups[self._pool.group_of[layer]].page_table
        pages = table[seq, : -(-length // batch.page_size)]
        kept = self._pool.part(layer, LATENT).index_select(0, pages).flatten(0, 1)[:length]
        kept = unpack_rows(kept, self._shape.head_dim, query.dtype)
        width = heads.key.shape[1] + heads.value.shape[2]
        at_once = max(1, _EXPANDED // (length * width))
        for first in range(0, query.shape[1], at_once):
            own = slice(first, first + at_once)
            keys, values = heads.expand_rows(kept, own)
            ropes = kept[:, heads.latent :]
            scale = self._shape.scale
            latent_prompt(query[:, own], keys, ropes, values, out[:, own], scale=scale)

    def _forms_of(self, query: torch.Tensor, heads: LatentHeads, metadata: _Metadata) -> _Forms:
        """The same for all layers of a step."""
        if self._forms is not None and self._forms.step is metadata:
            return self._forms
        from cairn.kernels.paged_extend import ExtendBlocks

        batch = metadata.batch
        counts = batch.query_lens.tolist()
        expands = np.array([n > 1 and heads.expanding_pays(query[:n]) for n in counts])
        chunks = np.flatnonzero((batch.query_lens > 1) & ~expands)
        blocks = None
        if len(chunks):
            size = self._kernels.rows_per_block
            blocks = ExtendBlocks.of(batch.query_lens, chunks, batch.device, size)
        self._forms = _Forms(
            metadata,
            tuple(np.flatnonzero(expands).tolist()),
            to_device(np.flatnonzero(~expands.repeat(batch.query_lens)), batch.device),
            replace(metadata, blocks=blocks),
        )
        return self._forms
