"""Kernels of DeepSeek sparse attention: scan the index, select rows, attend to them.

The queries of a step are split into tiles, which bounds the memory of scores. Decode steps, and
other steps of few rows, can be recorded: only the device needs their lengths and selections.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import torch

from cairn.attention.backend import AttentionShape, SparseParts, missing_module
from cairn.attention.batch import AttentionBatch, IndexQuery, to_device
from cairn.attention.flash_mla_rows import FlashRows
from cairn.attention.latent import LatentHeads
from cairn.kernels.fp8_rows import is_narrow, spans_refusal
from cairn.kernels.interface import LISTED_ROWS, MOST_SCORES
from cairn.kernels.packing import pack, unpack
from cairn.memory.kv_pool import KVPool
from cairn.memory.layout import INDEX, LATENT
from cairn.sparsity.config import SparseConfig

if TYPE_CHECKING:
    from cairn.kernels.choose_rows import ChooseRows
    from cairn.kernels.index_scan import RowList
    from cairn.kernels.list_rows import ListedRows

_SCORES = 2**25  # scores at once
_ROWS = 1024  # absorbed queries at once
_ALIGNED = 16  # tiles begin at multiples of this
_BLOCK = 128  # scores of a row are a multiple of this
_DTYPES = (torch.bfloat16, torch.float16, torch.float32)
_MOST_CHOSEN = 4096  # rows of a query; a program holds four times as many in registers
_MOST_LATENT, _MOST_ROPE = 512, 64  # columns of a latent row that fit into a program's memory


class Tile(NamedTuple):
    own: slice  # of the step's chosen rows
    listed: RowList
    length: int  # scores of a row


@dataclass(slots=True)
class RowStep:
    """Rows of a step that read what an index chooses."""

    batch: AttentionBatch
    rows: np.ndarray  # [n] of the step
    tiles: tuple[Tile, ...]
    positions: torch.Tensor  # [n, k] int32, chosen by the last layer with an index
    device_rows: torch.Tensor | None = None
    """[n] `rows` on the device, int64; None for all rows of the step."""
    listed: ListedRows | None = None
    """What tiles list, if `begin` makes the lists."""
    table: torch.Tensor | None = None
    """[seqs, pages] int32: where each page is, if the layers' page tables do not say."""
    pool: KVPool | None = None
    """Where rows are read, if not in the pool: the stage of a host tier."""
    finds: torch.Tensor | None = None
    """With a host tier: the sequence of each row [n] int32, if chosen rows are looked up one by one
    and may have to be copied."""
    slots: dict[int, torch.Tensor] = field(default_factory=dict)
    """By layer group, [n, k] int32: where these rows are in the pool."""


