"""Several host arrays in one copy to the device, each where kernels expect it: on 16 bytes.

Triton compiles a kernel once for pointers on 16 bytes and once for others. An array whose place
followed from the lengths of those before it would be one or the other from step to step.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

_WORDS = 4  # of an int32 each, that make 16 bytes
_TABLE_PAGES = 16  # likewise of a whole table's rows, and long tables grow rarely


def pack(arrays: Sequence[np.ndarray]) -> np.ndarray:
    """One int32 array of all of them, with room between them that is not used."""
    begins = _begins([len(array) for array in arrays])
    packed = np.zeros(begins[-1], dtype=np.int32)
    for begin, array in zip(begins[:-1], arrays, strict=True):
        packed[begin : begin + len(array)] = array
    return packed


def unpack(packed: torch.Tensor, lengths: Sequence[int]) -> list[torch.Tensor]:
    """The arrays of these lengths that were packed, as views."""
    begins = _begins(lengths)
    return [
        packed[begin : begin + length] for begin, length in zip(begins[:-1], lengths, strict=True)
    ]


def table_width(pages: int) -> int:
    """Entries of a table's row for so many pages."""
    return -(-pages // _TABLE_PAGES) * _TABLE_PAGES


def _begins(lengths: Sequence[int]) -> list[int]:
    """Where each begins, and the end of all."""
    begins = [0]
    for length in lengths:
        begins.append(begins[-1] + -(-length // _WORDS) * _WORDS)
    return begins
