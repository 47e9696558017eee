"""Attention in plain torch, on any device. The reference for every faster backend.

Single new rows (decode) are batched with those of other sequences that read the same number of
pages. Longer chunks of new rows are computed one sequence and one block of queries at a time.
Either way each layer copies exactly the pages that are read, once. Unwritten rows may hold NaN, so
a page that a step begins and does not fill is cleared first.

A latent row is the key and the value of all heads. The output is cut to the columns that a head
reads: torch's fused attention takes keys and values of one size only.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
import torch.nn.functional as F

from cairn.attention.backend import DenseBackend, Replayable
from cairn.attention.batch import AttentionBatch, to_device
from cairn.attention.clearing import clear_begun_pages
from cairn.attention.fused import attention
from cairn.attention.latent import LatentHeads
from cairn.kernels.cpu import HEAD_DIMS
from cairn.kernels.fp8_rows import unpack_rows, widen
from cairn.memory.groups import LayerGroup
from cairn.memory.layout import KV, LATENT

_QUERY_BLOCK = 128  # bounds the mask and the masked keys that a causal block reads
_EXPANDED = 2**25  # numbers of keys and values that are expanded at once, by heads


@dataclass(frozen=True, slots=True)
class _Peers:
    """Decoding sequences that read the same number of pages."""

    seqs: int
    pages: int
    mask: torch.Tensor | None  # [seqs, 1, 1, keys] 0 or -inf; None if every key is visible


class _Spans(NamedTuple):
    """What each decoding sequence reads, for the kernel that reads pages in place."""

    table: torch.Tensor  # [seqs, max_pages] int32
    first: torch.Tensor  # [seqs] int64, first row
    last: torch.Tensor  # [seqs] int64, end of the rows


@dataclass(frozen=True, slots=True)
class _Decode:
    """All decoding sequences of a step, with peers next to each other. Without peers, `spans`."""

    rows: torch.Tensor  # [seqs] row of each in the step
    places: torch.Tensor  # [seqs] index of each among the step's decoding sequences
    slices: torch.Tensor  # [sum of seqs * heads of a page * pages] (page, head) slices of the pool
    peers: tuple[_Peers, ...]
    spans: _Spans | None = None


@dataclass(frozen=True, slots=True)
class _Block:
    """Consecutive queries of a chunk, and the keys they can see."""

    rows: slice  # of the step
    keys: slice  # of the chunk's keys
    mask: torch.Tensor  # [queries, keys] True where visible


@dataclass(frozen=True, slots=True)
class _Chunk:
    """All new rows of a sequence with several new rows."""

    slices: torch.Tensor  # [heads of a page * pages] from the first page that a query reads
    num_keys: int  # keys from the first row of the first page to the last query
    blocks: tuple[_Block, ...]

    @property
    def rows(self) -> slice:
        return slice(self.blocks[0].rows.start, self.blocks[-1].rows.stop)


@dataclass(frozen=True, slots=True)
class _GroupMetadata:
    decode: _Decode | None
    chunks: tuple[_Chunk, ...]


class TorchBackend(DenseBackend):
    name = "torch"
    dtypes = (torch.float32, torch.float64, torch.bfloat16, torch.float16)
    hides_rows = True
    serves_mixed_layers = True
    reads_latents = True
    reads_8_bits = True

    # -- once per step ------------------------------------------------------------------------

    def prepare(
        self, batch: AttentionBatch, groups: Collection[int] | None = None
    ) -> list[_GroupMetadata]:
        clear_begun_pages(self._pool, batch)
        decoding = np.flatnonzero(batch.query_lens == 1)
        chunks = np.flatnonzero(batch.query_lens > 1)
        return [
            _GroupMetadata(
                decode=self._decode_rows(batch, g, group, decoding) if len(decoding) else None,
                chunks=tuple(self._chunk(batch, g, group, int(s)) for s in chunks),
            )
            if groups is None or g in groups
            else _GroupMetadata(None, ())
            for g, group in enumerate(self._shape.groups)
        ]

    def replayable(self, metadata: list[_GroupMetadata]) -> Replayable | None:
        inputs: list[torch.Tensor] = []
        for group in metadata:
            if group.chunks or (group.decode is not None and group.decode.spans is None):
                return None
            inputs += () if group.decode is None else group.decode.spans or ()
        return Replayable(inputs, metadata, _nothing)

    def _decode_rows(
        self, batch: AttentionBatch, g: int, group: LayerGroup, seqs: np.ndarray
    ) -> _Decode:
        size, table, device = batch.page_size, batch.groups[g].page_table, batch.device
        kv_lens = batch.kv_lens[seqs]
        first_keys = np.zeros_like(kv_lens)
        if group.window is not None:
            first_keys = np.maximum(0, kv_lens - group.window)
        if self._in_place:
            own = to_device(seqs, device)
            tables = table if len(seqs) == len(table) else table[own]
            spans = _Spans(tables, to_device(first_keys, device), to_device(kv_lens, device))
            return _Decode(to_device(batch.cu_query[seqs], device), own, own, (), spans)
        first_pages = first_keys // size
        counts = -(-kv_lens // size) - first_pages  # pages each sequence reads
        order = np.argsort(counts, kind="stable")
        peers, slices = [], []
        for count in np.unique(counts):
            which = order[counts[order] == count]
            index = first_pages[which, None] + np.arange(count)  # [seqs, pages]
            rows = first_pages[which, None] * size + np.arange(count * size)  # [seqs, keys]
            hidden = (rows < first_keys[which, None]) | (rows >= kv_lens[which, None])
            if self._shape.hides_landmark_rows:
                hidden |= rows % size == size - 1
            owners, places = to_device(seqs[which, None], device), to_device(index, device)
            mask = None
            if hidden.any():
                mask = torch.zeros(hidden.shape, dtype=self._shape.dtype, device=device)
                mask.masked_fill_(to_device(hidden, device), float("-inf"))
                mask = mask[:, None, None, :]
            slices.append(_slices(group, table[owners, places].long()))
            peers.append(_Peers(len(which), int(count), mask))
        return _Decode(
            rows=to_device(batch.cu_query[seqs[order]], device),
            places=to_device(np.argsort(order), device),
            slices=torch.cat(slices),
            peers=tuple(peers),
        )

    def _chunk(self, batch: AttentionBatch, g: int, group: LayerGroup, s: int) -> _Chunk:
        size, device = batch.page_size, batch.device
        kv_len, query_len = int(batch.kv_lens[s]), int(batch.query_lens[s])
        base, past = int(batch.cu_query[s]), kv_len - query_len
        first_page = group.first_reachable_page(past, size)
        origin = first_page * size
        blocks = []
        for begin in range(0, query_len, _QUERY_BLOCK):
            end = min(begin + _QUERY_BLOCK, query_len)
            first_key = group.first_reachable_page(past + begin, size) * size
            queries = torch.arange(past + begin, past + end, device=device)[:, None]
            keys = torch.arange(first_key, past + end, device=device)[None, :]
            mask = keys <= queries
            if group.window is not None:
                mask &= keys > queries - group.window
            if self._shape.hides_landmark_rows:
                mask &= keys % size != size - 1
            visible = slice(first_key - origin, past + end - origin)
            blocks.append(_Block(slice(base + begin, base + end), visible, mask))
        pages = batch.groups[g].page_table[s, first_page : -(-kv_len // size)]
        return _Chunk(_slices(group, pages.long()), kv_len - origin, tuple(blocks))

    # -- once per layer -----------------------------------------------------------------------

    def attend(
        self, layer: int, query: torch.Tensor, metadata: list[_GroupMetadata]
    ) -> torch.Tensor:
        group = metadata[self._pool.group_of[layer]]
        decode = group.decode
        if decode is not None and not group.chunks:
            if len(decode.peers) <= 1:
                return self._decode(layer, query, decode)
            return self._decode(layer, query[decode.rows], decode)[decode.places]
        out = query.new_empty(*query.shape[:2], self._value_dim(query))
        if decode is not None:
            out[decode.rows] = self._decode(layer, query[decode.rows], decode)
        for chunk in group.chunks:
            out[chunk.rows] = self._chunk_rows(layer, query[chunk.rows], chunk)
        return out

    def forward_latent(
        self,
        layer: int,
        query: torch.Tensor,
        heads: LatentHeads,
        metadata: list[_GroupMetadata],
    ) -> torch.Tensor:
        group = metadata[self._pool.group_of[layer]]
        pays = [heads.expanding_pays(query[chunk.rows]) for chunk in group.chunks]
        if not any(pays):
            return super().forward_latent(layer, query, heads, metadata)
        out = query.new_empty(*query.shape[:2], heads.value.shape[2])
        if group.decode is not None:
            own = heads.absorb(query[group.decode.rows])
            out[group.decode.rows] = heads.values(self._decode(layer, own, group.decode))
        for chunk, expanded in zip(group.chunks, pays, strict=True):
            own = query[chunk.rows]
            if expanded:
                self._expanded(layer, own, heads, chunk, out[chunk.rows])
            else:
                read = self._chunk_rows(layer, heads.absorb(own), chunk)
                out[chunk.rows] = heads.values(read)
        return out

    def _expanded(
        self,
        layer: int,
        query: torch.Tensor,
        heads: LatentHeads,
        chunk: _Chunk,
        out: torch.Tensor,
    ) -> None:
        """Attention of a chunk's query [rows, heads, dim] over keys and values of each head."""
        rows = self._gather(layer, chunk.slices).flatten(0, 1)[: chunk.num_keys]
        width, value_dim = query.shape[2], heads.value.shape[2]
        size = max(width, value_dim)
        at_once = max(1, _EXPANDED // (2 * size * len(rows)))
        base = chunk.rows.start
        for first in range(0, query.shape[1], at_once):
            own = slice(first, first + at_once)
            # Zeros fill up the smaller of keys and values, since torch wants one size.
            key, value = (F.pad(x, (0, size - x.shape[2])) for x in heads.expand(rows, own))
            for block in chunk.blocks:
                these = slice(block.rows.start - base, block.rows.stop - base)
                read = _extend(
                    F.pad(query[these, own], (0, size - width)),
                    key[:, block.keys],
                    value[:, block.keys],
                    block.mask,
                    self._scale(layer),
                )
                out[these, own] = read[..., :value_dim]

    def _chunk_rows(self, layer: int, query: torch.Tensor, chunk: _Chunk) -> torch.Tensor:
        """Attention of a chunk's query [rows, heads, dim]."""
        copied = self._gather(layer, chunk.slices)
        # [kv_heads, keys, dim] each
        key, value = self._key_value(layer, copied[None])
        out = query.new_empty(*query.shape[:2], self._value_dim(query))
        base = chunk.rows.start
        for block in chunk.blocks:
            rows = slice(block.rows.start - base, block.rows.stop - base)
            read = _extend(
                query[rows],
                key[0, :, block.keys],
                value[0, :, block.keys],
                block.mask,
                self._scale(layer),
            )
            out[rows] = read[..., : out.shape[2]]
        return out

    def _decode(self, layer: int, query: torch.Tensor, decode: _Decode) -> torch.Tensor:
        """Attention of query [seqs, heads, dim], one row per sequence, over all its pages."""
        _, heads, dim = query.shape
        if decode.spans is not None:
            assert self._shape.cpu is not None
            cache, scale = self._pool.part(layer), self._scale(layer)
            return self._shape.cpu.attend(query, cache, *decode.spans, scale)
        copied = self._gather(layer, decode.slices)  # [slices, page_size, dim]
        outs = []
        row = begin = 0
        for peers in decode.peers:
            end = begin + peers.seqs * self._kept(layer).shape[1] * peers.pages
            own_slices = copied[begin:end].view(peers.seqs, -1, *copied.shape[1:])
            key, value = self._key_value(layer, own_slices)
            # Treat the query heads of a kv head as queries: [seqs, kv_heads, group, dim].
            own = query[row : row + peers.seqs].reshape(peers.seqs, key.shape[1], -1, dim)
            out = attention(own, key, value, self._scale(layer), peers.mask)
            outs.append(out.reshape(peers.seqs, heads, dim))
            row, begin = row + peers.seqs, end
        read = outs[0] if len(outs) == 1 else torch.cat(outs)
        return read[..., : self._value_dim(query)]

    def _kept(self, layer: int) -> torch.Tensor:
        """What the layer keeps, by slices: [pages, slices of a page, page_size, dim]."""
        if self._shape.value_dim is None:
            return self._pool.part(layer)
        return self._pool.part(layer, LATENT)[:, None]

    def _key_value(self, layer: int, slices: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """slices [seqs, slices, page_size, dim] -> [seqs, kv_heads, keys, dim] each"""
        kinds = 2 if self._shape.value_dim is None else 1  # a latent row is both
        kv_heads = self._kept(layer).shape[1] // kinds
        each = slices.view(len(slices), kinds, kv_heads, -1, slices.shape[-1])
        return each[:, 0], each[:, -1]

    def _gather(self, layer: int, slices: torch.Tensor) -> torch.Tensor:
        """A copy of (page, head) slices, [slices, page_size, dim]."""
        copied = self._kept(layer).flatten(0, 1).index_select(0, slices)
        if self._shape.value_dim is not None:
            return unpack_rows(copied, self._shape.head_dim, self._shape.dtype)
        return widen(copied, self._shape.dtype)

    def _value_dim(self, query: torch.Tensor) -> int:
        return self._shape.value_dim or query.shape[2]

    @property
    def _in_place(self) -> bool:
        """A kernel reads the pages of decoding sequences where they are."""
        shape = self._shape
        if shape.cpu is None or shape.hides_landmark_rows or shape.value_dim is not None:
            return False
        parts = [group.layout.part(KV) for group in shape.groups]
        return all(p.shape[-1] in HEAD_DIMS and p.dtype == torch.float32 for p in parts)

    def _scale(self, layer: int) -> float:
        return self._shape.scales[layer] if self._shape.scales else self._shape.scale


def _nothing() -> None:
    """All is done."""


def _extend(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, mask: torch.Tensor, scale: float
) -> torch.Tensor:
    """Attention of query [rows, heads, dim] over key, value [kv_heads, keys, dim] of a sequence."""
    rows, heads, dim = query.shape
    kv_heads, count, _ = key.shape
    # [kv_heads, group, rows, dim] against [kv_heads, 1 -> group, keys, dim]
    grouped = query.reshape(rows, kv_heads, heads // kv_heads, dim).permute(1, 2, 0, 3)
    shape = (kv_heads, heads // kv_heads, count, dim)
    keys, values = key[:, None].expand(shape), value[:, None].expand(shape)
    out = attention(grouped, keys, values, scale, mask)
    return out.permute(2, 0, 1, 3).reshape(rows, heads, dim)


def _slices(group: LayerGroup, pages: torch.Tensor) -> torch.Tensor:
    """Flat indices of the (page, head) slices of pages [..., pages], by sequence and head."""
    parts = {part.name: part for part in group.layout.parts}
    heads = parts[KV].shape[0] if KV in parts else 1  # key heads, then value heads
    index = torch.arange(heads, device=pages.device)
    return (pages[..., None, :] * heads + index[:, None]).flatten()
