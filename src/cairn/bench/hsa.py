"""`cairn bench hsa`: sparse attention against the best dense backend, through the whole engine.

Every sparse preset has a dense twin of the same size. Weights are random, which affects only the
selection: neighbouring rows of a trained model read mostly the same pages, those of a random model
do not. Prefill is therefore timed twice: with the random model's selection, and with a synthetic
selection that has the locality of a trained model (2.5x fewer pages for 4 neighbouring rows, 3.4x
for 8).
"""

from __future__ import annotations

import argparse
import itertools
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from functools import partial
from statistics import median
from typing import Any

import numpy as np
import torch

from cairn.attention.batch import AttentionBatch
from cairn.attention.hsa.backend import HSABackend
from cairn.attention.hsa.chunk_rows import ChunkRows
from cairn.attention.hsa.kernel_sparse import KernelSparse, LayerRows
from cairn.bench.engines import (
    Running,
    as_subclass,
    first_token,
    measured,
    need_cuda,
    random_prompt,
)
from cairn.bench.profile import profile_call, profile_steps
from cairn.bench.report import show_rows, tell
from cairn.llm import LLM

Rows = Iterator[dict[str, Any]]

_CHUNK = 16704  # 261 pages: 16K tokens and their landmark rows in one step
_SHORT = 16384  # tokens; for shorter prompts host time matters as much, and it varies
_WARM_STEPS = 81  # more than a page, so that every kind of step has run
_STEPS = 126  # whole pages: every 63rd token brings a landmark row
_CHANGE = 0.195  # share of a row's pages that the previous row does not read


def command(arguments: argparse.Namespace) -> int:
    need_cuda("hsa")
    show_rows("hsa", tell(_run(arguments)), arguments.output)
    return 0


def _run(arguments: argparse.Namespace) -> Rows:
    parts, profile = arguments.parts, arguments.profile
    lengths = {"hils": arguments.lengths}
    lengths["dense"] = [n for n in arguments.lengths if n <= arguments.longest_dense_prefill]
    short = [length for length in arguments.lengths if length <= 65536]
    for kind, own in lengths.items():
        if own and ("decode" in parts or "batch" in parts):
            with _engine(model := f"{kind}-345m-hd128", max(own), 16) as llm:
                if "decode" in parts:
                    yield from _decode(llm, model, own, [1], profile)
                if "batch" in parts:
                    yield from _decode(llm, model, short, [16], profile)
    for kind, own in lengths.items():
        if own and ("prefill" in parts or "together" in parts):
            with _engine(model := f"{kind}-345m", max(own), 16) as llm:
                if "prefill" in parts:
                    yield from _prefill(llm, model, own, profile)
                if "together" in parts:
                    yield from _together(llm, model)
    for kind in lengths:
        if "7b" in parts:
            with _engine(model := f"{kind}-7b", max(short, default=8192), 8) as llm:
                yield from _decode(llm, model, short, [1, 8], profile)


def _engine(model: str, longest: int, requests: int) -> AbstractContextManager[LLM]:
    return measured(
        model=model,
        load_format="dummy",
        dtype="bfloat16",
        device="cuda",
        context_length=longest + 1024,
        max_running_requests=requests,
        chunked_prefill_size=_CHUNK,
    )


def _decode(
    llm: LLM, model: str, lengths: Sequence[int], batches: Sequence[int], profile: bool
) -> Rows:
    """Milliseconds of a decode step."""
    for length, batch in itertools.product(lengths, batches):
        llm.engine.scheduler.cache.tree.clear()
        running = Running(llm, length, max_tokens=512)
        running.grow_to(batch)
        gaps = running.step_gaps(_WARM_STEPS, _STEPS)
        row = {"what": "decode", "model": model, "context": length, "batch": batch}
        row["ms"] = round(1e3 * float(gaps.mean()), 3)
        row["median_ms"] = round(1e3 * float(np.median(gaps)), 3)
        row["max_ms"] = round(1e3 * float(gaps.max()), 3)
        if profile:
            row |= {"profile": profile_steps(llm, 16)}
        running.end()
        yield row


def _prefill(llm: LLM, model: str, lengths: Sequence[int], profile: bool) -> Rows:
    """Milliseconds to the first token of one prompt: the median, after one run that compiles."""
    kernels = _watched(llm)
    selections: dict[str, LocalSelection | None] = {"random weights": None}
    if kernels is not None:
        selections["trained locality"] = LocalSelection(kernels)
    for length, (name, revise) in itertools.product(lengths, selections.items()):
        if kernels is not None:
            kernels.revise = revise
        times = []
        for attempt in range(16 if length <= _SHORT else 4):
            prompt = random_prompt(llm, length, attempt)
            times.append(_cold(llm, [prompt]))
        row = {"what": "prefill", "model": model, "context": length, "batch": 1}
        row["ms"] = round(1e3 * median(times[1:]), 2)
        if kernels is not None:
            row |= {"selection": name, "reuse": kernels.reuse}
        if profile:
            row |= {"profile": profile_call(partial(_cold, llm, [prompt]))}
        if kernels is not None:
            kernels.revise = None
        yield row


