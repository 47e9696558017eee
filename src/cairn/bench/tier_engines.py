"""Shared parts of `cairn bench tier`: engines with and without the host tier at the same device
budget, and what is replaced inside them."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch

from cairn.attention.hsa.backend import HSABackend
from cairn.bench.engines import as_subclass, measured
from cairn.bench.tier_options import TierBench
from cairn.config import EngineConfig
from cairn.engine.locate import locate
from cairn.engine.resolve import resolve_dtype
from cairn.kernels.fp8_rows import CACHE_TYPES
from cairn.llm import LLM
from cairn.memory.cache import PagedCache
from cairn.memory.device_swap import DeviceSwap
from cairn.memory.hisparse import TierStats
from cairn.models.registry import read_spec

if TYPE_CHECKING:
    from cairn.kernels.swap_in import Misses

_SPARE = 1.02  # factor on host memory, for pages that are not full yet
SMALL_BATCHES = (1, 2, 4)
PROFILED_STEPS = 16


def full_length(bench: TierBench, context: int, requests: int) -> int:
    """Tokens of a request that runs until all measurements of its engine are done."""
    each = bench.warm_steps + 2 * bench.steps + (PROFILED_STEPS if bench.profile else 0)
    measurements = max(len(bench.concurrency), len(SMALL_BATCHES))
    filling = requests * (-(-context // bench.chunk) + 1)
    return context + measurements * each + filling + 2 * bench.page_size


def token_bytes(bench: TierBench, *, staying: bool = True) -> int:
    """Bytes that one token takes in the caches of all layers. Without `staying`, those that may be
    in host memory."""
    source = locate(EngineConfig(model=bench.model))
    dtype = resolve_dtype(bench.weights, source.config, torch.device(bench.device))
    groups = read_spec(source.config).groups(CACHE_TYPES.get(bench.kv_cache_dtype, dtype))
    size = bench.page_size
    each = (own.page_bytes(size) - (0 if staying else own.staying_bytes(size)) for own in groups)
    return -(-sum(each) // size)


def has_index(bench: TierBench) -> bool:
    """Whether queries of the model select rows, by an index."""
    return read_spec(locate(EngineConfig(model=bench.model)).config).index_topk is not None


def host_gib(bench: TierBench, context: int, requests: int) -> float:
    """GiB of host memory that `requests` contexts take."""
    tokens = requests * full_length(bench, context, requests)
    return _SPARE * tokens * token_bytes(bench, staying=False) / 2**30


@contextmanager
def engine(
    bench: TierBench,
    context: int,
    requests: int,
    *,
    tier: bool,
    own_contexts: int | None = None,
    drifting: bool = False,
    **options: Any,
) -> Iterator[LLM]:
    """An engine for `requests` requests of `context` tokens.

    `own_contexts` of them have a separate context, by default all. With a tier, host memory is as
    large as they need. They may grow until everything is measured.
    """
    if tier:
        host = min(bench.most_host_gib, host_gib(bench, context, own_contexts or requests))
        options["enable_hisparse"] = True
        options["hisparse_config"] = json.dumps({"host_gib": host})
    defaults: dict[str, Any] = {
        "model": bench.model,
        "load_format": "dummy",
        "dtype": bench.weights,
        "device": bench.device,
        "page_size": bench.page_size,
        "context_length": full_length(bench, context, requests),
        "kv_cache_dtype": bench.kv_cache_dtype,
        "kv_cache_gib": bench.kv_cache_gib,
        "max_running_requests": requests,
        "chunked_prefill_size": bench.chunk,
    }
    if not has_index(bench):
        defaults |= {"attention_backend": "hsa"}
        defaults |= {"hsa_topk": bench.topk, "hsa_window": bench.window}
    with measured(**{**defaults, **options}) as llm:
        if tier and drifting and bench.change > 0:
            drift(llm, bench.change)
        yield llm


def drift(llm: LLM, change: float) -> None:
    """Let decode rows select synthetic pages, if kernels select the pages."""
    runner = llm.engine.runner
    backend = runner.stepper.backend
    if isinstance(backend, HSABackend) and backend.kernels is not None:
        from cairn.bench.drift import DriftingSparse

        backend.kernels = drifting = as_subclass(DriftingSparse, backend.kernels)
        drifting.drift_by(change)
        if runner.stepper.graphs is not None:
            runner.stepper.record_graphs(most_rows=0)


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


def stop_copying(llm: LLM) -> bool:
    """Let decode steps run without copying missing pages, to measure the cost of the copies.
    Returns False if no kernels copy."""
    runner, backend = llm.engine.runner, llm.engine.runner.stepper.backend
    if runner.tier is None or runner.tier.swap is None:
        return False
    assert isinstance(backend, HSABackend) and backend.kernels is not None
    from cairn.kernels.swap_in import Misses

    backend.kernels._swap = runner.tier.swap = swap = as_subclass(_NotCopying, runner.tier.swap)
    swap.nothing = Misses.empty(swap._host.layout.heads, 1, swap.frame_of.device)
    if runner.stepper.graphs is not None:
        runner.stepper.record_graphs(most_rows=0)
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
