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
