"""Python's garbage collector before and after a measurement."""

from __future__ import annotations

import gc

import torch


def settle() -> None:
    """As a server does: what is there now stays, and no step waits for it to be gone through."""
    gc.collect()
    gc.freeze()


def release() -> None:
    """Give memory of engines that are closed back."""
    gc.unfreeze()
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
