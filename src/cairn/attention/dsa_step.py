"""What `dsa` knows about a step: which new rows read everything they see, and which select."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import torch

from cairn.attention.backend import AttentionBackend
from cairn.attention.batch import AttentionBatch, to_device
from cairn.attention.dsa_kernels import RowStep
from cairn.attention.hot_rows import HotRows
from cairn.memory.prompt_stage import StagedStep
from cairn.sparsity.selection import Selection


@dataclass(frozen=True, slots=True)
class Piece:
    """Consecutive new rows of a sequence that each see more than k rows."""

    seq: int
    rows: slice  # of the step
    first: int  # position of the first one
    table: torch.Tensor | None = None
    """[pages] where each page is, in the pool or the stage; None for the layer's page table."""
    staged: bool = False

    @property
    def end(self) -> int:
        """Rows that the last one sees."""
        return self.first + int(self.rows.stop - self.rows.start)


@dataclass(frozen=True, slots=True)
class Run:
    """Sequences that are read from one place: the pool, or the stage of a host tier."""

    dense: AttentionBackend  # over that place, for rows that see at most k rows
    metadata: Any  # of it; None if there are no such rows
    dense_rows: torch.Tensor | None  # those rows of the step; None for all
    pieces: tuple[Piece, ...]
    staged: bool = False
    kernels: RowStep | None = None
    """The rows of pieces, or all rows of decoding sequences, where kernels compute them."""

    @property
    def listed(self) -> tuple[list[int], list[slice]]:
        """The sequence and the rows of each piece."""
        return [piece.seq for piece in self.pieces], [piece.rows for piece in self.pieces]


@dataclass(frozen=True, slots=True)
class Decoding:
    """With a host tier, in plain torch: sequences with one new row each, which belong to no run."""

    rows: torch.Tensor  # [seqs] of the step
    kv_lens: tuple[int, ...]
    pieces: Mapping[int, Piece]  # those that see more than k rows, by place in `rows`
    hot: HotRows  # where their rows are


@dataclass(slots=True)
class Step:
    batch: AttentionBatch
    runs: tuple[Run, ...] = ()
    decoding: Decoding | None = None
    staging: StagedStep | None = None
    """With a host tier: what runs read from the stage."""
    selected: dict[int, torch.Tensor] = field(default_factory=dict)
    """Positions [rows, k] that a piece reads, by its first row, from the last layer with an index.
    """
    found: dict[int, torch.Tensor] = field(default_factory=dict)
    """Rows of the pool [1, k] at these positions, for decoding sequences with a host tier."""
    traced: dict[int, dict[int, Selection]] = field(default_factory=dict)
    """By row of the step, then by layer."""

    @property
    def pieces(self) -> Iterator[Piece]:
        for run in self.runs:
            yield from run.pieces
        if self.decoding is not None:
            yield from self.decoding.pieces.values()


def split_rows(
    batch: AttentionBatch,
    seqs: np.ndarray,
    topk: int,
    dense: AttentionBackend,
    groups: Collection[int] | None,
    *,
    table: torch.Tensor | None = None,
    staged: bool = False,
) -> Run:
    """Split the new rows of sequences [n] by whether they see more than k rows. `table`
    [all sequences, pages] says where pages are, if the layers' page tables do not."""
    past, lens = (batch.kv_lens - batch.query_lens)[seqs], batch.query_lens[seqs]
    counts = np.clip(topk - past, 0, lens)  # of dense rows
    if len(seqs) == batch.num_seqs and (counts == lens).all():
        return Run(dense, dense.prepare(batch, groups), None, (), staged)
    starts, ends = batch.cu_query[seqs] + counts, batch.cu_query[seqs + 1]
    pieces = []
    for i in np.flatnonzero(starts < ends).tolist():
        seq, rows = int(seqs[i]), slice(int(starts[i]), int(ends[i]))
        own = None if table is None else table[seq]
        pieces.append(Piece(seq, rows, int(past[i] + counts[i]), own, staged))
    metadata, dense_rows = None, []
    some = np.flatnonzero(counts)
    if len(some):
        metadata = dense.prepare(_part_of(batch, seqs[some], counts[some]), groups)
        dense_rows = [np.arange(batch.cu_query[seqs[i]], starts[i]) for i in some]
    listed = np.concatenate([*dense_rows, np.empty(0, dtype=np.int64)])
    return Run(dense, metadata, to_device(listed, batch.device), tuple(pieces), staged)


def _part_of(batch: AttentionBatch, seqs: np.ndarray, counts: np.ndarray) -> AttentionBatch:
    """The first `counts` new rows of some sequences, as a batch of their own."""
    index = to_device(seqs, batch.device)
    kv_lens = (batch.kv_lens - batch.query_lens)[seqs] + counts
    cu_query = np.concatenate(([0], np.cumsum(counts)))
    groups = tuple(
        replace(
            group,
            host_pages=group.host_pages[seqs],
            host_generations=group.host_generations[seqs],
            page_table=group.page_table[index],
        )
        for group in batch.groups
    )
    return replace(
        batch,
        query_lens=counts,
        kv_lens=kv_lens,
        cu_query=cu_query,
        groups=groups,
        prompt_rows=batch.prompt_rows[seqs],
        traced_rows=np.empty(0, dtype=np.int64),
        device_kv_lens=to_device(kv_lens.astype(np.int32), batch.device),
        device_cu_query=to_device(cu_query.astype(np.int32), batch.device),
        device_prompt_rows=batch.device_prompt_rows[index],
    )
