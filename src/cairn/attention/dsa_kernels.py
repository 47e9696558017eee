"""Kernels of DeepSeek sparse attention: scan the index, choose rows, attend to them.

The queries of a step are cut into tiles, so that scores and absorbed queries need bounded memory.
The device alone knows lengths and choices, so decode steps can be recorded.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import torch

from cairn.attention.backend import AttentionShape, SparseParts, missing_module
from cairn.attention.batch import AttentionBatch, IndexQuery, to_device
from cairn.attention.latent import LatentHeads
from cairn.kernels.packing import pack, unpack
from cairn.memory.layout import INDEX, LATENT

if TYPE_CHECKING:
    from cairn.kernels.index_scan import RowList

_SCORES = 2**25  # scores at once
_ROWS = 1024  # absorbed queries at once
_ALIGNED = 16  # tiles begin at multiples of this
_BLOCK = 128  # scores of a row are a multiple of this
_DTYPES = (torch.bfloat16, torch.float16, torch.float32)
_MOST_LATENT, _MOST_ROPE = 512, 64  # columns of a latent row that fit into a program's memory


class _Tile(NamedTuple):
    own: slice  # of the step's chosen rows
    rows: torch.Tensor | None  # [n] rows of the step, int64; None for all rows of a decode step
    listed: RowList
    length: int  # scores of a row


@dataclass(slots=True)
class RowStep:
    """Rows of a step that read what an index chooses."""

    batch: AttentionBatch
    rows: np.ndarray  # [n] of the step
    tiles: tuple[_Tile, ...]
    positions: torch.Tensor  # [n, k] int32, chosen by the last layer with an index
    slots: dict[int, torch.Tensor] = field(default_factory=dict)
    """By layer group, [n, k] int32: where these rows are in the pool."""


class RowKernels:
    def __init__(self, parts: SparseParts) -> None:
        shape = parts.shape
        self._pool, self._shape, self._topk = parts.pool, shape, parts.config.topk
        self._longest = _blocks(parts.max_pages * shape.page_size) * _BLOCK
        most = max(_SCORES, _ALIGNED * self._longest)
        size = min(most, self._longest * max(_ROWS, shape.max_seqs))
        self._scores = torch.empty(size, dtype=torch.float32, device=shape.device)
        self._listed = torch.empty(size, dtype=torch.int32, device=shape.device)
        self._count = torch.arange(shape.max_seqs + 1, dtype=torch.int32, device=shape.device)

    @staticmethod
    def refusal(shape: AttentionShape) -> str | None:
        """Why the kernels cannot serve this model here; None if they can."""
        if shape.device.type != "cuda":
            return f"they are for CUDA devices, this is {shape.device.type}"
        if (missing := missing_module("triton", "triton")) is not None:
            return missing
        if shape.dtype not in _DTYPES:
            return f"the type is {str(shape.dtype).removeprefix('torch.')}"
        latent = shape.value_dim or 0
        if latent > _MOST_LATENT or shape.head_dim - latent > _MOST_ROPE:
            return f"latent rows have {latent} and {shape.head_dim - latent} columns"
        return None

    def decode(self, batch: AttentionBatch) -> RowStep:
        """All rows of a step in which every sequence has one."""
        from cairn.kernels.index_scan import RowList

        longest = self._longest
        if batch.recorded is None:
            longest = _blocks(int(batch.kv_lens.max())) * _BLOCK
        rows, tiles = batch.num_seqs, []
        for own in _cut(rows, len(self._scores) // longest):
            count = own.stop - own.start
            listed = RowList(
                self._count[own],
                self._count[own],
                batch.device_kv_lens[own],
                self._count[: count + 1],
                torch.empty(count + 2, dtype=torch.int32, device=batch.device),
                per_item=1,
            )
            whole = None if count == rows else self._count[own].long()
            tiles.append(_Tile(own, whole, listed, longest))
        return RowStep(batch, np.arange(rows), tuple(tiles), self._positions(rows))

    def chunks(self, batch: AttentionBatch, seqs: Sequence[int], rows: Sequence[slice]) -> RowStep:
        """Consecutive rows of some sequences, not recorded."""
        from cairn.kernels.index_scan import RowList, cut_items, rows_per_item

        every = np.concatenate([np.arange(own.start, own.stop) for own in rows])
        seq = np.repeat(seqs, [own.stop - own.start for own in rows])
        limits = (batch.kv_lens - batch.cu_query[1:])[seq] + every + 1
        per_item, longest = rows_per_item(self._shape.dtype), _blocks(int(limits.max())) * _BLOCK
        tiles = []
        for own in _cut(len(every), min(_ROWS, len(self._scores) // longest)):
            counts = np.unique(seq[own], return_counts=True)[1]
            items = cut_items(counts, per_item)
            arrays = every[own], seq[own], limits[own], items
            packed = to_device(pack(arrays), batch.device)
            sent = unpack(packed, [len(array) for array in arrays])
            plan = torch.empty(len(items) + 1, dtype=torch.int32, device=batch.device)
            listed = RowList(sent[0], sent[1], sent[2], sent[3], plan, per_item)
            tiles.append(_Tile(own, sent[0].long(), listed, longest))
        return RowStep(batch, every, tuple(tiles), self._positions(len(every)))

    def _positions(self, rows: int) -> torch.Tensor:
        return torch.empty(rows, self._topk, dtype=torch.int32, device=self._shape.device)

    def begin(self, step: RowStep) -> None:
        from cairn.kernels.index_scan import plan_scan

        for tile in step.tiles:
            plan_scan(tile.listed, self._shape.dtype)

    def forward(
        self,
        layer: int,
        query: torch.Tensor,  # [rows of the step, heads, nope + rope]
        heads: LatentHeads,
        step: RowStep,
        index: IndexQuery | None,
        out: torch.Tensor | None,  # [rows of the step, heads, value]; None if all are `step`'s
    ) -> torch.Tensor:
        from cairn.kernels.row_attention import row_attention

        pool = self._pool.part(layer, LATENT)
        slots = self._chosen(layer, step, index)
        for tile in step.tiles:
            absorbed = heads.absorb(query if tile.rows is None else query[tile.rows])
            attended = absorbed.new_empty(*absorbed.shape[:2], heads.latent)
            row_attention(absorbed, pool, slots[tile.own], attended, scale=self._shape.scale)
            values = heads.values(attended)
            if tile.rows is None:
                return values
            if out is None:
                out = query.new_empty(*query.shape[:2], values.shape[2])
            out[tile.rows] = values
        assert out is not None
        return out

    def _chosen(self, layer: int, step: RowStep, index: IndexQuery | None) -> torch.Tensor:
        """Slots [n, k] of the rows that a layer reads. With `index`, it chooses them."""
        from cairn.kernels.index_scan import index_scan
        from cairn.kernels.top_rows import slots_of, top_rows

        group, size = self._pool.group_of[layer], self._shape.page_size
        table = step.batch.groups[group].page_table
        if index is None and group in step.slots:
            return step.slots[group]
        slots = torch.empty_like(step.positions)
        if index is None:
            for tile in step.tiles:
                chosen, seqs = step.positions[tile.own], tile.listed.seqs
                slots_of(chosen, seqs, table, slots[tile.own], page_size=size)
        else:
            step.slots.clear()
            keys = self._pool.part(layer, INDEX)
            for tile in step.tiles:
                own, listed, length = tile.own, tile.listed, tile.length
                count = own.stop - own.start
                scores, scratch = (
                    room[: count * length].view(count, length)
                    for room in (self._scores, self._listed)
                )
                index_scan(index.query, index.weights, keys, table, listed, scores)
                top_rows(
                    scores,
                    listed.limits,
                    listed.seqs,
                    table,
                    step.positions[own],
                    slots[own],
                    scratch,
                    page_size=size,
                )
        step.slots[group] = slots
        return slots


def _blocks(rows: int) -> int:
    return -(-rows // _BLOCK)


def _cut(rows: int, most: int) -> Iterator[slice]:
    """Slices of at most `most` rows, which is at least _ALIGNED."""
    size = most // _ALIGNED * _ALIGNED
    for begin in range(0, rows, size):
        yield slice(begin, min(begin + size, rows))
