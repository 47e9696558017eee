"""Counts the kernels that Triton compiles or loads from its disk cache.

Kernels compiled at start and while serving are counted separately: the latter delay requests.
"""

from __future__ import annotations

import logging
from typing import Any, NamedTuple

import torch


class CompilationCounts(NamedTuple):
    start: int = 0
    serving: int = 0


class Compilations:
    """Triton's compilation listener until it is closed. It also calls the previous listener."""

    def __init__(self, device: torch.device) -> None:
        """Counts nothing unless `device` is a CUDA device and triton is installed."""
        self.counts = CompilationCounts()
        self._ready = False
        self._before: Any = None
        self._knobs: Any = None
        if device.type == "cuda":
            try:
                from triton import knobs
            except ImportError:
                return
            self._knobs, self._before = knobs.compilation, knobs.compilation.listener
            self._knobs.listener = self

    def __call__(self, **compiled: Any) -> None:
        start, serving = self.counts
        if self._ready:
            self.counts = CompilationCounts(start, serving + 1)
            # The warm-up missed this kernel, so requests had to wait for it.
            name = getattr(compiled.get("src"), "name", "a kernel")
            logging.getLogger("cairn").warning("%s was compiled or loaded while serving", name)
        else:
            self.counts = CompilationCounts(start + 1, serving)
        if self._before is not None:
            self._before(**compiled)

    def mark_ready(self) -> None:
        """Count all kernels from now on as compiled while serving."""
        self._ready = True

    def close(self) -> None:
        if self._knobs is not None and self._knobs.listener is self:
            self._knobs.listener = self._before
