"""Sizes of launches. Triton's functions of this kind may be called on the host too, but go through
wrappers of its compiler every time, which takes thirty times as long; a step has hundreds."""

from __future__ import annotations


def blocks_of(size: int, block: int) -> int:
    """Blocks that hold so many."""
    return -(-size // block)


def power_of_two(least: int) -> int:
    """The smallest that is no less; of at least 1."""
    return 1 << (least - 1).bit_length()
