"""What a backend may know of a step: lengths, positions in the cache, page tables. No requests."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch


@dataclass(frozen=True, slots=True)
class GroupTables:
    """The page tables of one layer group, for the sequences of this step in their order."""

    page_table: torch.Tensor  # [seqs, max_pages] int32, NULL_PAGE where no page is held
    row_pages: torch.Tensor  # [rows] int64, page that each new row is written to


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

    @property
    def num_seqs(self) -> int:
        return len(self.query_lens)

    @property
    def num_rows(self) -> int:
        return int(self.cu_query[-1])
