"""Attention in plain torch, on any device. The reference for every faster backend.

Rows that stand alone in their sequence (decode) are computed page by page: each page of each
sequence is one split with its own softmax and log-sum-exp, and the splits of a sequence are merged
by softmax(lse). Longer chunks of new rows go through scaled_dot_product_attention, one sequence
and one block of queries at a time. Either way only the pages that are read are copied, and slots
that were never written are kept out of every product, since they may hold NaN.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
import torch.nn.functional as F

from cairn.attention.backend import AttentionShape
from cairn.attention.batch import AttentionBatch
from cairn.memory.groups import LayerGroup
from cairn.memory.kv_pool import KVPool

_QUERY_BLOCK = 256  # bounds the mask and what a causal block reads in vain


@dataclass(frozen=True, slots=True)
class _Splits:
    """All pages that the decode rows of one group read, back to back."""

    rows: torch.Tensor  # [seqs] row of each decoding sequence in the step
    pages: torch.Tensor  # [splits] page ids
    seq: torch.Tensor  # [splits] which decoding sequence reads the page
    tails: torch.Tensor  # [seqs] the split that is each sequence's last page
    hidden: torch.Tensor  # [splits, page_size] slots outside the row's reach
    unwritten: torch.Tensor  # [seqs, page_size] slots of the last page beyond the row


@dataclass(frozen=True, slots=True)
class _Block:
    """Consecutive queries of a chunk, and the keys they can see."""

    rows: slice  # of the step
    keys: slice  # of the chunk's keys
    mask: torch.Tensor  # [queries, keys] True where visible


@dataclass(frozen=True, slots=True)
class _Chunk:
    """All new rows of one sequence that has several."""

    pages: torch.Tensor  # [pages] page ids, from the first that any of its queries reads
    num_keys: int  # keys from the first row of the first page to the last query
    blocks: tuple[_Block, ...]


@dataclass(frozen=True, slots=True)
class _GroupMetadata:
    splits: _Splits | None
    chunks: tuple[_Chunk, ...]


class TorchBackend:
    name = "torch"

    def __init__(self, shape: AttentionShape, pool: KVPool) -> None:
        self._shape = shape
        self._pool = pool
        self._groups = shape.groups

    @staticmethod
    def unavailable_reason(device: torch.device) -> str | None:
        return None

    # -- once per step ------------------------------------------------------------------------

    def prepare(self, batch: AttentionBatch) -> list[_GroupMetadata]:
        decoding = np.flatnonzero(batch.query_lens == 1)
        chunks = np.flatnonzero(batch.query_lens > 1)
        return [
            _GroupMetadata(
                splits=self._splits(batch, g, group, decoding) if len(decoding) else None,
                chunks=tuple(self._chunk(batch, g, group, int(s)) for s in chunks),
            )
            for g, group in enumerate(self._groups)
        ]

    def _splits(
        self, batch: AttentionBatch, g: int, group: LayerGroup, seqs: np.ndarray
    ) -> _Splits:
        size = batch.page_size
        kv_lens = batch.kv_lens[seqs]
        first_key = np.zeros_like(kv_lens)
        if group.window is not None:
            first_key = np.maximum(0, kv_lens - group.window)
        first_page = first_key // size
        counts = -(-kv_lens // size) - first_page  # pages each sequence reads
        seq = np.repeat(np.arange(len(seqs)), counts)
        ends = np.cumsum(counts)
        index = np.arange(ends[-1]) - np.repeat(ends - counts, counts) + first_page[seq]
        slot_rows = index[:, None] * size + np.arange(size)  # [splits, page_size]
        hidden = (slot_rows < first_key[seq, None]) | (slot_rows >= kv_lens[seq, None])
        device = batch.device
        table = batch.groups[g].page_table
        return _Splits(
            rows=_to(batch.cu_query[seqs], device),
            pages=table[_to(seqs[seq], device), _to(index, device)].long(),
            seq=_to(seq, device),
            tails=_to(ends - 1, device),
            hidden=_to(hidden, device),
            unwritten=_to(slot_rows[ends - 1] >= kv_lens[:, None], device),
        )

    def _chunk(self, batch: AttentionBatch, g: int, group: LayerGroup, s: int) -> _Chunk:
        size, device = batch.page_size, batch.device
        kv_len, query_len = int(batch.kv_lens[s]), int(batch.query_lens[s])
        base, past = int(batch.cu_query[s]), kv_len - query_len
        first_page = group.first_reachable_page(past, size)
        blocks = []
        for begin in range(0, query_len, _QUERY_BLOCK):
            end = min(begin + _QUERY_BLOCK, query_len)
            first_key = group.first_reachable_page(past + begin, size) * size
            queries = torch.arange(past + begin, past + end, device=device)[:, None]
            keys = torch.arange(first_key, past + end, device=device)[None, :]
            mask = keys <= queries
            if group.window is not None:
                mask &= keys > queries - group.window
            origin = first_page * size
            blocks.append(
                _Block(
                    rows=slice(base + begin, base + end),
                    keys=slice(first_key - origin, past + end - origin),
                    mask=mask,
                )
            )
        return _Chunk(
            pages=batch.groups[g].page_table[s, first_page : -(-kv_len // size)].long(),
            num_keys=kv_len - first_page * size,
            blocks=tuple(blocks),
        )

    # -- once per layer -----------------------------------------------------------------------

    def forward(
        self, layer: int, query: torch.Tensor, metadata: list[_GroupMetadata]
    ) -> torch.Tensor:
        group = metadata[self._pool.group_of[layer]]
        out = torch.empty_like(query)
        if group.splits is not None:
            out[group.splits.rows] = self._decode(layer, query[group.splits.rows], group.splits)
        for chunk in group.chunks:
            key = _gather(self._pool.keys[layer], chunk.pages)[:, : chunk.num_keys]
            value = _gather(self._pool.values[layer], chunk.pages)[:, : chunk.num_keys]
            for block in chunk.blocks:
                out[block.rows] = self._extend(
                    query[block.rows], key[:, block.keys], value[:, block.keys], block.mask
                )
        return out

    def _decode(self, layer: int, query: torch.Tensor, splits: _Splits) -> torch.Tensor:
        """query [seqs, heads, dim]: one row per sequence, over all its pages."""
        seqs, heads, dim = query.shape
        kv_heads = self._shape.num_kv_heads
        key = self._pool.keys[layer][splits.pages]  # [splits, kv_heads, page_size, dim]
        value = self._pool.values[layer][splits.pages]
        tails = value[splits.tails]  # [seqs, kv_heads, page_size, dim]
        value[splits.tails] = tails.masked_fill(splits.unwritten[:, None, :, None], 0)

        grouped = query.view(seqs, kv_heads, heads // kv_heads, dim)[splits.seq]
        scores = (grouped @ key.transpose(-1, -2)).to(_wide(query.dtype)) * self._shape.scale
        scores = scores.masked_fill(splits.hidden[:, None, None, :], float("-inf"))
        lse = scores.logsumexp(-1)  # [splits, kv_heads, group]
        partial = (scores - lse[..., None]).exp().to(query.dtype) @ value

        # merge: softmax of lse over the splits of each sequence
        top = lse.new_full((seqs, *lse.shape[1:]), float("-inf"))
        top.scatter_reduce_(0, splits.seq[:, None, None].expand_as(lse), lse, "amax")
        weight = (lse - top[splits.seq]).exp()
        total = torch.zeros_like(top).index_add_(0, splits.seq, weight)
        weight = (weight / total[splits.seq])[..., None].to(query.dtype)
        out = query.new_zeros(seqs, *partial.shape[1:])
        out.index_add_(0, splits.seq, partial * weight)
        return out.view(seqs, heads, dim)

    def _extend(
        self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, mask: torch.Tensor
    ) -> torch.Tensor:
        """query [rows, heads, dim] over key, value [kv_heads, keys, dim] of the same sequence."""
        rows, heads, dim = query.shape
        kv_heads, keys, _ = key.shape
        # [kv_heads, group, rows, dim] against [kv_heads, 1 -> group, keys, dim]
        grouped = query.view(rows, kv_heads, heads // kv_heads, dim).permute(1, 2, 0, 3)
        shape = (kv_heads, heads // kv_heads, keys, dim)
        out = F.scaled_dot_product_attention(
            grouped,
            key[:, None].expand(shape),
            value[:, None].expand(shape),
            attn_mask=mask,
            scale=self._shape.scale,
        )
        return out.permute(2, 0, 1, 3).reshape(rows, heads, dim)


def _gather(pool: torch.Tensor, pages: torch.Tensor) -> torch.Tensor:
    """[pages, kv_heads, page_size, dim] -> [kv_heads, len(pages) * page_size, dim], one copy."""
    num_pages, kv_heads, size, dim = pool.shape
    heads = torch.arange(kv_heads, device=pool.device)
    index = pages[None, :] * kv_heads + heads[:, None]  # [kv_heads, pages]
    flat = pool.view(num_pages * kv_heads, size, dim).index_select(0, index.reshape(-1))
    return flat.view(kv_heads, len(pages) * size, dim)


def _wide(dtype: torch.dtype) -> torch.dtype:
    """Softmax statistics never in less than float32."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def _to(array: np.ndarray, device: torch.device) -> torch.Tensor:
    return torch.from_numpy(np.ascontiguousarray(array)).to(device)
