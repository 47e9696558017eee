"""What a backend may know of a step: lengths, positions in the cache, page tables. No requests."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np
import torch


@dataclass(frozen=True, slots=True)
class GroupTables:
    """The page tables of one layer group, for the sequences of this step in their order."""

    page_table: torch.Tensor  # [seqs, max_pages] int32, NULL_PAGE where no page is held
    row_pages: torch.Tensor  # [rows] int64, page that each new row is written to
    host_pages: np.ndarray  # page_table on the host
    host_generations: np.ndarray  # [seqs, max_pages] int32, the life of each page in the table


@dataclass(frozen=True, slots=True)
class AttentionBatch:
    """Sequence s computes rows [kv_lens[s] - query_lens[s], kv_lens[s]) of its cache.

    Its new rows stand at [cu_query[s], cu_query[s + 1]) of the step's tensors. Lengths are host
    arrays: backends plan on the host, once per step and not per layer.
    """

    page_size: int
    query_lens: np.ndarray  # [seqs] int64
    kv_lens: np.ndarray  # [seqs] int64, the new rows included
    cu_query: np.ndarray  # [seqs + 1] int64
    row_offsets: torch.Tensor  # [rows] int64, row within its page
    groups: tuple[GroupTables, ...]
    device: torch.device
    prompt_rows: np.ndarray  # [seqs] int64, rows of the cache that hold the sequence's prompt
    traced_rows: np.ndarray  # [n] int64, rows of the step whose page selection is wanted
    device_kv_lens: torch.Tensor  # kv_lens on the device, int32
    device_cu_query: torch.Tensor  # cu_query on the device, int32

    def take(self, seqs: np.ndarray) -> tuple[AttentionBatch, np.ndarray]:
        """The batch of some of its sequences, and which rows of the step are theirs."""
        query_lens = self.query_lens[seqs]
        cu_query = np.concatenate(([0], np.cumsum(query_lens)))
        first = np.repeat(self.cu_query[seqs] - cu_query[:-1], query_lens)
        rows = first + np.arange(cu_query[-1])
        seq_index = to_device(seqs, self.device)
        row_index = to_device(rows, self.device)
        taken = replace(
            self,
            query_lens=query_lens,
            kv_lens=self.kv_lens[seqs],
            cu_query=cu_query,
            row_offsets=self.row_offsets[row_index],
            groups=tuple(
                GroupTables(
                    page_table=tables.page_table[seq_index],
                    row_pages=tables.row_pages[row_index],
                    host_pages=tables.host_pages[seqs],
                    host_generations=tables.host_generations[seqs],
                )
                for tables in self.groups
            ),
            prompt_rows=self.prompt_rows[seqs],
            traced_rows=np.flatnonzero(np.isin(rows, self.traced_rows)),
            device_kv_lens=self.device_kv_lens[seq_index],
            device_cu_query=to_device(cu_query.astype(np.int32), self.device),
        )
        return taken, rows

    @property
    def num_seqs(self) -> int:
        return len(self.query_lens)

    @property
    def num_rows(self) -> int:
        return int(self.cu_query[-1])


def to_device(array: np.ndarray, device: torch.device) -> torch.Tensor:
    """Without waiting for what the device is doing."""
    return torch.from_numpy(np.ascontiguousarray(array)).to(device, non_blocking=True)


class Scoring(NamedTuple):
    """What a layer of a model with landmarks of its own hands to attention, besides the query."""

    query: torch.Tensor  # [rows, heads, head_dim] scores landmarks
    prior: torch.Tensor  # [rows, heads, head_dim] pools a page's landmark, read at its last row
