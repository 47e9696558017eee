"""Speed with and without the host tier: throughput, small batches, warm prefixes, long prompts."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch

from cairn.bench.profile import profile_steps
from cairn.bench.tier_engines import (
    PROFILED_STEPS,
    SMALL_BATCHES,
    Running,
    TierBench,
    drop_copies,
    engine,
    prompt,
    reads,
    stop_copying,
    totals,
)
from cairn.engine.sampling_params import SamplingParams
from cairn.llm import LLM

_LINK = 45e9  # least bytes per second at which host memory must be read
_SUFFIX = 64
_REPEATS = 5
_BRANCHES = 16
_WITH_LANDMARKS = 1.05  # factor on the KV of a context, for landmarks and other small data


def throughput(bench: TierBench) -> Iterator[dict[str, Any]]:
    """Output tokens per second by number of concurrent requests, at the same device budget."""
    for context in bench.contexts:
        best: dict[bool, float] = {}
        for tier in (False, True):
            most = bench.fitting(context)
            with engine(bench, context, most, tier=tier, drifting=True) as llm:
                for row in _by_concurrency(bench, llm, context, most):
                    if "copies" not in row:
                        best[tier] = max(best.get(tier, 0.0), row["tokens_per_s"])
                    yield {"part": "throughput", "tier": tier, "context": context, **row}
        ratio = round(best[True] / best[False], 2)
        yield {"part": "throughput", "context": context, "best_with / best_without": ratio}


def _by_concurrency(
    bench: TierBench, llm: LLM, context: int, most: int
) -> Iterator[dict[str, Any]]:
    running = Running(llm, context)
    for count in sorted({min(count, most) for count in bench.concurrency}):
        if count > running.room:
            break  # more requests would have to wait for these to end
        seconds = running.grow_to(count)
        before = totals(llm)
        step = running.step_seconds(bench.warm_steps, bench.steps)
        after = totals(llm)
        row = {
            "running": count,
            "fill_s": round(seconds, 2),
            "ms": round(1e3 * step, 3),
            "tokens_per_s": round(count / step, 1),
            **reads(before, after, bench.warm_steps + bench.steps),
        }
        if bench.profile:
            row["profile"] = profile_steps(llm, PROFILED_STEPS)
        yield row
    if stop_copying(llm):
        step = running.step_seconds(bench.warm_steps, bench.steps)
        yield {
            "running": len(running.requests),
            "copies": "none",
            "ms": round(1e3 * step, 3),
            "tokens_per_s": round(len(running.requests) / step, 1),
        }
    running.end()


def small(bench: TierBench) -> Iterator[dict[str, Any]]:
    """Cost of the tier for batches of 1 to 4 whose pages are all on the device."""
    times: dict[tuple[bool, int], float] = {}
    for tier in (False, True):
        with engine(bench, bench.short_context, max(SMALL_BATCHES), tier=tier) as llm:
            running = Running(llm, bench.short_context)
            for batch in SMALL_BATCHES:
                running.grow_to(batch)
                before = totals(llm)
                step = running.step_seconds(bench.warm_steps, 2 * bench.steps)
                times[tier, batch] = step
                row: dict[str, Any] = {"part": "small", "tier": tier, "batch": batch}
                row["ms"] = round(1e3 * step, 4)
                row |= reads(before, totals(llm), bench.warm_steps + 2 * bench.steps)
                if tier:
                    row["with / without"] = round(step / times[False, batch], 4)
                yield row
            running.end()


def ttft(bench: TierBench) -> Iterator[dict[str, Any]]:
    """Time to the first token on a warm prefix, on the device or only in host memory."""
    for tier in (False, True):
        length = bench.prefix + 2 * _SUFFIX
        with engine(bench, length, _BRANCHES, tier=tier, own_contexts=3) as llm:
            prefix = prompt(bench.prefix, 0, llm.engine.spec.vocab_size)
            first_token(llm, prefix, 1)
            come_to_rest(llm)
            row = {"part": "ttft", "tier": tier}
            yield row | {"prefix_on": "device"} | _warm(llm, prefix, "device")
            yield row | {"branches": _BRANCHES} | _branches(llm, prefix)
            if tier:
                yield row | {"prefix_on": "host"} | _warm(llm, prefix, "host")


def _warm(llm: LLM, prefix: Sequence[int], place: str) -> dict[str, Any]:
    times, moved = [], []
    for attempt in range(_REPEATS):
        if place == "host":
            come_to_rest(llm)
            drop_copies(llm.engine.scheduler.cache)
        before = totals(llm).bytes_in
        times.append(first_token(llm, prefix, 100 + attempt))
        moved.append(totals(llm).bytes_in - before)
    nbytes = int(np.median(moved[1:]))
    return {
        "ms": round(1e3 * float(np.median(times[1:])), 2),
        "mb_in": round(nbytes / 1e6, 3),
        "link_ms": round(1e3 * nbytes / _LINK, 2),
    }


def _branches(llm: LLM, prefix: Sequence[int]) -> dict[str, Any]:
    """Device pages that many continuations of one prefix take in addition to it. They run twice;
    the first run compiles kernels."""
    row: dict[str, Any] = {}
    for attempt in range(2):
        come_to_rest(llm)
        row = _branch_out(llm, prefix, 200 + attempt * _BRANCHES)
    return row


def _branch_out(llm: LLM, prefix: Sequence[int], seed: int) -> dict[str, Any]:
    frontend = llm.frontend
    before = llm.engine.usage()[-1]
    vocab = llm.engine.spec.vocab_size
    params = SamplingParams(max_tokens=8, ignore_eos=True)
    begin = time.perf_counter()
    for branch in range(_BRANCHES):
        own = prompt(_SUFFIX, seed + branch, vocab)
        frontend.submit(frontend.prepare([*prefix, *own], params))
    held = 0
    while llm.engine.has_work:
        frontend.step()
        usage = llm.engine.usage()[-1]
        held = max(held, before.free - usage.free)
    cache = llm.engine.scheduler.cache
    return {
        "ms": round(1e3 * (time.perf_counter() - begin), 2),
        "more_pages_on_device": held,
        "pages_of_prefix": cache.geometry.pages(len(prefix)),
    }


def beyond(bench: TierBench) -> Iterator[dict[str, Any]]:
    """One prompt that is longer than the device's pool."""
    with engine(bench, bench.longest, 1, tier=True, drifting=True) as llm:
        running = Running(llm, bench.longest)
        row: dict[str, Any] = {"part": "beyond", "context": bench.longest}
        row["kv_gib"] = round(bench.longest * bench.token_bytes() / 2**30, 2)
        row["device_gib"] = bench.kv_cache_gib
        row["prefill_s"] = round(running.grow_to(1), 2)
        prefilled = totals(llm)
        row["gb_in"] = round(prefilled.bytes_in / 1e9, 2)
        row["gb_out"] = round(prefilled.bytes_out / 1e9, 2)
        step = running.step_seconds(bench.warm_steps, bench.steps)
        row["ms"] = round(1e3 * step, 3)
        yield row | reads(prefilled, totals(llm), bench.warm_steps + bench.steps)
        running.end()


