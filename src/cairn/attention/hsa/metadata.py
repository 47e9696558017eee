"""What all sparse layers of a step share: how rows are batched, and what each row may see.

Rows are computed in tiles. A tile of decode rows has one row of each of several sequences. A tile
of a prefill chunk has many rows of one sequence, in blocks that share a window:

    block:   rows of one sequence within a page, and the pages from the first row's window start
    tile:    blocks with the same number of rows and of window pages
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch

from cairn.attention.backend import AttentionShape
from cairn.attention.batch import AttentionBatch, to_device, unit_ids
from cairn.memory.kv_pool import KVPool
from cairn.memory.pages import NULL_PAGE
from cairn.sparsity.config import SparseConfig

_TILE_ROWS = 512


@dataclass(frozen=True, slots=True)
class Tile:
    seqs: int
    """Number of sequences. All have the same number of rows, which are next to each other."""
    blocks: int
    """Number of blocks. All have the same number of rows; each is within one sequence."""
    rows: torch.Tensor  # [rows] of the step
    positions: torch.Tensor  # [rows] place of each row in its sequence
    limits: torch.Tensor  # [rows] pages below this index are candidates
    window_pages: torch.Tensor  # [blocks, window pages] in the pool
    hidden: torch.Tensor  # [blocks, rows of a block, window keys] True where not visible
    page_table: torch.Tensor  # [seqs, candidate pages] page ids; empty if no row has candidates
    generations: torch.Tensor  # [seqs, candidate pages]
    own_pages: torch.Tensor  # [rows] page of the pool that holds the row itself
    traced: torch.Tensor | None  # [n] rows of the tile whose selection is reported
    traced_rows: tuple[int, ...]  # the same rows, as rows of the step
    prompts: Prompts | None
    """For policies that look back at the prompt; otherwise None."""

    @property
    def single(self) -> bool:
        """Whether each sequence has one row."""
        return len(self.rows) == self.seqs


class Prompts(NamedTuple):
    pages: torch.Tensor  # [seqs, prompt pages] padded with the null page
    rows: torch.Tensor  # [seqs] rows of the prompt


class SparseGroups(NamedTuple):
    """Layer groups of the sparse layers' tables. They differ only with a host tier."""

    selected: int
    """Index of the group whose page ids name landmarks and selected pages."""
    kv: int
    """Index of the group whose page ids say where rows are written and windows are read."""

    @classmethod
    def of(cls, config: SparseConfig, shape: AttentionShape, pool: KVPool) -> SparseGroups:
        kv = pool.group_of[config.layers[0]]
        of = shape.groups[kv].copy_of
        return cls(selected=kv if of is None else of, kv=kv)


class CompletedPages(NamedTuple):
    pages: torch.Tensor  # [n] to save landmarks under
    kv_pages: torch.Tensor  # [n] to read keys from
    last_rows: torch.Tensor  # [n] row of the step that completed each


@dataclass(frozen=True, slots=True)
class _Block:
    seq: int
    first: int  # row in the cache
    count: int
    window_start: int  # page
    window_pages: int

    @property
    def shape(self) -> tuple[int, int]:
        return self.count, self.window_pages


