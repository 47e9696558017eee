"""Bytes per second between host and device: plain copies, bursts of misses, whole pages."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from typing import Any

import torch

from cairn.bench.tier_options import TierBench
from cairn.engine.resolve import resolve_device
from cairn.errors import ConfigError
from cairn.kernels.fp8_rows import CACHE_TYPES
from cairn.memory.copies import CopyEdits, Transfer
from cairn.memory.device_swap import SwapShape
from cairn.memory.groups import LayerGroup
from cairn.memory.hisparse import HiSparseCoordinator
from cairn.memory.kv_pool import HostPool, KVPool
from cairn.memory.layout import CacheLayout

_KV_HEADS, _HEAD_DIM = 8, 128  # of the 0.6B shape
_BURST_ROWS = (1, 4, 16)
_BURSTS = 6
_REPLAYS = 4
_WHOLE_PAGES = 128  # copied at once


def bandwidth(bench: TierBench) -> Iterator[dict[str, Any]]:
    device = resolve_device(bench.device)
    dtype = CACHE_TYPES.get(bench.kv_cache_dtype, getattr(torch, bench.weights))
    layout = CacheLayout.of_heads(_KV_HEADS, _HEAD_DIM, dtype)
    page_bytes = layout.page_bytes(bench.page_size)
    num_pages = int(bench.bandwidth_gib * 2**30) // page_bytes
    most = max(_BURST_ROWS)
    slots = most * bench.topk
    frames = min(_WHOLE_PAGES, num_pages)
    groups = [LayerGroup("full", ()), LayerGroup("resident", (0,), 1, 0, layout)]
    pool = KVPool(groups, [num_pages, frames], bench.page_size, device, hot_pages=slots)
    host = HostPool(groups[1], num_pages, bench.page_size, device=device)
    tier = HiSparseCoordinator(
        pool,
        host,
        num_frames=frames,
        hot_slots=slots,
        asynchronous=False,
        kernels=SwapShape(most, bench.topk, 1) if device.type == "cuda" else None,
    )
    there, here = host.part(0), pool.part(0)
    count = min(len(there), len(here))
    there, here = there[:count], here[:count]
    to_device = _rate(here.nbytes, lambda: here.copy_(there, non_blocking=True), device)
    to_host = _rate(here.nbytes, lambda: there.copy_(here, non_blocking=True), device)
    yield {"what": "plain copy, to the device", "gb_per_s": round(to_device, 2)}
    yield {"what": "plain copy, to the host", "gb_per_s": round(to_host, 2)}
    rates = [
        (f"misses of {rows} rows", _bursts(tier, rows, bench.topk, num_pages, device), to_device)
        for rows in _BURST_ROWS
    ]
    transfers = tuple(Transfer(page + 1, page + 1) for page in range(frames))
    edits, nbytes = CopyEdits((), transfers), frames * page_bytes
    pages_in = _rate(nbytes, lambda: tier.begin_step(edits), device)
    pages_out = _rate(nbytes, lambda: tier.back_up(transfers), device)
    rates.append((f"{frames} whole pages in", pages_in, to_device))
    rates.append((f"{frames} whole pages out", pages_out, to_host))
    for what, rate, plain in rates:
        share = round(rate / plain, 3)
        yield {"what": what, "gb_per_s": round(rate, 2), "of_plain_copy": share}
    tier.close()


def _bursts(
    tier: HiSparseCoordinator, rows: int, topk: int, num_pages: int, device: torch.device
) -> float:
    """GB/s of bursts in which every row selects pages that no row selected before.

    On devices with graphs the bursts run in a recorded graph, as in decode steps: a separate launch
    would take as long as a small burst.
    """
    draw = torch.Generator().manual_seed(rows)
    bursts = min(_BURSTS, num_pages // (rows * topk))
    if bursts < 2:  # the first burst is not timed
        raise ConfigError(
            f"bandwidth: {rows} rows read {rows * topk} pages at once and host memory has "
            f"{num_pages}; raise --bandwidth-gib"
        )
    order = 1 + torch.randperm(num_pages, generator=draw)[: bursts * rows * topk]
    tables = order.view(bursts, rows, topk).int().to(device)
    # Generations that are new in each call and each replay, so that no slice is a hit.
    lives = torch.full((rows, topk), _REPLAYS * rows, dtype=torch.int32, device=device)
    places = torch.arange(topk, dtype=torch.int32, device=device)
    selected = places.expand(rows, _KV_HEADS, topk).contiguous()

    def burst(table: torch.Tensor) -> None:
        if tier.swap is not None:
            tier.swap.locate(0, selected, table, lives)
            return
        pages = table[:, None].expand(-1, _KV_HEADS, -1).long()
        tier.swap_in(0, pages, lives[:, None].expand_as(pages))

    def bursts_in_turn() -> None:
        for table in tables[1:]:
            burst(table)

    burst(tables[0])  # compiles the kernels
    run, times = _recorded(bursts_in_turn, device), []
    before = tier.stats
    for _ in range(_REPLAYS):
        lives += 1
        times.append(_seconds(run, device))
    after = tier.stats
    assert after.hits == before.hits
    return (after.bytes_in - before.bytes_in) / _REPLAYS / min(times) / 1e9


def _recorded(work: Callable[[], object], device: torch.device) -> Callable[[], object]:
    if device.type != "cuda":
        return work
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        work()
    return graph.replay


def _rate(nbytes: int, work: Callable[[], object], device: torch.device) -> float:
    """GB/s of the fastest of several runs; the first run is not counted."""
    return nbytes / min([_seconds(work, device) for _ in range(4)][1:]) / 1e9


def _seconds(work: Callable[[], object], device: torch.device) -> float:
    _synchronize(device)
    begin = time.perf_counter()
    work()
    _synchronize(device)
    return time.perf_counter() - begin


def _synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
