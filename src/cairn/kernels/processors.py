"""How many programs a GPU runs at once, for kernels whose programs share the work."""

from __future__ import annotations

from functools import cache
from typing import NamedTuple

import torch

_ELSEWHERE = 4  # multiprocessors of a device that is no GPU, in tests
_REGISTERS = 65536  # of a multiprocessor


class Staying(NamedTuple):
    programs: int
    registers: int
    """Most registers of a thread, so that all programs run at once."""


def staying(device: torch.device, warps: int, tiles: int) -> Staying:
    """Persistent programs of `warps` warps, which share the tiles about equally."""
    each_processor = max(1, 12 // warps) if warps <= 4 else max(1, 16 // warps)
    there = processors(device) * each_processor
    most = -(-tiles // there)  # tiles of a program
    registers = _REGISTERS // (each_processor * warps * 32) // 8 * 8
    return Staying(-(-tiles // most), registers)


@cache
def processors(device: torch.device) -> int:
    """Multiprocessors of a GPU."""
    if device.type != "cuda":
        return _ELSEWHERE
    return torch.cuda.get_device_properties(device).multi_processor_count
