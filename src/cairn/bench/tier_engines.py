"""Shared parts of `cairn bench tier`: engines with and without the host tier at the same device
budget, requests with separate contexts, and the time of a decode step."""

from __future__ import annotations

import json
import random
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from cairn.attention.hsa.backend import HSABackend
from cairn.bench.collector import release, settled
from cairn.bench.subclass import as_subclass
from cairn.config import EngineConfig
from cairn.engine.locate import locate
from cairn.engine.request import Request
from cairn.engine.resolve import resolve_dtype
from cairn.engine.sampling_params import SamplingParams
from cairn.llm import LLM
from cairn.memory.cache import PagedCache
from cairn.memory.device_swap import DeviceSwap
from cairn.memory.hisparse import TierStats
from cairn.models.registry import read_spec

if TYPE_CHECKING:
    from cairn.kernels.swap_in import Misses

_GIB = 2**30
_SPARE = 1.02  # factor on host memory, for pages that are not full yet
SMALL_BATCHES = (1, 2, 4)
PROFILED_STEPS = 16


@dataclass(frozen=True, slots=True, kw_only=True)
class TierBench:
    """The options of the benchmark."""

    device: str = "cuda"
    dtype: str = "bfloat16"
    model: str = "qwen3-0.6b-long"
    """A preset with random weights, for everything except hit rates."""
    kv_cache_gib: float = 16.0
    contexts: Sequence[int] = (131072, 32768)
    concurrency: Sequence[int] = (1, 2, 4, 7, 14, 28)
    most_host_gib: float = 104.0
    """Limit on host memory; fewer requests run at once if it does not hold them all."""
    short_context: int = 16384
    prefix: int = 25000
    longest: int = 262144
    chunk: int = 16384
    page_size: int = 64
    topk: int = 32
    window: int = 512
    change: float = 0.03
    """Share of a decode row's pages that change from token to token. 0 uses the selection of the
    random weights, which is hardly ever the same."""
    warm_steps: int = 80
    steps: int = 64
    text_models: Sequence[str] = ("smollm2", "cairn-nano")
    text: str | None = None
    text_tokens: int = 8000
    text_rows: int = 256
    text_topk: Sequence[int] = (16, 32)
    hot_sizes: Sequence[float] = (1.0, 2.0, 4.0)
    burst_rows: Sequence[int] = (1, 4, 16)
    bandwidth_gib: float = 2.0
    profile: bool = False

    def length(self, context: int, requests: int) -> int:
        """Tokens of a request that runs until all measurements of its engine are done."""
        each = self.warm_steps + 2 * self.steps + (PROFILED_STEPS if self.profile else 0)
        measurements = max(len(self.concurrency), len(SMALL_BATCHES))
        filling = requests * (-(-context // self.chunk) + 1)
        return context + measurements * each + filling + 2 * self.page_size

    def host_gib(self, context: int, requests: int) -> float:
        """GiB of host memory that `requests` contexts take."""
        return _SPARE * requests * self.length(context, requests) * self.token_bytes() / _GIB

    def fitting(self, context: int) -> int:
        """The most of the requested contexts that host memory holds."""
        most = max(self.concurrency)
        while most > 1 and self.host_gib(context, most) > self.most_host_gib:
            most -= 1
        return most

    def token_bytes(self) -> int:
        """Bytes of the keys and values of one token, in all layers."""
        source = locate(EngineConfig(model=self.model))
        spec = read_spec(source.config)
        dtype = resolve_dtype(self.dtype, source.config, torch.device(self.device))
        return sum(group.page_bytes(1) for group in spec.groups(dtype))


@contextmanager
def engine(
    bench: TierBench,
    context: int,
    requests: int,
    *,
    tier: bool,
    own_contexts: int | None = None,
    drifting: bool = False,
    length: int | None = None,
) -> Iterator[LLM]:
    """An engine for `requests` requests of `context` tokens.

    `own_contexts` of them have a separate context, by default all. With a tier, host memory is as
    large as they need. They may grow to `length` tokens, by default until everything is measured.
    """
    options: dict[str, Any] = {
        "load_format": "dummy",
        "dtype": bench.dtype,
        "device": bench.device,
        "attention_backend": "hsa",
        "hsa_topk": bench.topk,
        "hsa_window": bench.window,
        "page_size": bench.page_size,
        "context_length": length or bench.length(context, requests),
        "kv_cache_gib": bench.kv_cache_gib,
        "max_running_requests": requests,
        "chunked_prefill_size": bench.chunk,
    }
    if tier:
        host = min(bench.most_host_gib, bench.host_gib(context, own_contexts or requests))
        options["enable_hisparse"] = True
        options["hisparse_config"] = json.dumps({"host_gib": host})
    with LLM(bench.model, **options) as llm:
        if tier and drifting and bench.change > 0:
            drift(llm, bench.change)
        with settled():
            yield llm
    release()


def drift(llm: LLM, change: float) -> None:
    """Let decode rows select synthetic pages, if kernels select the pages."""
    runner = llm.engine.runner
    backend = runner.backend
    if isinstance(backend, HSABackend) and backend.kernels is not None:
        from cairn.bench.drift import DriftingSparse

        backend.kernels = drifting = as_subclass(DriftingSparse, backend.kernels)
        drifting.drift_by(change)
        if runner.graphs is not None:
            runner.record_graphs(most_rows=0)


def drop_copies(cache: PagedCache) -> None:
    """Free every device copy that no request holds. Host memory keeps all pages."""
    while cache.copies is not None and cache.tree.evictable_pages(cache._frame_group):
        cache._evict(cache._frame_group)


class _NotCopying(DeviceSwap):
    """Plans the copies for decode rows but does not make them, so rows read wrong data."""

    nothing: Misses

    def _copy_missed(self, layer: int, misses: Misses) -> int:
        super()._copy_missed(layer, self.nothing)
        return 0


def prompt(tokens: int, seed: int, vocab: int) -> list[int]:
    draw = random.Random(seed)
    return [draw.randrange(vocab) for _ in range(tokens)]


class Running:
    """Requests that generate endlessly, each with its own context."""

    def __init__(self, llm: LLM, context: int) -> None:
        self._llm = llm
        self._frontend = llm.frontend
        self._context = context
        self._params = SamplingParams(
            max_tokens=llm.engine.max_tokens - context, ignore_eos=True, temperature=0.0
        )
        self.requests: list[Request] = []

    @property
    def room(self) -> int:
        """Number of requests that fit at once at full length."""
        cache = self._llm.engine.scheduler.cache
        pages = cache.geometry.pages(self._llm.engine.max_tokens)
        most = self._llm.engine.scheduler.limits.max_running_requests
        return min(most, cache.allocators[cache._page_group].num_pages // pages)

    def grow_to(self, count: int) -> float:
        """Grow to `count` running requests; returns the seconds that took."""
        begin = time.perf_counter()
        vocab = self._llm.engine.spec.vocab_size
        while len(self.requests) < count:
            tokens = prompt(self._context, len(self.requests), vocab)
            new = self._frontend.prepare(tokens, self._params)
            self._frontend.submit(new)
            self.requests += new
        while not all(request.num_output for request in self.requests):
            self._frontend.step()
        return time.perf_counter() - begin

    def step_seconds(self, warm: int, steps: int) -> float:
        """Mean seconds from one step to the next, since steps overlap."""
        for _ in range(warm):
            self._frontend.step()
        moments = [time.perf_counter()]
        for _ in range(steps):
            self._frontend.step()
            moments.append(time.perf_counter())
        return float(np.mean(np.diff(moments)))

    def end(self) -> None:
        self._frontend.abort_all()
        self.requests.clear()


def stop_copying(llm: LLM) -> bool:
    """Let decode steps run without copying missing pages, to measure the cost of the copies.
    Returns False if no kernels copy."""
    runner, backend = llm.engine.runner, llm.engine.runner.backend
    if runner.tier is None or runner.tier.swap is None:
        return False
    assert isinstance(backend, HSABackend) and backend.kernels is not None
    from cairn.kernels.swap_in import Misses

    backend.kernels._swap = runner.tier.swap = swap = as_subclass(_NotCopying, runner.tier.swap)
    swap.nothing = Misses.empty(swap._host.layout.heads, 1, swap.frame_of.device)
    if runner.graphs is not None:
        runner.record_graphs(most_rows=0)
    return True


def totals(llm: LLM) -> TierStats:
    """The tier's totals; zeros without a tier."""
    report = llm.engine.tier()
    return TierStats() if report is None else report.totals


def reads(before: TierStats, after: TierStats, steps: int) -> dict[str, Any]:
    """Where decode rows found what they read, between two totals."""
    resident, hits, misses = (
        getattr(after, name) - getattr(before, name) for name in ("resident", "hits", "misses")
    )
    every, hot = max(1, resident + hits + misses), hits + misses
    return {
        "resident": round(resident / every, 4),
        "hit_rate": round(hits / hot, 4) if hot else None,
        "mb_in_per_step": round((after.bytes_in - before.bytes_in) / steps / 1e6, 2),
    }
