"""Bytes per second between host and device: plain copies, bursts of misses, whole pages."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from typing import Any

import torch

from cairn.bench.collector import release
from cairn.bench.tier_engines import TierBench
from cairn.engine.resolve import resolve_device
from cairn.errors import ConfigError
from cairn.memory.copies import CopyEdits, Transfer
from cairn.memory.device_swap import SwapShape
from cairn.memory.groups import LayerGroup
from cairn.memory.hisparse import HiSparseCoordinator
from cairn.memory.kv_pool import HostPool, KVPool
from cairn.memory.layout import CacheLayout

_KV_HEADS, _HEAD_DIM = 8, 128  # of the 0.6B shape
_BURSTS = 6
_REPLAYS = 4
_WHOLE_PAGES = 128  # copied at once


def bandwidth(bench: TierBench) -> Iterator[dict[str, Any]]:
    device = resolve_device(bench.device)
    dtype = getattr(torch, bench.dtype)
    layout = CacheLayout.of_heads(_KV_HEADS, _HEAD_DIM, dtype)
    page_bytes = layout.page_bytes(bench.page_size)
    num_pages = int(bench.bandwidth_gib * 2**30) // page_bytes
    most = max(bench.burst_rows)
    slots = most * bench.topk
    frames = min(_WHOLE_PAGES, num_pages)
    groups = [LayerGroup("full", ()), LayerGroup("resident", (0,), 1, 0, layout)]
    pool = KVPool(groups, [num_pages, frames], bench.page_size, device, hot_slots=slots)
    host = HostPool(groups[1], num_pages, bench.page_size, device=device)
    tier = HiSparseCoordinator(
        pool,
        host,
        num_frames=frames,
        hot_slots=slots,
        asynchronous=False,
        kernels=SwapShape(most, bench.topk, 1) if device.type == "cuda" else None,
    )
    plain: dict[str, float] = {}
    for name, rate in _plain(host.part(0), pool.part(0), device):
        plain[name] = rate
        yield {"part": "bandwidth", "what": f"plain copy, {name}", "gb_per_s": round(rate, 2)}

    def row(what: str, rate: float, way: str) -> dict[str, Any]:
        share = {"of_plain_copy": round(rate / plain[way], 3)}
        return {"part": "bandwidth", "what": what, "gb_per_s": round(rate, 2)} | share

    for rows in bench.burst_rows:
        rate = _bursts(tier, rows, bench.topk, num_pages, device)
        yield row(f"misses of {rows} rows", rate, "to the device")
    transfers = [Transfer(page + 1, page + 1) for page in range(frames)]
    edits = CopyEdits((), tuple(transfers))
    nbytes = frames * page_bytes
    rate = nbytes / _seconds(lambda: tier.begin_step(edits), device)
    yield row(f"{frames} whole pages in", rate / 1e9, "to the device")
    rate = nbytes / _seconds(lambda: tier.back_up(transfers), device)
    yield row(f"{frames} whole pages out", rate / 1e9, "to the host")
    tier.close()
    release()


def _plain(
    there: torch.Tensor, here: torch.Tensor, device: torch.device
) -> Iterator[tuple[str, float]]:
    count = min(len(there), len(here))
    ways = {"to the device": (there, here), "to the host": (here, there)}
    for name, (source, target) in ways.items():

        def copy(source: torch.Tensor = source, target: torch.Tensor = target) -> None:
            target[:count].copy_(source[:count], non_blocking=True)

        yield name, here[:count].nbytes / _seconds(copy, device) / 1e9


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
        tier.swap_in_selected_pages(0, pages, lives[:, None].expand_as(pages))

    def bursts_in_turn() -> None:
        for table in tables[1:]:
            burst(table)

    burst(tables[0])  # compiles the kernels
    run, times = _recorded(bursts_in_turn, device), []
    before = tier.stats
    for _ in range(_REPLAYS):
        lives += 1
        _synchronize(device)
        begin = time.perf_counter()
        run()
        _synchronize(device)
        times.append(time.perf_counter() - begin)
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


def _seconds(work: Callable[[], object], device: torch.device, repeat: int = 4) -> float:
    """Seconds of the fastest of several runs; the first run is not counted."""
    times = []
    for _ in range(repeat):
        _synchronize(device)
        begin = time.perf_counter()
        work()
        _synchronize(device)
        times.append(time.perf_counter() - begin)
    return min(times[1:])


def _synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
