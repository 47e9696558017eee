"""Helpers for launch sizes.

Triton's own versions also work on the host, but go through compiler wrappers on every call and take
thirty times as long. A step makes hundreds of these calls.
"""

from __future__ import annotations


def blocks_of(size: int, block: int) -> int:
    """Number of blocks needed for `size` elements."""
    return -(-size // block)


def power_of_two(least: int) -> int:
    """Smallest power of two that is at least `least`, which must be at least 1."""
    return 1 << (least - 1).bit_length()