def completed_pages(batch: AttentionBatch, units: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """The pages that this step completes: sequence, place in it, and the row of the step that
    completes the page."""
    size = batch.page_size // units
    completing = batch.kv_lens % size < batch.query_lens
    if not np.count_nonzero(completing):
        empty = np.zeros(0, dtype=np.int64)
        return empty, empty, empty
    past = batch.kv_lens - batch.query_lens
    seqs, index = [], []
    for s in np.flatnonzero(completing):
        pages = np.arange(past[s] // size, batch.kv_lens[s] // size)
        seqs.append(np.full(len(pages), s))
        index.append(pages)
    seq, place = np.concatenate(seqs), np.concatenate(index)
    rows = batch.cu_query[seq] + (place + 1) * size - 1 - past[seq]
    return seq, place, rows


def completed_on_device(batch: AttentionBatch, groups: SparseGroups) -> CompletedPages:
    """`completed_pages` of a step whose lengths only the device knows. Lists as many as there can
    be at most; surplus ones are the null page."""
    from cairn.kernels.paged_extend import numbered

    size, cu_query = batch.page_size, batch.device_cu_query
    past = batch.device_kv_lens - cu_query.diff()
    first = past // size
    most = batch.num_rows // size + batch.num_seqs
    seq, nth, there = numbered(batch.device_kv_lens // size - first, most)
    place = torch.where(there, first[seq] + nth, 0)
    pages, kv_pages = (
        torch.where(there, batch.groups[g].page_table[seq, place], 0).long() for g in groups
    )
    last_rows = cu_query[seq] + (place + 1) * size - 1 - past[seq]
    return CompletedPages(pages, kv_pages, torch.where(there, last_rows, 0))


def make_tiles(
    batch: AttentionBatch,
    groups: SparseGroups,
    config: SparseConfig,
    chosen: np.ndarray | None = None,
) -> tuple[Tile, ...]:
    """Tiles of all rows, or of the rows of the `chosen` sequences."""
    seqs = np.arange(batch.num_seqs) if chosen is None else chosen
    blocks = [block for s in seqs for block in _blocks(batch, config, int(s))]
    return tuple(_tile(batch, groups, config, run) for run in _runs(batch, blocks))


def traced_tiles(
    batch: AttentionBatch, groups: SparseGroups, config: SparseConfig, excluded: np.ndarray
) -> tuple[Tile, ...]:
    """One tile for each traced row, except rows of `excluded` sequences."""
    tiles = []
    for row in batch.traced_rows:
        s = int(np.searchsorted(batch.cu_query, row, side="right")) - 1
        if excluded[s]:
            continue
        first = int(row - batch.cu_query[s] + batch.kv_lens[s] - batch.query_lens[s])
        size = batch.page_size // config.units
        start = config.window_start(first, size)
        block = _Block(s, first, 1, start, first // size + 1 - start)
        tiles.append(_tile(batch, groups, config, [block]))
    return tuple(tiles)


def _blocks(batch: AttentionBatch, config: SparseConfig, s: int) -> Iterator[_Block]:
    size = batch.page_size // config.units
    end = int(batch.kv_lens[s])
    row = end - int(batch.query_lens[s])
    dense_until = int(config.dense_until(batch.prompt_rows[s]))
    while row < end:
        stop = min(end, (row // size + 1) * size)
        start = 0 if row < dense_until else config.window_start(row, size)
        yield _Block(s, row, stop - row, start, (stop - 1) // size + 1 - start)
        row = stop


def _runs(batch: AttentionBatch, blocks: list[_Block]) -> Iterator[list[_Block]]:
    """The blocks of each tile: of one sequence, or single rows of several sequences."""
    single = [block for block in blocks if batch.query_lens[block.seq] == 1]
    for width in sorted({block.window_pages for block in single}):
        alike = [block for block in single if block.window_pages == width]
        for begin in range(0, len(alike), _TILE_ROWS):
            yield alike[begin : begin + _TILE_ROWS]
    run: list[_Block] = []
    for block in blocks:
        if batch.query_lens[block.seq] == 1:
            continue
        fits = run and (block.seq, block.shape) == (run[0].seq, run[0].shape)
        if run and not (fits and (len(run) + 1) * block.count <= _TILE_ROWS):
            yield run
            run = []
        run.append(block)
    if run:
        yield run


def _tile(
    batch: AttentionBatch, groups: SparseGroups, config: SparseConfig, blocks: list[_Block]
) -> Tile:
    units, device = config.units, batch.device
    size = batch.page_size // units
    tables, pool = batch.groups[groups.selected], batch.groups[groups.kv]
    count, width = blocks[0].shape
    seq = np.array([block.seq for block in blocks])
    start = np.array([block.window_start for block in blocks])
    first = np.array([block.first for block in blocks])
    cache_rows = first[:, None] + np.arange(count)  # [blocks, count]
    rows = cache_rows - (batch.kv_lens - batch.query_lens - batch.cu_query[:-1])[seq, None]
    limits = np.maximum(0, (cache_rows - config.window + 1) // size)
    limits[cache_rows < config.dense_until(batch.prompt_rows[seq, None])] = 0
    keys = start[:, None] * size + np.arange(width * size)  # [blocks, keys]
    hidden = keys[:, None] > cache_rows[..., None]
    hidden |= keys[:, None] < limits[..., None] * size
    if config.landmark_rows:
        hidden |= (keys % size == size - 1)[:, None]
    # A chunk's tile has one sequence; a tile of decode rows has one row of each sequence.
    owners = seq[:1] if len(set(seq.tolist())) == 1 else seq
    candidates = int(limits.max())
    flat_rows = rows.reshape(-1)
    traced = np.flatnonzero(np.isin(flat_rows, batch.traced_rows))
    prompts = None
    if config.policy is not None and config.policy.observed and candidates:
        lengths = batch.prompt_rows[owners]
        held = -(-lengths // size)
        places = np.arange(held.max())
        table = unit_ids(tables.host_pages, owners[:, None], places, units)
        table[places >= held[:, None]] = NULL_PAGE
        prompts = Prompts(to_device(table, device), to_device(lengths, device))

    def to(array: np.ndarray) -> torch.Tensor:
        return to_device(array, device)

    window = unit_ids(pool.host_pages, seq[:, None], start[:, None] + np.arange(width), units)
    own = unit_ids(pool.host_pages, seq[:, None], cache_rows // size, units)
    before, own_seqs = np.arange(candidates), owners[:, None]
    return Tile(
        seqs=len(owners),
        blocks=len(blocks),
        rows=to(flat_rows),
        positions=to(cache_rows.reshape(-1)),
        limits=to(limits.reshape(-1)),
        window_pages=to(window),
        hidden=to(hidden),
        page_table=to(unit_ids(tables.host_pages, own_seqs, before, units)),
        generations=to(tables.host_generations[own_seqs, before // units]),
        own_pages=to(own.reshape(-1)),
        traced=to(traced) if len(traced) else None,
        traced_rows=tuple(int(row) for row in flat_rows[traced]),
        prompts=prompts,
    )
