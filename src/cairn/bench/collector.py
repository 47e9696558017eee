"""Python's garbage collector before and after a measurement."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager

import torch


@contextmanager
def settled() -> Iterator[None]:
    """As in a server: what is there now stays, and no step waits for it to be gone through."""
    gc.collect()
    gc.freeze()
    try:
        yield
    finally:
        gc.unfreeze()


def release() -> None:
    """Give memory of engines that are closed back."""
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
