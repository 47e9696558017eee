"""`cairn bench tier`: the gains and costs of the host tier.

    throughput   decode speed by concurrency, with and without the tier, at the same device budget
    small        batches of 1 to 4 whose pages are all on the device
    hits         hit rate of the hot cache on real text, by cache size
    ttft         time to the first token on a warm prefix, on the device or only in host memory
    beyond       one prompt longer than the device's pool
    prompt       time to the first token of one prompt, with the tier and without it on a device
                 that holds the whole prompt
    bandwidth    bursts of misses compared with a plain copy of the same memory

Weights are random except in `hits`. Random weights select different pages for every token, so in
`throughput` and `beyond` decode rows select synthetic pages, of which a given share changes.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from statistics import median
from typing import Any

import torch

from cairn.bench.engines import FIRST_TOKEN, Running, first_token, measured, random_prompt
from cairn.bench.profile import profile_steps
from cairn.bench.report import show_rows, tell
from cairn.bench.tier_bandwidth import bandwidth
from cairn.bench.tier_engines import (
    PROFILED_STEPS,
    SMALL_BATCHES,
    drop_copies,
    engine,
    has_index,
    host_gib,
    reads,
    stop_copying,
    token_bytes,
    totals,
)
from cairn.bench.tier_options import TierBench
from cairn.cli_flags import collect
from cairn.config import EngineConfig
from cairn.engine.locate import locate
from cairn.engine.sampling_params import SamplingParams
from cairn.errors import ConfigError
from cairn.eval.haystack import encode_text, read_text
from cairn.llm import LLM
from cairn.models.registry import read_spec

Rows = Iterator[dict[str, Any]]

_LINK = 45e9  # least bytes per second at which host memory must be read
_SUFFIX = 64
_REPEATS = 5
_BRANCHES = 16
_WITH_LANDMARKS = 1.2  # factor on the KV of a context: those of `spread` take an eighth
_TEXT_GIB, _TEXT_HOST_GIB = 1.0, 0.5  # device and host memory, enough for a text with small models
_COLD_ROWS = 16  # first rows of a text, which find the hot cache empty; not counted


def command(arguments: argparse.Namespace) -> int:
    bench = TierBench(**collect(arguments, TierBench))
    if bench.device == "cuda" and not torch.cuda.is_available():
        raise ConfigError("device is 'cuda', but torch finds no CUDA device; add --device cpu")
    if "throughput" in bench.parts and has_index(bench):
        raise ConfigError(
            f"model is {bench.model!r}, whose index selects rows; the part throughput scripts "
            "pages: leave it out, and use `cairn bench dsa --parts tier`"
        )
    show_rows("tier", tell(_run(bench)), arguments.output)
    return 0


def _run(bench: TierBench) -> Rows:
    for part in bench.parts:
        begin = time.perf_counter()
        for row in _MEASURES[part](bench):
            yield {"part": part, **row}
        yield {"part": part, "seconds": round(time.perf_counter() - begin, 1)}


def _endless(llm: LLM, context: int) -> Running:
    return Running(llm, context, llm.engine.max_tokens - context)


def _step_seconds(bench: TierBench, running: Running, steps: int) -> float:
    return float(running.step_gaps(bench.warm_steps, steps).mean())


# -- decode steps -----------------------------------------------------------------------------


def _throughput(bench: TierBench) -> Rows:
    """Output tokens per second by number of concurrent requests, at the same device budget."""
    for context in bench.contexts:
        most = max(bench.concurrency)
        while most > 1 and host_gib(bench, context, most) > bench.most_host_gib:
            most -= 1
        best: dict[bool, float] = {}
        for tier in (False, True):
            with engine(bench, context, most, tier=tier, drifting=True) as llm:
                for row in _by_concurrency(bench, llm, context, most):
                    if "copies" not in row:
                        best[tier] = max(best.get(tier, 0.0), row["tokens_per_s"])
                    yield {"tier": tier, "context": context, **row}
        if len(best) == 2:  # no such number of requests may fit without the tier
            ratio = round(best[True] / best[False], 2)
            yield {"context": context, "best_with / best_without": ratio}


def _by_concurrency(bench: TierBench, llm: LLM, context: int, most: int) -> Rows:
    running, room = _endless(llm, context), _room(llm)

    def times() -> dict[str, float]:
        step = _step_seconds(bench, running, bench.steps)
        return {
            "ms": round(1e3 * step, 3),
            "tokens_per_s": round(len(running.requests) / step, 1),
        }

    for count in sorted({min(count, most) for count in bench.concurrency}):
        if count > room:
            break  # more requests would have to wait for these to end
        row: dict[str, Any] = {"running": count, "fill_s": round(running.grow_to(count), 2)}
        before = totals(llm)
        row |= times()
        row |= reads(before, totals(llm), bench.warm_steps + bench.steps)
        if bench.profile:
            row["profile"] = profile_steps(llm, PROFILED_STEPS)
        yield row
    if stop_copying(llm):
        yield {"running": len(running.requests), "copies": "none", **times()}


def _room(llm: LLM) -> int:
    """Number of requests that fit at once at full length."""
    scheduler = llm.engine.scheduler
    pages = scheduler.cache.geometry.pages(llm.engine.max_tokens)
    held = scheduler.cache.allocators[scheduler.cache._page_group].num_pages // pages
    return min(scheduler.limits.max_running_requests, held)


def _small(bench: TierBench) -> Rows:
    """Cost of the tier for batches of 1 to 4 whose pages are all on the device."""
    times: dict[tuple[bool, int], float] = {}
    steps = 2 * bench.steps
    for tier in (False, True):
        with engine(bench, bench.short_context, max(SMALL_BATCHES), tier=tier) as llm:
            running = _endless(llm, bench.short_context)
            for batch in SMALL_BATCHES:
                running.grow_to(batch)
                before = totals(llm)
                times[tier, batch] = step = _step_seconds(bench, running, steps)
                row: dict[str, Any] = {"tier": tier, "batch": batch, "ms": round(1e3 * step, 4)}
                row |= reads(before, totals(llm), bench.warm_steps + steps)
                if tier:
                    row["with / without"] = round(step / times[False, batch], 4)
                yield row


def _beyond(bench: TierBench) -> Rows:
    """One prompt that is longer than the device's pool."""
    with engine(bench, bench.longest, 1, tier=True, drifting=True) as llm:
        running = _endless(llm, bench.longest)
        prefill = running.grow_to(1)
        before = totals(llm)
        step = _step_seconds(bench, running, bench.steps)
        yield {
            "context": bench.longest,
            "kv_gib": round(bench.longest * token_bytes(bench) / 2**30, 2),
            "device_gib": bench.kv_cache_gib,
            "prefill_s": round(prefill, 2),
            "gb_in": round(before.bytes_in / 1e9, 2),
            "gb_out": round(before.bytes_out / 1e9, 2),
            "ms": round(1e3 * step, 3),
            **reads(before, totals(llm), bench.warm_steps + bench.steps),
        }


