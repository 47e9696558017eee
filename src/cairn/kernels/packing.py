"""Packs several host arrays for one copy to the device, each aligned to 16 bytes.

Triton compiles a kernel once for 16-byte aligned pointers and once for others. Without padding, an
array's alignment would depend on the lengths of the arrays before it and change between steps.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

_WORDS = 4  # int32 values in 16 bytes
_TABLE_PAGES = 16  # table rows are padded to this: they stay aligned and rarely change width


def pack(arrays: Sequence[np.ndarray]) -> np.ndarray:
    """Concatenate the arrays into one int32 array, with padding between them."""
    begins = _begins([len(array) for array in arrays])
    packed = np.zeros(begins[-1], dtype=np.int32)
    for begin, array in zip(begins[:-1], arrays, strict=True):
        packed[begin : begin + len(array)] = array
    return packed


def unpack(packed: torch.Tensor, lengths: Sequence[int]) -> list[torch.Tensor]:
    """Return the packed arrays of these lengths as views."""
    begins = _begins(lengths)
    return [
        packed[begin : begin + length] for begin, length in zip(begins[:-1], lengths, strict=True)
    ]


def table_width(pages: int) -> int:
    """Number of entries in a table row for `pages` pages, with padding."""
    return -(-pages // _TABLE_PAGES) * _TABLE_PAGES


def _begins(lengths: Sequence[int]) -> list[int]:
    """Start of each array, then the total length."""
    begins = [0]
    for length in lengths:
        begins.append(begins[-1] + -(-length // _WORDS) * _WORDS)
    return begins
