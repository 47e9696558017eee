"""Python's garbage collector before and after a measurement."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager

import torch


@contextmanager
def settled() -> Iterator[None]:
    """Freeze existing objects, as a server does, so that collections inside do not scan them."""
    gc.collect()
    gc.freeze()
    try:
        yield
    finally:
        gc.unfreeze()


def release() -> None:
    """Free the memory of closed engines."""
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