class RowKernels:
    notes: tuple[str, ...] = ()
    """What the user should know."""

    def __init__(self, parts: SparseParts) -> None:
        shape = parts.shape
        self._pool, self._shape, self._topk = parts.pool, shape, parts.config.topk
        self._swap = None if parts.tier is None else parts.tier.row_swap
        self._ids = parts.pool.ids_of[parts.config.layers[0]]
        self._longest = _blocks(parts.max_pages * shape.page_size) * _BLOCK
        size = _most_scores(self._longest)
        self._scores = torch.empty(size, dtype=torch.float32, device=shape.device)
        assert shape.value_dim is not None
        self._latent = shape.value_dim
        self._listed: torch.Tensor | None = None
        self._choose = self._chooser()
        if self._choose is None:
            self._listed = torch.empty(size, dtype=torch.int32, device=shape.device)
        self.read = self._reader()
        self._flash: FlashRows | None = None
        if (why := FlashRows.refusal(shape, self._topk)) is None:
            self._flash = FlashRows(shape.num_heads, shape.device)
        else:
            self.notes += (f"dsa reads selected rows by its own kernel, FlashMLA cannot: {why}",)
        most = max(shape.max_seqs + 1, LISTED_ROWS)
        self._count = torch.arange(most, dtype=torch.int32, device=shape.device)

    @staticmethod
    def refusal(config: SparseConfig, shape: AttentionShape) -> str | None:
        """Why the kernels cannot serve this model here; None if they can."""
        if shape.device.type != "cuda":
            return f"they are for CUDA devices, this is {shape.device.type}"
        if (missing := missing_module("triton", "triton")) is not None:
            return missing
        if shape.dtype not in _DTYPES:
            return f"the type is {str(shape.dtype).removeprefix('torch.')}"
        latent = shape.value_dim or 0
        why = spans_refusal(latent, shape.head_dim - latent)
        if is_narrow(shape.cache_dtype) and why is not None:
            return why
        if latent > _MOST_LATENT or shape.head_dim - latent > _MOST_ROPE:
            return f"latent rows have {latent} and {shape.head_dim - latent} columns"
        if config.topk > _MOST_CHOSEN:
            return f"queries read {config.topk} rows; they have up to {_MOST_CHOSEN}"
        if shape.longest > MOST_SCORES:
            limit = f"they score up to {MOST_SCORES}: lower context_length"
            return f"requests have up to {shape.longest} rows; {limit}"
        return None

    @staticmethod
    def buffer_bytes(shape: AttentionShape) -> int:
        """Bytes of scores, and of the list that Triton's kernel needs to choose."""
        from cairn.kernels.choose_rows import refusal

        lists = refusal(shape.device) is not None
        return _most_scores(_blocks(shape.longest) * _BLOCK) * (4 + 4 * lists)

    def _chooser(self) -> ChooseRows | None:
        """The kernel that chooses rows, in CUDA C++; None if Triton's does, which needs a list."""
        from cairn.kernels.choose_rows import ChooseRows, refusal
        from cairn.kernels.cuda_source import KernelUnavailableError

        if refusal(self._shape.device) is None:
            try:
                return ChooseRows(self._shape.device)
            except KernelUnavailableError as error:
                self.notes += (f"dsa chooses rows in Triton, not in CUDA C++: {error}",)
        return None

    def _reader(self) -> Callable[..., None]:
        """Our own kernel that reads chosen rows, in CUDA C++ or in Triton."""
        from cairn.kernels.attend_rows import AttendRows
        from cairn.kernels.cuda_source import KernelUnavailableError
        from cairn.kernels.latent_decode import tiles_refusal
        from cairn.kernels.row_attention import row_attention

        shape = self._shape
        heads, rope = shape.num_heads, shape.head_dim - self._latent
        refused = tiles_refusal(heads, self._latent, rope, shape.dtype, shape.device)
        if refused is None and not is_narrow(shape.cache_dtype):
            try:
                return AttendRows(heads, shape.dtype, shape.device)
            except KernelUnavailableError as error:
                self.notes += (f"dsa reads rows in Triton, not in CUDA C++: {error}",)
        return row_attention

    @staticmethod
    def take(batch: AttentionBatch) -> bool:
        """Whether `whole` takes a step: in which every sequence has one row, or of few rows."""
        return batch.decodes or batch.num_rows <= LISTED_ROWS

    def whole(self, batch: AttentionBatch) -> RowStep:
        """All rows of a step, which may be recorded."""
        longest = self._longest
        if batch.recorded is None:
            longest = _blocks(int(batch.kv_lens.max())) * _BLOCK
        return (self._decode if batch.decodes else self._mixed)(batch, longest)

    def _decode(self, batch: AttentionBatch, longest: int) -> RowStep:
        from cairn.kernels.index_scan import RowList

        rows, tiles = batch.num_seqs, []
        finds = None if self._swap is None or batch.resident else self._count[:rows]
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
            tiles.append(Tile(own, listed, longest))
        positions = self._positions(rows)
        return RowStep(batch, np.arange(rows), tuple(tiles), positions, finds=finds)

    def _mixed(self, batch: AttentionBatch, longest: int) -> RowStep:
        from cairn.kernels.index_scan import RowList, rows_per_item
        from cairn.kernels.list_rows import ListedRows

        rows, per_item = batch.num_rows, rows_per_item(self._shape.dtype)
        at_once = _aligned(len(self._scores) // longest)
        every = ListedRows.empty(rows, batch.num_seqs, at_once, per_item, batch.device)
        tiles = []
        for i, own in enumerate(_cut(rows, at_once)):
            listed = RowList(
                self._count[own],
                every.seqs[own],
                every.limits[own],
                every.items[i, : every.most_items + 1],
                every.plans[i, : every.most_items + 2],
                per_item,
            )
            tiles.append(Tile(own, listed, longest))
        positions = self._positions(rows)
        return RowStep(batch, np.arange(rows), tuple(tiles), positions, listed=every)

    def decode_some(self, batch: AttentionBatch, seqs: np.ndarray) -> RowStep:
        """The rows of sequences that have one each, beside others; not recorded."""
        step = self.chunks(batch, seqs, [slice(row, row + 1) for row in batch.cu_query[seqs]])
        if self._swap is not None and not batch.resident:
            step.finds = to_device(seqs.astype(np.int32), batch.device)
        return step

    def chunks(
        self, batch: AttentionBatch, seqs: Sequence[int] | np.ndarray, rows: Sequence[slice]
    ) -> RowStep:
        """Consecutive rows of some sequences, not recorded."""
        from cairn.kernels.index_scan import RowList, cut_items, rows_per_item

        every = np.concatenate([np.arange(own.start, own.stop) for own in rows])
        seq = np.repeat(seqs, [own.stop - own.start for own in rows])
        limits = (batch.kv_lens - batch.cu_query[1:])[seq] + every + 1
        per_item, longest = rows_per_item(self._shape.dtype), _blocks(int(limits.max())) * _BLOCK
        whole = len(every) == batch.num_rows
        device_rows = None if whole else to_device(every, batch.device)
        tiles = []
        for own in _cut(len(every), min(_ROWS, len(self._scores) // longest)):
            counts = np.unique(seq[own], return_counts=True)[1]
            items = cut_items(counts, per_item)
            arrays = every[own], seq[own], limits[own], items
            packed = to_device(pack(arrays), batch.device)
            sent = unpack(packed, [len(array) for array in arrays])
            plan = torch.empty(len(items) + 1, dtype=torch.int32, device=batch.device)
            listed = RowList(sent[0], sent[1], sent[2], sent[3], plan, per_item)
            tiles.append(Tile(own, listed, longest))
        return RowStep(batch, every, tuple(tiles), self._positions(len(every)), device_rows)

    def _positions(self, rows: int) -> torch.Tensor:
        return torch.empty(rows, self._topk, dtype=torch.int32, device=self._shape.device)

    def begin(self, step: RowStep) -> None:
        from cairn.kernels.index_scan import plan_scan
        from cairn.kernels.list_rows import list_rows

        if step.listed is not None:
            list_rows(step.batch.device_cu_query, step.batch.device_kv_lens, step.listed)
        for tile in step.tiles:
            plan_scan(tile.listed, self._shape.dtype)
        if self._swap is not None and step.table is None and step.finds is None:
            ids = step.batch.groups[self._ids].page_table
            step.table = self._swap.frame_of[ids]

    def forward(
        self,
        layer: int,
        query: torch.Tensor,  # [rows of the step, heads, nope + rope]
        heads: LatentHeads,
        step: RowStep,
        slots: torch.Tensor,  # [n, k] what `chosen` returned
        out: torch.Tensor | None,  # [rows of the step, heads, value]; None if all are `step`'s
    ) -> torch.Tensor:
        for own in _cut(len(slots), _ROWS):
            rows = own if step.device_rows is None else step.device_rows[own]
            read = self.attend(layer, heads.absorb(query[rows]), slots[own], step.pool)
            values = heads.values(read)
            if len(values) == len(query):
                return values
            if out is None:
                out = query.new_empty(*query.shape[:2], values.shape[2])
            out[rows] = values
        assert out is not None
        return out

    def chosen(self, layer: int, step: RowStep, index: IndexQuery | None) -> torch.Tensor:
        """Slots [n, k] of the rows that a layer reads. With `index`, it chooses them."""
        from cairn.kernels.top_rows import slots_of

        group = self._pool.group_of[layer]
        if index is None and group in step.slots:
            if self._swap is not None and step.finds is not None:
                self._swap.locate_again(layer)
            return step.slots[group]
        slots = torch.empty_like(step.positions)
        if index is None:
            table = self._table(layer, step)
            for tile in step.tiles:
                chosen, seqs = step.positions[tile.own], tile.listed.seqs
                size = self._shape.page_size
                slots_of(chosen, seqs, table, slots[tile.own], page_size=size)
        else:
            step.slots.clear()
            for tile in step.tiles:
                self.choose(layer, step, tile, self.scan(layer, step, tile, index), slots)
            if self._swap is not None and step.finds is not None:
                own = step.batch.groups[self._ids]
                assert own.generations is not None
                lists = step.positions, step.finds
                self._swap.locate(layer, *lists, own.page_table, own.generations, slots)
        step.slots[group] = slots
        return slots

    def _table(self, layer: int, step: RowStep) -> torch.Tensor:
        """Where pages are, [seqs, pages]."""
        if step.table is not None:
            return step.table
        return step.batch.groups[self._pool.group_of[layer]].page_table

    def scan(self, layer: int, step: RowStep, tile: Tile, index: IndexQuery) -> torch.Tensor:
        """Scores [rows of the tile, length] of all rows that each query sees."""
        from cairn.kernels.index_scan import index_scan

        count = tile.own.stop - tile.own.start
        scores = self._scores[: count * tile.length].view(count, tile.length)
        table = step.batch.groups[self._pool.ids_of[layer]].page_table
        keys = self._pool.part(layer, INDEX)
        index_scan(index.query, index.weights, keys, table, tile.listed, scores)
        return scores

    def choose(
        self, layer: int, step: RowStep, tile: Tile, scores: torch.Tensor, slots: torch.Tensor
    ) -> None:
        """Write a tile's positions of the step, and its part of `slots` [n, k]."""
        from cairn.kernels.top_rows import top_rows

        given = (
            scores,
            tile.listed.limits,
            tile.listed.seqs,
            self._table(layer, step),
            step.positions[tile.own],
            slots[tile.own],
        )
        if self._choose is not None:
            self._choose(*given, page_size=self._shape.page_size)
        else:
            assert self._listed is not None
            listed = self._listed[: scores.numel()].view(scores.shape)
            top_rows(*given, listed, page_size=self._shape.page_size)

    def attend(
        self, layer: int, query: torch.Tensor, slots: torch.Tensor, stage: KVPool | None = None
    ) -> torch.Tensor:
        """What heads read, [rows, heads, latent], from the rows at `slots` [rows, k]; the query
        [rows, heads, latent + rope] is absorbed."""
        pool, scale = (stage or self._pool).part(layer, LATENT), self._shape.scale
        if self._flash is not None and self._flash.suits(len(slots)):
            return self._flash.attend(query, pool, slots, scale)
        out = query.new_empty(*query.shape[:2], self._latent)
        self.read(query, pool, slots, out, scale=scale)
        return out


def _most_scores(longest: int) -> int:
    """Scores at once, `longest` of a row."""
    return min(max(_SCORES, _ALIGNED * longest), _ROWS * longest)


def _blocks(rows: int) -> int:
    return -(-rows // _BLOCK)


def _aligned(rows: int) -> int:
    """As many rows of a tile, at least _ALIGNED."""
    return rows // _ALIGNED * _ALIGNED


def _cut(rows: int, most: int) -> Iterator[slice]:
    """Slices of at most `most` rows, which is at least _ALIGNED."""
    size = _aligned(most)
    for begin in range(0, rows, size):
        yield slice(begin, min(begin + size, rows))
