"""An 8-bit cache on a GPU: chunks of rows read widened pages, single rows read pages as they are.

The pages that the chunks of a step read are widened once per layer (`kernels/widen_pages.py`), and
a 16-bit backend attends to the result. All rows, also those of the same chunk, are read from the
cache, so a token does not depend on how its prompt is split into chunks.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from cairn.attention.backend import AttentionShape, DenseBackend, Graph
from cairn.attention.batch import AttentionBatch, to_device
from cairn.attention.pair_backend import PairBackend
from cairn.attention.triton_backend import TritonBackend
from cairn.kernels.fp8_rows import is_narrow
from cairn.memory.kv_pool import KVPool
from cairn.memory.layout import KV, CacheLayout

if TYPE_CHECKING:
    from cairn.kernels.widen_pages import WideTiles

_TILE = 128  # rows of a page that holds widened rows; all backends read such pages fast
_MOST_BYTES = 2 * 2**30
_LEAST_TILES = 512  # for many short sequences
_MOST_SEQS = 2  # number of longest sequences that fit


def dense_backend(
    kinds: Sequence[type[DenseBackend]],
    shape: AttentionShape,
    pool: KVPool,
    wide_pool: WidePool | None = None,
) -> DenseBackend | PairBackend:
    """One dense backend, or two for prefill and decode, over a pool of any type. Backends that do
    not run at the same time can share a `wide_pool`."""
    wide_pool = wide_pool or WidePool(shape)
    backends = [
        Widened(kind, shape, pool, wide_pool) if _widens(kind, shape) else kind(shape, pool)
        for kind in kinds
    ]
    return backends[0] if len(backends) == 1 else PairBackend(*backends)


def _widens(kind: type[DenseBackend], shape: AttentionShape) -> bool:
    return is_narrow(shape.cache_dtype) and kind.reads_widened and shape.value_dim is None


def widened_bytes(kinds: Sequence[type[DenseBackend]], shape: AttentionShape) -> int:
    """Bytes that widened pages take beside the cache."""
    if not any(_widens(kind, shape) for kind in kinds):
        return 0
    return _tiles(shape) * _tile_bytes(shape)


def overflowing_seqs(kinds: Sequence[type[DenseBackend]], shape: AttentionShape, rows: int) -> int:
    """Number of sequences of this many rows that no longer fit into the widened pages; 0 if no
    pages are widened."""
    if not any(_widens(kind, shape) for kind in kinds):
        return 0
    return 1 + (_tiles(shape) - 1) // -(-rows // _tile(shape))


class WidePool(KVPool):
    """The widened pages of one layer, in place of a backend's pool. All layers share the memory,
    which is allocated when the first layer needs it."""

    def __init__(self, shape: AttentionShape) -> None:
        self.page_size = _tile(shape)
        self.device = shape.device
        self.group_of = {layer: g for g, group in enumerate(shape.groups) for layer in group.layers}
        self._shape = shape
        self._pages: torch.Tensor | None = None

    def part(self, layer: int, name: str = KV) -> torch.Tensor:
        if self._pages is None:
            heads, dim = self._shape.num_kv_heads, self._shape.head_dim
            size = _tiles(self._shape), 2 * heads, self.page_size, dim
            # Kernels multiply masked rows of the first tile by zero.
            self._pages = torch.zeros(size, dtype=self._shape.dtype, device=self.device)
        return self._pages


@dataclass(frozen=True, slots=True)
class _Metadata:
    batch: AttentionBatch
    narrow: Any
    """For rows that are read as they are; None if there are none."""
    wide: Any
    """For widened chunks; None if there are none."""
    tiles: dict[int, WideTiles]  # by group


class Widened(DenseBackend):
    """A backend of any kind reads chunks; Triton's reads single rows and what does not fit."""

    name = "widened"

    def __init__(
        self, kind: type[DenseBackend], shape: AttentionShape, pool: KVPool, wide_pool: WidePool
    ) -> None:
        super().__init__(shape, pool)
        layout = CacheLayout.of_heads(shape.num_kv_heads, shape.head_dim, shape.dtype)
        groups = tuple(replace(group, layout=layout) for group in shape.groups)
        self._tile = _tile(shape)
        self._capacity = _tiles(shape) - 1
        self._wide_pool = wide_pool
        self._wide = kind(replace(shape, groups=groups, page_size=self._tile), wide_pool)
        self._narrow = TritonBackend(shape, pool)
        self.notes = self._wide.notes
        mixed = [graph for graph in self._wide.graphs if graph.mixed]
        self.graphs = [*(graph for graph in self._narrow.graphs if not graph.mixed), *mixed]

    def graph_for(self, batch: AttentionBatch, *, mixed: bool) -> Graph | None:
        if not mixed:
            return self._narrow.graph_for(batch, mixed=mixed)
        return super().graph_for(batch, mixed=mixed) if self._fitting(batch).all() else None

    def _fitting(self, batch: AttentionBatch) -> np.ndarray:
        """The sequences that fit into the widened pages if they have several rows, [seqs] bool."""
        tiles = np.where(batch.query_lens > 1, -(-batch.kv_lens // self._tile), 0)
        alone = tiles <= self._capacity
        return alone & (np.cumsum(tiles * alone) <= self._capacity)

    def prepare(self, batch: AttentionBatch, groups: Collection[int] | None = None) -> _Metadata:
        if batch.decodes or batch.few:
            return _Metadata(batch, self._narrow.prepare(batch, groups), None, {})
        groups = range(len(batch.groups)) if groups is None else groups
        chunks = batch.query_lens > 1
        query_lens = batch.device_cu_query.diff()
        if batch.recorded is not None:
            widened, others = query_lens > 1, np.zeros(0, dtype=np.int64)
            kv_lens = batch.kv_lens
        else:
            fitting = chunks & self._fitting(batch)
            widened, others = to_device(fitting, batch.device), np.flatnonzero(chunks & ~fitting)
            kv_lens = np.where(fitting, batch.kv_lens, batch.query_lens)
        narrow = None
        if batch.recorded is not None or len(others) or not chunks.all():
            narrow = self._narrow.prepare(batch, groups, chunks=others)
        if batch.recorded is None and len(others) == chunks.sum():
            return _Metadata(batch, narrow, None, {})
        tiles = {g: self._tiles_of(batch, g, query_lens, widened) for g in groups}
        tables = [
            replace(own, page_table=tiles[g].table) if g in tiles else own
            for g, own in enumerate(batch.groups)
        ]
        # Other rows see rows of the zero tile here, and are overwritten.
        lens = torch.where(widened, batch.device_kv_lens, query_lens)
        own = replace(
            batch,
            page_size=self._tile,
            kv_lens=kv_lens,
            device_kv_lens=lens.int(),
            groups=tuple(tables),
        )
        return _Metadata(batch, narrow, self._wide.prepare(own, groups), tiles)

    def _tiles_of(
        self, batch: AttentionBatch, group: int, query_lens: torch.Tensor, widened: torch.Tensor
    ) -> WideTiles:
        from cairn.kernels.widen_pages import WideTiles

        pages = batch.groups[group].page_table.shape[1]
        most = 1 + -(-pages * batch.page_size // self._tile)
        window = self._shape.groups[group].window
        lens = batch.device_kv_lens
        # A recorded step may not have room for its last sequence, which is padding.
        room = self._capacity
        return WideTiles.of(lens, query_lens, widened, self._tile, most, window, room)

    def begin(self, metadata: _Metadata) -> None:
        if metadata.wide is not None:
            self._wide.begin(metadata.wide)
        if metadata.narrow is not None:
            self._narrow.begin(metadata.narrow)

    def attend(self, layer: int, query: torch.Tensor, metadata: _Metadata) -> torch.Tensor:
        if metadata.wide is None:
            return self._narrow.attend(layer, query, metadata.narrow)
        from cairn.kernels.widen_pages import widen_pages

        g = self._pool.group_of[layer]
        table = metadata.batch.groups[g].page_table
        pages = self._wide_pool.part(layer)
        max_seqs = max(self._shape.max_seqs, len(table))
        widen_pages(self._pool.part(layer), table, metadata.tiles[g], pages, max_seqs)
        out = self._wide.attend(layer, query, metadata.wide)
        if metadata.narrow is not None:
            self._narrow.attend(layer, query, metadata.narrow, out)
        return out


def _tile(shape: AttentionShape) -> int:
    """Rows of a page that holds widened rows. Landmark rows are found by their place in a page."""
    fits = _TILE % shape.page_size == 0 and not shape.hides_landmark_rows
    return _TILE if fits else shape.page_size


def _tile_bytes(shape: AttentionShape) -> int:
    return 2 * shape.num_kv_heads * _tile(shape) * shape.head_dim * shape.dtype.itemsize


def _tiles(shape: AttentionShape) -> int:
    """Tiles of widened pages, with the zero tile."""
    most = max(2, _MOST_BYTES // _tile_bytes(shape))
    if shape.longest:
        longest = -(-shape.longest // _tile(shape))
        most = min(most, 1 + max(_LEAST_TILES, _MOST_SEQS * longest))
    return most
