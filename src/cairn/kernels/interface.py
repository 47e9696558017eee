"""Names that callers of the kernels need without importing triton."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, NamedTuple

import torch

MOST_HOT_SLOTS = 32768
"""Most slots per kv head in a layer's hot cache: one program looks at all of them."""
HOT_AGES = 256
"""Number of distinct ages of hot slots, two for each plan; older slots count as equally old."""
COPY_THREADS = 128
"""Default number of threads of a program that copies pages between host and device."""

MOST_SCORES = 2**21 - 128
"""Most scores of a row among which the best are chosen."""

LISTED_ROWS = 512
"""Most rows of a step with chunks that a kernel lists, so that the step can be recorded."""

Norm = tuple[torch.Tensor, float]
"""Weight and epsilon of an RMS norm, for products that apply one to their rows first."""


def is_loadable(x: torch.Tensor) -> bool:
    """Whether kernels in CUDA C++ can load rows: they have 16 bits, and are aligned."""
    return x.dtype in (torch.bfloat16, torch.float16) and x.data_ptr() % 16 == 0


FEW_ROWS = 8
"""Products of at most this many rows use our own kernels, in which a tensor core multiplies tiles
of 8 rows. With 16 rows cuBLAS is faster, except for codes. Products of more rows with an FP8 matrix
round the rows to FP8."""

STREAMED_ROWS = 16
"""The same for matrices in bfloat16 that are large enough, see `streams`."""


def streams(outputs: int, columns: int) -> bool:
    """Whether a matrix has enough outputs for the kernel that streams tiles of 64 of them, and so
    many columns that it pays. Measured on an H200."""
    return outputs >= 5120 and columns >= 1536 and columns % 128 == 0


NARROW_ROWS = 16
"""Products of at most this many rows with a matrix of few outputs in float32 use our own kernel."""

E4M3_LARGEST = 448.0
"""The largest number that FP8 of type e4m3 has."""

BLOCK_OUTPUTS = 128
"""Outputs of a block in checkpoints that have scales for blocks of outputs and columns."""


def of_blocks(scale: torch.Tensor) -> bool:
    """Whether the outputs of each block have the same scales [outputs, groups]."""
    firsts = scale[::BLOCK_OUTPUTS].repeat_interleave(BLOCK_OUTPUTS, 0)
    return torch.equal(firsts[: len(scale)], scale)


Pooling = Literal["hils", "last", "box", "mean", "spread"]
"""How a kernel makes a landmark from a page's keys.

hils: attention of the page's last query over the keys; last: the last key; box: the largest and
smallest value of each dimension; mean: the mean key; spread: mean and variance of each dimension.
"""


@dataclass(frozen=True, slots=True)
class Routing:
    """How experts are chosen and weighted."""

    experts: int
    per_token: int
    scoring: Literal["softmax", "sigmoid"] = "softmax"
    groups: int = 1
    """Number of groups; experts of a group have consecutive ids."""
    kept_groups: int = 1
    """Experts are chosen from the best groups only."""
    normalize: bool = False
    """Divide the weights of the chosen experts by their sum."""
    scale: float = 1.0
    has_bias: bool = False
    """A bias on each expert's score decides which are chosen. It is no part of their weights."""


class Normed(NamedTuple):
    """A row to be stored, as it was projected, and its norm."""

    row: torch.Tensor  # [rows, width], of any row stride
    weight: torch.Tensor  # [width]
    eps: float
    key: torch.Tensor | None = None
    """[rows, rope], of the same row stride: rotated and stored behind the RMS norm of the row.
    Without it, the first `rope` columns of the row's norm are rotated."""
    bias: torch.Tensor | None = None
    """[width], if there is no `key`: the norm has a mean and this bias."""


class ScoringHeads(NamedTuple):
    """Projected queries that score pages, before norm and rotation."""

    projected: torch.Tensor  # [rows, heads * head_dim], of any row stride
    add_query: bool
    """Add the attention query, before its norm, to the projection."""
    norm_weight: torch.Tensor  # [head_dim]


class Located(NamedTuple):
    """Where selected pages are in the pool; some may still be in the middle of a copy."""

    pages: torch.Tensor  # [seqs, kv_heads, k] int32 page of the pool, negated while it is copied
    arrived: torch.Tensor  # [kv_heads, slots] int32, pieces of each slot's page that have arrived
    pieces: int
    """Pieces per page; 0 if there is nothing to wait for."""
    first_slot: int
    """The page of the pool that is slot 0."""


class RowInputs(NamedTuple):
    """Inputs of a recorded step with one row per sequence, all int32, [rows] except as noted."""

    seeds: torch.Tensor  # int64
    places: torch.Tensor  # where the sampled token is stored
    sources: torch.Tensor  # where the token to compute is stored
    positions: torch.Tensor
    lengths: torch.Tensor
    offsets: torch.Tensor  # row within its page
    pages: tuple[torch.Tensor, ...]  # page that the row is written to, by layer group
    kv_lens: torch.Tensor
    tables: torch.Tensor  # [groups, rows, pages]
