"""`cairn bench tier`: what the host tier buys, and what it costs.

    throughput   decode speed against requests at once, with and without, at the same device budget
    small        batches of 1 to 4 whose pages are all on the device
    hits         how often the hot cache has what real text reads, by its size
    ttft         first tokens on a warm prefix, on the device and in host memory alone
    beyond       one prompt longer than the device's pool
    prompt       time to the first token of one prompt, with and on a device that holds all of it
    bandwidth    bursts of misses beside a plain copy of the same memory

Weights are random but for `hits`. They select other pages with every token; in `throughput` and
`beyond` decode rows therefore select made-up pages, of which a given share changes.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from cairn.bench.tier_bandwidth import bandwidth
from cairn.bench.tier_engines import TierBench
from cairn.bench.tier_hits import hits
from cairn.bench.tier_speed import beyond, prompts, small, throughput, ttft

PARTS: Mapping[str, Callable[[TierBench], Iterator[dict[str, Any]]]] = {
    "throughput": throughput,
    "small": small,
    "hits": hits,
    "ttft": ttft,
    "beyond": beyond,
    "prompt": prompts,
    "bandwidth": bandwidth,
}


def run(bench: TierBench, parts: Sequence[str]) -> Iterator[dict[str, Any]]:
    for part in parts:
        begin = time.perf_counter()
        yield from PARTS[part](bench)
        yield {"part": part, "seconds": round(time.perf_counter() - begin, 1)}