# -- first tokens -----------------------------------------------------------------------------


def _ttft(bench: TierBench) -> Rows:
    """Time to the first token on a warm prefix, on the device or only in host memory."""
    for tier in (False, True):
        length = bench.prefix + 2 * _SUFFIX
        with engine(bench, length, _BRANCHES, tier=tier, own_contexts=3) as llm:
            prefix = random_prompt(llm, bench.prefix, 0)
            first_token(llm, [_continued(llm, prefix, 1)])
            _come_to_rest(llm)
            yield {"tier": tier, "prefix_on": "device", **_warm(llm, prefix)}
            for attempt in range(2):  # the first run compiles kernels
                _come_to_rest(llm)
                row = _branch_out(llm, prefix, 200 + attempt * _BRANCHES)
            yield {"tier": tier, "branches": _BRANCHES, **row}
            if tier:
                yield {"tier": tier, "prefix_on": "host", **_warm(llm, prefix, drop=True)}


def _warm(llm: LLM, prefix: Sequence[int], *, drop: bool = False) -> dict[str, Any]:
    """`drop`: leave the prefix in host memory only."""
    times, moved = [], []
    for attempt in range(_REPEATS):
        if drop:
            _come_to_rest(llm)
            drop_copies(llm.engine.scheduler.cache)
        before = totals(llm).bytes_in
        times.append(first_token(llm, [_continued(llm, prefix, 100 + attempt)]))
        moved.append(totals(llm).bytes_in - before)
    nbytes = int(median(moved[1:]))
    return {
        "ms": round(1e3 * median(times[1:]), 2),
        "mb_in": round(nbytes / 1e6, 3),
        "link_ms": round(1e3 * nbytes / _LINK, 2),
    }


def _branch_out(llm: LLM, prefix: Sequence[int], seed: int) -> dict[str, Any]:
    """Device pages that many continuations of one prefix take in addition to it."""
    frontend = llm.frontend
    free = llm.engine.usage()[-1].free
    params = SamplingParams(max_tokens=8, ignore_eos=True)
    begin = time.perf_counter()
    for branch in range(_BRANCHES):
        frontend.submit(frontend.prepare(_continued(llm, prefix, seed + branch), params))
    held = 0
    while llm.engine.has_work:
        frontend.step()
        held = max(held, free - llm.engine.usage()[-1].free)
    return {
        "ms": round(1e3 * (time.perf_counter() - begin), 2),
        "more_pages_on_device": held,
        "pages_of_prefix": llm.engine.scheduler.cache.geometry.pages(len(prefix)),
    }


