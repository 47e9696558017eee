"""`cairn bench hsa`: sparse attention against the best dense backend, through the whole engine.

Every sparse preset has a dense twin of the same size. Weights are random, which affects only the
selection: neighbouring rows of a trained model read mostly the same pages, those of a random model
do not. Prefill is therefore timed twice: with the random model's selection, and with a synthetic
selection that has the locality of a trained model (2.5x fewer pages for 4 neighbouring rows, 3.4x
for 8).
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import numpy as np
import torch

from cairn.attention.batch import AttentionBatch
from cairn.attention.hsa.backend import HSABackend
from cairn.attention.hsa.kernel_sparse import ChunkRows, KernelSparse, LayerRows
from cairn.bench.collector import release, settled
from cairn.bench.profile import profile_call, profile_steps
from cairn.bench.subclass import as_subclass
from cairn.bench.tier_engines import prompt as random_prompt
from cairn.engine.sampling_params import SamplingParams
from cairn.llm import LLM

PARTS = ("decode", "batch", "prefill", "together", "7b")

_CHUNK = 16704  # 261 pages: 16K tokens and their landmark rows in one step
_SHORT = 16384  # tokens; for shorter prompts host time matters as much, and it varies
_WARM_STEPS = 80  # more than a page, so that every kind of step has run
_CHANGE = 0.195  # share of a row's pages that the previous row does not read


def run(
    parts: Sequence[str], lengths: Sequence[int], longest_dense_prefill: int, *, profile: bool
) -> Iterator[dict[str, Any]]:
    short = [length for length in lengths if length <= 65536]
    dense = [length for length in lengths if length <= longest_dense_prefill]
    for kind, own in (("hils", lengths), ("dense", dense)):
        if own and ("decode" in parts or "batch" in parts):
            yield from _decode_part(f"{kind}-345m-hd128", parts, own, short, profile)
    for kind, own in (("hils", lengths), ("dense", dense)):
        if own and ("prefill" in parts or "together" in parts):
            yield from _prefill_part(f"{kind}-345m", parts, own, profile)
    for kind in ("hils", "dense"):
        if "7b" in parts:
            with _llm(f"{kind}-7b", max(short, default=8192), 8) as llm, settled():
                yield from _decode(llm, f"{kind}-7b", short, [1, 8], profile)
            release()


def _decode_part(
    model: str, parts: Sequence[str], lengths: Sequence[int], short: Sequence[int], profile: bool
) -> Iterator[dict[str, Any]]:
    with _llm(model, max(lengths), 16) as llm, settled():
        if "decode" in parts:
            yield from _decode(llm, model, lengths, [1], profile)
        if "batch" in parts:
            yield from _decode(llm, model, short, [16], profile)
    release()


def _prefill_part(
    model: str, parts: Sequence[str], lengths: Sequence[int], profile: bool
) -> Iterator[dict[str, Any]]:
    with _llm(model, max(lengths), 16) as llm, settled():
        if "prefill" in parts:
            yield from _prefill(llm, model, lengths, profile)
        if "together" in parts:
            yield from _together(llm, model)
    release()


def _llm(model: str, longest: int, requests: int) -> LLM:
    return LLM(
        model,
        load_format="dummy",
        dtype="bfloat16",
        device="cuda",
        context_length=longest + 1024,
        max_running_requests=requests,
        chunked_prefill_size=_CHUNK,
    )


def _decode(
    llm: LLM,
    model: str,
    lengths: Sequence[int],
    batches: Sequence[int],
    profile: bool,
    steps: int = 127,
) -> Iterator[dict[str, Any]]:
    """Milliseconds of a decode step."""
    frontend = llm.frontend
    endless = SamplingParams(max_tokens=512, ignore_eos=True)
    for length in lengths:
        for batch in batches:
            llm.engine.scheduler.cache.tree.clear()
            requests = []
            for seed in range(batch):
                prompt = random_prompt(length, seed, llm.engine.spec.vocab_size)
                requests += frontend.prepare(prompt, endless)
            frontend.submit(requests)
            while not all(request.num_output for request in requests):
                frontend.step()
            for _ in range(_WARM_STEPS):
                frontend.step()
            # Steps overlap, so measure the time from one step to the next. Every 63rd token brings
            # a landmark row, so take the mean over whole pages.
            moments = []
            for _ in range(steps):
                frontend.step()
                moments.append(time.perf_counter())
            gaps = np.diff(moments)
            row = {"what": "decode", "model": model, "context": length, "batch": batch}
            row["ms"] = round(1e3 * float(np.mean(gaps)), 3)
            row["median_ms"] = round(1e3 * float(np.median(gaps)), 3)
            row["max_ms"] = round(1e3 * float(np.max(gaps)), 3)
            if profile:
                row |= {"profile": profile_steps(llm, 16)}
            frontend.abort_all()
            yield row


def _prefill(
    llm: LLM, model: str, lengths: Sequence[int], profile: bool
) -> Iterator[dict[str, Any]]:
    """Milliseconds to the first token of one prompt: the median, after one run that compiles."""
    kernels = _watched(llm)
    selections: dict[str, LocalSelection | None] = {"random weights": None}
    if kernels is not None:
        selections["trained locality"] = LocalSelection(kernels)
    for length in lengths:
        for name, revise in selections.items():
            if kernels is not None:
                kernels.revise = revise
            times = []
            for attempt in range(16 if length <= _SHORT else 4):
                prompt = random_prompt(length, attempt, llm.engine.spec.vocab_size)
                times.append(_first_token(llm, [prompt]))
            row = {"what": "prefill", "model": model, "context": length, "batch": 1}
            row["ms"] = round(1e3 * float(np.median(times[1:])), 2)
            if kernels is not None:
                row |= {"selection": name, "reuse": kernels.reuse}
            if profile:
                again = partial(_first_token, llm, [prompt])
                row |= {"profile": profile_call(again)}
            if kernels is not None:
                kernels.revise = None
            yield row


def _together(llm: LLM, model: str) -> Iterator[dict[str, Any]]:
    """16 prompts in one step, compared with one at a time."""
    for length in (128, 2048):
        times: dict[str, list[float]] = {"together": [], "alone": []}
        for attempt in range(3):
            vocab = llm.engine.spec.vocab_size
            prompts = [random_prompt(length, 100 * attempt + seed, vocab) for seed in range(16)]
            times["together"].append(_first_token(llm, prompts))
            times["alone"].append(sum(_first_token(llm, [prompt]) for prompt in prompts))
        together, alone = (float(np.median(values[1:])) for values in times.values())
        row: dict[str, Any] = {"what": "together", "model": model, "context": length, "batch": 16}
        yield row | {"ms": round(1e3 * together, 2), "ratio": round(alone / together, 2)}


def _first_token(llm: LLM, prompts: list[list[int]]) -> float:
    llm.engine.scheduler.cache.tree.clear()
    torch.cuda.synchronize()
    begin = time.perf_counter()
    llm.generate(prompts, SamplingParams(max_tokens=1, ignore_eos=True))
    return time.perf_counter() - begin


def _watched(llm: LLM) -> WatchedSparse | None:
    """Replace the engine's sparse kernels by `WatchedSparse`; None if it has no such kernels."""
    backend = llm.engine.runner.backend
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
