"""Counts kernels that Triton compiles or loads from its cache on disk: before the engine is ready,
and while it serves, when a request waits for it."""

from __future__ import annotations

import logging
from typing import Any, NamedTuple

import torch


class CompilationCounts(NamedTuple):
    start: int = 0
    serving: int = 0


class Compilations:
    """Triton's listener for as long as it is open; it calls the listener before it, too."""

    def __init__(self, device: torch.device) -> None:
        """Counts nothing where the device is not one that kernels are compiled for."""
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
            # Requests waited for it: the warm-up does not know of this kernel.
            name = getattr(compiled.get("src"), "name", "a kernel")
            logging.getLogger("cairn").warning("%s was compiled or loaded while serving", name)
        else:
            self.counts = CompilationCounts(start + 1, serving)
        if self._before is not None:
            self._before(**compiled)

    def mark_ready(self) -> None:
        """What comes from now on is counted as serving."""
        self._ready = True

    def close(self) -> None:
        if self._knobs is not None and self._knobs.listener is self:
            self._knobs.listener = self._before