def prompts(bench: TierBench) -> Iterator[dict[str, Any]]:
    """One prompt that is read densely, with the tier and on a device that holds all of it."""
    for context in bench.contexts:
        whole = replace(bench, kv_cache_gib=_WITH_LANDMARKS * bench.host_gib(context, 1))
        seconds: dict[bool, float] = {}
        for tier in (False, True):
            own = bench if tier else whole
            row = {"part": "prompt", "tier": tier, "context": context, "gib": own.kv_cache_gib}
            if bench.device == "cuda" and not tier and not _fits(own):
                yield row | {"left_out": "the device has no room for it"}
                continue
            with engine(own, context, 1, tier=tier, length=context) as llm:
                vocab = llm.engine.spec.vocab_size
                first_token(llm, prompt(min(context // 2, 2 * bench.chunk), 1, vocab), 1)
                come_to_rest(llm)
                llm.engine.scheduler.cache.clear()
                before = totals(llm)
                seconds[tier] = first_token(llm, prompt(context - _SUFFIX - 1, 2, vocab), 2)
                after = totals(llm)
            row["first_token_s"] = round(seconds[tier], 3)
            row["gb_in"] = round((after.bytes_in - before.bytes_in) / 1e9, 4)
            row["gb_out"] = round((after.bytes_out - before.bytes_out) / 1e9, 4)
            if tier and False in seconds:
                row["with / without"] = round(seconds[True] / seconds[False], 3)
            yield row


def _fits(bench: TierBench) -> bool:
    free, _ = torch.cuda.mem_get_info()
    return bench.kv_cache_gib * 2**30 < 0.9 * free


def first_token(llm: LLM, prefix: Sequence[int], seed: int) -> float:
    """Seconds to the first token after a prefix and a few new tokens."""
    frontend = llm.frontend
    tokens = [*prefix, *prompt(_SUFFIX, seed, llm.engine.spec.vocab_size)]
    params = SamplingParams(max_tokens=1, ignore_eos=True)
    (request,) = frontend.prepare(tokens, params)
    begin = time.perf_counter()
    frontend.submit([request])
    while not request.num_output:
        frontend.step()
    return time.perf_counter() - begin


def come_to_rest(llm: LLM) -> None:
    """Wait until nothing runs and every complete page is in host memory."""
    frontend = llm.frontend
    while llm.engine.has_work:
        frontend.step()
    while llm.engine.scheduler.cache.reclaim():
        pass