def _together(llm: LLM, model: str) -> Rows:
    """16 prompts in one step, compared with one at a time."""
    for length in (128, 2048):
        together, alone = [], []
        for attempt in range(3):
            prompts = [random_prompt(llm, length, 100 * attempt + seed) for seed in range(16)]
            together.append(_cold(llm, prompts))
            alone.append(sum(_cold(llm, [prompt]) for prompt in prompts))
        ms, ratio = 1e3 * median(together[1:]), median(alone[1:]) / median(together[1:])
        row = {"what": "together", "model": model, "context": length, "batch": 16}
        yield {**row, "ms": round(ms, 2), "ratio": round(ratio, 2)}


def _cold(llm: LLM, prompts: Sequence[Sequence[int]]) -> float:
    """Seconds to the first tokens of prompts of which nothing is cached."""
    llm.engine.scheduler.cache.tree.clear()
    return first_token(llm, prompts)


def _watched(llm: LLM) -> WatchedSparse | None:
    """Replace the engine's sparse kernels by `WatchedSparse`; None if it has no such kernels."""
    backend = llm.engine.runner.stepper.backend
    if not isinstance(backend, HSABackend) or backend.kernels is None:
        return None
    backend.kernels = watched = as_subclass(WatchedSparse, backend.kernels)
    return watched


class WatchedSparse(KernelSparse):
    """Keeps what chunk rows read in the layer computed last. `revise` replaces what they select."""

    revise: Callable[[torch.Tensor, ChunkRows], torch.Tensor] | None = None
    _selected: torch.Tensor | None = None
    _read: tuple[torch.Tensor, ...] = ()

    @property
    def reuse(self) -> float | None:
        """Pages that rows selected, per page that blocks of neighbouring rows read together."""
        if self._selected is None:
            return None
        read = sum(int(counts.sum()) for counts in self._read)
        return round(float((self._selected >= 0).sum()) / max(read, 1), 2)

    def _select(
        self, own: LayerRows, lse: torch.Tensor, chunks: ChunkRows
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        selected, normalizer = super()._select(own, lse, chunks)
        if self.revise is not None:
            selected = self.revise(selected, chunks)
        self._selected, self._read = selected, ()
        return selected, normalizer

    def _attend_selected(self, *given: Any) -> torch.Tensor:
        counts = super()._attend_selected(*given)
        self._read += (counts,)
        return counts


class LocalSelection:
    """A synthetic selection in which every row keeps most pages of the previous row.

    The candidates are divided into k equal parts. Each row reads one page of each part, and
    sometimes changes it.
    """

    def __init__(self, kernels: KernelSparse) -> None:
        self._topk = kernels.topk
        self._drawn: dict[torch.Size, torch.Tensor] = {}
        self._newest: tuple[AttentionBatch, torch.Tensor] | None = None

    def __call__(self, selected: torch.Tensor, chunks: ChunkRows) -> torch.Tensor:
        pages = int(chunks.batch.kv_lens.max() - chunks.batch.query_lens.max())
        candidates = pages // chunks.batch.page_size - 9  # candidates of the chunk's first row
        if candidates < self._topk:
            return selected  # every candidate is selected anyway
        if self._newest is not None and self._newest[0] is chunks.batch:
            return self._newest[1]  # reuse the previous layer's selection, to cost no time
        if selected.shape not in self._drawn:
            self._drawn[selected.shape] = self._draw(selected)
        edges = torch.arange(self._topk + 1, device=selected.device) * candidates // self._topk
        places = edges[:-1] + (self._drawn[selected.shape] * edges.diff()).long()
        self._newest = chunks.batch, places.to(selected.dtype)
        return self._newest[1]

    def _draw(self, selected: torch.Tensor) -> torch.Tensor:
        """The place from 0 to 1 in each part that each row reads, [rows, kv_heads, k]."""
        rows = len(selected)
        device = selected.device
        generator = torch.Generator(device).manual_seed(0)
        changes = torch.rand(selected.shape, device=device, generator=generator) < _CHANGE
        # The row of the last change, and the place drawn there.
        row = torch.arange(rows, device=device)[:, None, None]
        last = torch.where(changes, row, 0).cummax(0).values
        return torch.rand(selected.shape, device=device, generator=generator).gather(0, last)
