"""What `rope_kv` makes scoring queries of. Apart from it, since models name it without triton."""

from __future__ import annotations

from typing import NamedTuple

import torch


class ScoringHeads(NamedTuple):
    """Queries that score pages, as projected."""

    projected: torch.Tensor  # [rows, heads * head_dim], of any row stride
    add_query: bool
    """They are what is projected plus the query, before its norm."""
    norm_weight: torch.Tensor  # [head_dim]