def _prompt(bench: TierBench) -> Rows:
    """One prompt that is read densely, with the tier and on a device that holds all of it."""
    for context in bench.contexts:
        seconds: dict[bool, float] = {}
        for tier in (False, True):
            whole = host_gib(bench, context, 1) * token_bytes(bench)
            gib = bench.kv_cache_gib
            if not tier:
                gib = _WITH_LANDMARKS * whole / token_bytes(bench, staying=False)
            row: dict[str, Any] = {"tier": tier, "context": context, "gib": gib}
            if bench.device == "cuda" and not tier and not _fits(gib):
                yield row | {"left_out": "the device has no room for it"}
                continue
            own = replace(bench, kv_cache_gib=gib)
            with engine(own, context, 1, tier=tier, context_length=context) as llm:
                warm = random_prompt(llm, min(context // 2, 2 * bench.chunk), 1)
                first_token(llm, [_continued(llm, warm, 1)])
                _come_to_rest(llm)
                llm.engine.scheduler.cache.clear()
                before = totals(llm)
                prompt = random_prompt(llm, context - _SUFFIX - 1, 2)
                seconds[tier] = first_token(llm, [_continued(llm, prompt, 2)])
                after = totals(llm)
            row["first_token_s"] = round(seconds[tier], 3)
            row["gb_in"] = round((after.bytes_in - before.bytes_in) / 1e9, 4)
            row["gb_out"] = round((after.bytes_out - before.bytes_out) / 1e9, 4)
            if tier and False in seconds:
                row["with / without"] = round(seconds[True] / seconds[False], 3)
            yield row


def _fits(gib: float) -> bool:
    free, _ = torch.cuda.mem_get_info()
    return gib * 2**30 < 0.9 * free


def _continued(llm: LLM, prefix: Sequence[int], seed: int) -> list[int]:
    """A prefix and a few new tokens."""
    return [*prefix, *random_prompt(llm, _SUFFIX, seed)]


def _come_to_rest(llm: LLM) -> None:
    """Wait until nothing runs and every complete page is in host memory."""
    while llm.engine.has_work:
        llm.frontend.step()
    while llm.engine.scheduler.cache.reclaim():
        pass


# -- hit rates --------------------------------------------------------------------------------


def _hits(bench: TierBench) -> Rows:
    """Hit rate of the hot cache on real text. A text is read token by token, as if it were
    generated, with all pages before the window only in host memory."""
    text = read_text(bench.text)
    for model in bench.text_models:
        own = read_spec(locate(EngineConfig(model=model)).config).sparsity
        if own is None:  # the text's rows are prompt rows, which must select pages here
            topks, least, page_size = bench.text_topk, 1.0, bench.page_size
            options: dict[str, Any] = {"hsa_window": bench.window, "hsa_prefill": "sparse"}
        else:  # a trained model brings its own selection
            topks, least, page_size, options = (own.topk,), 2.0, own.chunk_size, {}
        for topk in topks:
            if own is None:
                options["hsa_topk"] = topk
            for hot in sorted({max(least, size) for size in bench.hot_sizes}):
                tier = {
                    "host_gib": _TEXT_HOST_GIB,
                    "device_buffer_size": int(hot * topk) * page_size,
                }
                with measured(
                    model=model,
                    dtype=bench.weights,
                    device=bench.device,
                    kv_cache_dtype=bench.kv_cache_dtype,
                    kv_cache_gib=_TEXT_GIB,
                    context_length=bench.text_tokens + 1,
                    max_running_requests=1,
                    page_size=page_size,
                    enable_hisparse=True,
                    hisparse_config=json.dumps(tier),
                    **options,
                ) as llm:
                    yield {"model": model, "hot": hot, **_read(bench, llm, text)}


def _read(bench: TierBench, llm: LLM, text: str) -> dict[str, Any]:
    ids = encode_text(llm, text, bench.text_tokens)
    first_token(llm, [ids[: -bench.text_rows]])
    _come_to_rest(llm)
    frontend, scheduler = llm.frontend, llm.engine.scheduler
    # One row per step: the rest of the text runs like generated tokens.
    scheduler.limits = replace(scheduler.limits, chunked_prefill_size=1)
    frontend.submit(frontend.prepare(ids, FIRST_TOKEN))
    before, steps = totals(llm), -_COLD_ROWS
    while llm.engine.has_work:
        drop_copies(scheduler.cache)
        frontend.step()
        steps += 1
        if steps == 0:
            before = totals(llm)
    sparse = llm.engine.sparse
    assert sparse is not None
    return {
        "tokens": len(ids),
        "rows": steps,
        "topk": sparse.topk,
        "selected": round(sparse.topk / scheduler.cache.geometry.pages(len(ids)), 3),
        **reads(before, totals(llm), max(1, steps)),
    }


_MEASURES: Mapping[str, Callable[[TierBench], Rows]] = {
    "throughput": _throughput,
    "small": _small,
    "hits": _hits,
    "ttft": _ttft,
    "beyond": _beyond,
    "prompt": _prompt,
    "bandwidth": bandwidth,
}
