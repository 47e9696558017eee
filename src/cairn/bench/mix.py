"""`cairn bench mix`: what a long prompt does to those who are being answered meanwhile."""

from __future__ import annotations

import itertools
import random
import time
from typing import Any

import numpy as np

from cairn.engine.sampling_params import SamplingParams
from cairn.llm import LLM
from cairn.outputs import Chunk


def run(
    llm: LLM, *, long_tokens: int, streams: int, stream_tokens: int, warm_tokens: int = 64
) -> dict[str, Any]:
    draw = random.Random(0)
    vocab = llm.engine.spec.vocab_size

    def prompt(tokens: int) -> list[int]:
        return [draw.randrange(vocab) for _ in range(tokens)]

    first = SamplingParams(max_tokens=1, ignore_eos=True)
    llm.generate(prompt(2 * (llm.engine.scheduler.limits.chunked_prefill_size)), first)  # warm up
    begin = time.perf_counter()
    llm.generate(prompt(long_tokens), first)
    alone = time.perf_counter() - begin
    llm.engine.scheduler.cache.tree.clear()

    frontend = llm.frontend
    times: dict[str, list[float]] = {}

    def sink(chunk: Chunk) -> None:
        times.setdefault(chunk.request_id, []).append(time.perf_counter())

    endless = SamplingParams(max_tokens=llm.engine.max_tokens - stream_tokens, ignore_eos=True)
    for _ in range(streams):
        frontend.submit(frontend.prepare(prompt(stream_tokens), endless), sink)
    while len(times) < streams or min(map(len, times.values())) < warm_tokens:
        frontend.step()
    (long,) = frontend.prepare(prompt(long_tokens), first)
    begin = time.perf_counter()
    frontend.submit([long], sink)
    while long.id not in times:
        frontend.step()
    end = times.pop(long.id)[0]
    gaps = [
        later - earlier
        for moments in times.values()
        for earlier, later in itertools.pairwise(moments)
        if later > begin
    ]
    before = [
        later - earlier
        for moments in times.values()
        for earlier, later in itertools.pairwise(moments)
        if later <= begin
    ]
    frontend.abort_all()
    return {
        "long_tokens": long_tokens,
        "streams": streams,
        "ttft_alone_s": round(alone, 3),
        "ttft_beside_s": round(end - begin, 3),
        "ttft_ratio": round((end - begin) / alone, 2),
        "between_tokens_ms": {
            "before_p50": round(1e3 * float(np.percentile(before, 50)), 2),
            "p50": round(1e3 * float(np.percentile(gaps, 50)), 2),
            "p99": round(1e3 * float(np.percentile(gaps, 99)), 2),
            "max": round(1e3 * max(gaps), 2),
        },
    }
