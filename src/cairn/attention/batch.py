"""What a backend knows about a step: lengths, cache positions and page tables, but no requests."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal, NamedTuple

import numpy as np
import torch

GraphKind = Literal["dense", "sparse", "resident", "kept", "both"]
"""How sparse layers attend in a recorded step. dense: all rows attend densely. sparse: all rows
select pages. resident: like sparse, with `AttentionBatch.resident`. kept: all rows read pages that
were selected before, with `AttentionBatch.kept`. both: some rows are dense, some sparse."""


NOT_SENT = torch.empty(0, device="meta")
"""Placeholder for the tensors of a batch that is not on the device yet."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupTables:
    """The page tables of one layer group, for the sequences of this step in order."""

    host_pages: np.ndarray  # [seqs, max_pages] int32, NULL_PAGE where no page is held
    host_generations: np.ndarray  # [seqs, max_pages] int32, generation of each page
    page_table: torch.Tensor = NOT_SENT  # [seqs, max_pages] int32, host_pages on the device
    row_pages: torch.Tensor = NOT_SENT  # [rows] page that each new row is written to
    generations: torch.Tensor | None = None
    """host_generations on the device, for backends that read them there."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AttentionBatch:
    """Sequence s computes rows [kv_lens[s] - query_lens[s], kv_lens[s]) of its cache.

    Its new rows are rows [cu_query[s], cu_query[s + 1]) of the step's tensors. Lengths are host
    arrays, because backends plan on the host, once per step and not per layer. The tensors are set
    when the batch is sent to the device.
    """

    page_size: int
    query_lens: np.ndarray  # [seqs] int64
    kv_lens: np.ndarray  # [seqs] int64, including the new rows
    cu_query: np.ndarray  # [seqs + 1] int64
    groups: tuple[GroupTables, ...]
    prompt_rows: np.ndarray
    """[seqs] int64, rows of the cache that attend as a prompt does: those of the sequence's prompt,
    or all rows of a sequence that is read densely."""
    traced_rows: np.ndarray  # [n] int64, rows of the step whose page selection is reported
    resident: bool = False
    """There is a host tier, and all pages of these sequences have a copy on the device."""
    recorded: GraphKind | None = None
    """The kind of graph that this batch is recorded for; None outside recording. While recording,
    the lengths on the host are placeholders: replayed steps set the lengths on the device."""
    kept: bool = False
    """Each sequence drafts, and may read the pages that the last step with a graph of kind "sparse"
    selected for it. It was a step of the same sequences, and of others behind them."""
    few: bool = False
    """It is recorded for steps in which sequences have few rows (`Graph.few`)."""
    device: torch.device = NOT_SENT.device
    row_offsets: torch.Tensor = NOT_SENT  # [rows] row within its page
    device_kv_lens: torch.Tensor = NOT_SENT  # kv_lens on the device, int32
    device_cu_query: torch.Tensor = NOT_SENT  # cu_query on the device, int32
    device_prompt_rows: torch.Tensor = NOT_SENT  # prompt_rows on the device, int32

    @property
    def num_seqs(self) -> int:
        return len(self.query_lens)

    @property
    def num_rows(self) -> int:
        return int(self.cu_query[-1])

    @property
    def decodes(self) -> bool:
        """Every sequence has one new row."""
        return bool(np.count_nonzero(self.query_lens != 1) == 0)

    def shortened(self, seqs: np.ndarray) -> AttentionBatch:
        """The same batch with an empty past for the sequences chosen by `seqs` [seqs] bool.

        For rows that are computed elsewhere: they cost almost nothing here, and their output is
        overwritten. Their host tables hold only the null page. Otherwise the first page of their
        past would look like a page that this step begins, and would be cleared.
        """
        kv_lens = np.where(seqs, self.query_lens, self.kv_lens)
        groups = tuple(
            replace(group, host_pages=np.where(seqs[:, None], 0, group.host_pages))
            for group in self.groups
        )
        on_device = to_device(kv_lens.astype(np.int32), self.device)
        return replace(self, kv_lens=kv_lens, device_kv_lens=on_device, groups=groups)


def unit_ids(
    table: np.ndarray, seqs: np.ndarray | int, places: np.ndarray, units: int
) -> np.ndarray:
    """Ids, int64, of the units at `places` of sequences, whose pages are in table [seqs, pages].
    Unit j of page p is p * units + j."""
    ids: np.ndarray = table[seqs, places // units].astype(np.int64) * units + places % units
    return ids


_AT_ONCE = 65536  # bytes; CUDA buffers copies up to this size, larger ones wait for the stream


def to_device(array: np.ndarray, device: torch.device) -> torch.Tensor:
    """A copy on the device, made without waiting for work on the device."""
    tensor = torch.from_numpy(np.ascontiguousarray(array))
    if device.type != "cuda":
        return tensor.to(device)
    return send(array, torch.empty(tensor.shape, dtype=tensor.dtype, device=device))


def send(array: np.ndarray, target: torch.Tensor) -> torch.Tensor:
    """Overwrite a contiguous tensor without waiting for work on its device, and return it."""
    tensor = torch.from_numpy(np.ascontiguousarray(array))
    piece = _AT_ONCE // tensor.itemsize
    if tensor.numel() <= piece:
        return target.copy_(tensor, non_blocking=True)
    for begin in range(0, tensor.numel(), piece):
        part = slice(begin, begin + piece)
        target.view(-1)[part].copy_(tensor.view(-1)[part], non_blocking=True)
    return target


class Scoring(NamedTuple):
    """What layers with their own landmarks pass to attention in addition to the query."""

    query: torch.Tensor  # [rows, heads, head_dim] to score landmarks with
    prior: torch.Tensor  # [rows, heads, head_dim] to pool a page's landmark with, at its last row


class IndexQuery(NamedTuple):
    """What layers with an index pass to attention in addition to the query. A row's score for a
    query is the sum over heads of weight * relu(query . key)."""

    query: torch.Tensor  # [rows, index heads, width]
    weights: torch.Tensor  # [rows, index heads], with all scales
    keys: torch.Tensor | None  # [rows, width] of the new rows; None if they are stored
