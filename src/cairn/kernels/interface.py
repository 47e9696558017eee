"""What callers of the kernels name without importing triton."""

from __future__ import annotations

from typing import Literal, NamedTuple

import torch

MOST_HOT_SLOTS = 32768
"""Slots of a layer's hot cache for each kv head: one program looks at all of them."""
COPY_THREADS = 128
"""Of a program that copies pages between host and device, where nothing else is asked for."""

FEW_ROWS = 8
"""Products of at most so many rows have a kernel of their own; of 16, cuBLAS is faster."""

Pooling = Literal["hils", "last", "box", "mean"]
"""Landmarks that a kernel makes of a page's keys: read by the page's last query, the last key
itself, largest and smallest value of each dimension, the mean."""


class ScoringHeads(NamedTuple):
    """Queries that score pages, as projected."""

    projected: torch.Tensor  # [rows, heads * head_dim], of any row stride
    add_query: bool
    """They are what is projected plus the query, before its norm."""
    norm_weight: torch.Tensor  # [head_dim]


class Located(NamedTuple):
    """Where selected pages are, some of them still on their way."""

    pages: torch.Tensor  # [seqs, kv_heads, k] int32 page of the pool, negative while it is copied
    arrived: torch.Tensor  # [kv_heads, slots] int32, how much of those is there
    pieces: int
    """So many arrive of each; 0: nobody need wait."""
    first_slot: int
    """Page of the pool that is slot 0."""
