"""Pages of 8 bits, and engines on kernels without a GPU, for tests in Triton's interpreter."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest
import torch

from cairn.attention.dsa_kernels import RowKernels
from cairn.attention.hsa.kernel_sparse import KernelSparse
from cairn.attention.triton_backend import TritonBackend
from cairn.engine import sampler
from cairn.engine.graphs import StepGraphs
from cairn.kernels import sparse_decode, sparse_scratch, sparse_select
from cairn.kernels.fp8_rows import quantize, rows_and_scales, scale_rows
from cairn.models import decoder


def narrow_pages(pool: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """The same pages with rows of 8 bits. NaN stays NaN, in scales too."""
    pages, heads, size, dim = pool.shape
    found = torch.empty(pages, heads, size + scale_rows(size, dim), dim, dtype=dtype)
    rows, scales = rows_and_scales(found)
    stored, own = quantize(pool, dtype=dtype)
    rows.copy_(stored)
    scales.copy_(own.masked_fill(pool.isnan().any(-1), float("nan")))
    return found


class _Rerun:
    """Stands in for a CUDA graph: runs the step again, on the same buffers."""

    def __init__(self, call: Callable[[], tuple[torch.Tensor, torch.Tensor]]) -> None:
        self._call = call
        self.result: tuple[torch.Tensor, torch.Tensor] | None = None
        self.replays = 0

    def replay(self) -> None:
        self.replays += 1
        assert self.result is not None
        for kept, new in zip(self.result, self._call(), strict=True):
            kept.copy_(new)


def rerun_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let steps that were recorded run again where CUDA would replay them. Kernels look up tokens,
    and the last layer computes only the rows that are asked for, in short prompts too."""

    def capture(own: StepGraphs, call: Callable[[], Any]) -> tuple[_Rerun, Any]:
        rerun = _Rerun(call)
        step: Any = call
        if len(step.args) == 1:  # its logits go to a place that steps share
            (step,) = step.args
        seqs = len(step.args[1].places)
        rerun.result = torch.zeros(seqs, 64), torch.zeros(seqs, dtype=torch.int64)
        return rerun, rerun.result

    monkeypatch.setattr(StepGraphs, "_capture", capture)
    monkeypatch.setattr(StepGraphs, "_aside", nullcontext)
    monkeypatch.setattr(sampler, "has_kernels", lambda _: True)
    monkeypatch.setattr(decoder, "CUT_ROWS", 8)


def use_few_programs(monkeypatch: pytest.MonkeyPatch) -> None:
    """They are slow here. Of the strips of candidates, the first is never empty and the last is."""
    for rows in ("_THRESHOLD_ROWS", "_CHOOSE_ROWS"):
        monkeypatch.setattr(sparse_select, rows, 64)
    for module in (sparse_decode, sparse_scratch):
        monkeypatch.setattr(module, "strips_of", lambda *_: 2)


def use_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    """Engines choose kernels as they do on a GPU."""
    monkeypatch.setattr(TritonBackend, "unavailable_reason", staticmethod(lambda _: None))
    for kernels in (KernelSparse, RowKernels):
        monkeypatch.setattr(kernels, "refusal", staticmethod(lambda *_: None))
