"""`cairn bench mix`: how much a long prompt delays requests that are being answered."""

from __future__ import annotations

import argparse
import itertools
import random
import time
from functools import partial
from typing import Any

from cairn.bench.report import measure_engine, percentiles
from cairn.engine.sampling_params import SamplingParams
from cairn.llm import LLM
from cairn.outputs import Chunk

_WARM_TOKENS = 64  # tokens of each stream before the long prompt arrives


def command(arguments: argparse.Namespace) -> int:
    return measure_engine("mix", arguments, partial(_run, arguments))


def _run(arguments: argparse.Namespace, llm: LLM) -> dict[str, Any]:
    long_tokens, streams = arguments.long_tokens, arguments.streams
    stream_tokens = arguments.stream_tokens
    draw = random.Random(0)
    vocab = llm.engine.spec.vocab_size

    def prompt(tokens: int) -> list[int]:
        return [draw.randrange(vocab) for _ in range(tokens)]

    first = SamplingParams(max_tokens=1, ignore_eos=True)
    llm.generate(prompt(2 * llm.engine.scheduler.limits.chunked_prefill_size), first)  # warm up
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
    while len(times) < streams or min(map(len, times.values())) < _WARM_TOKENS:
        frontend.step()
    (long,) = frontend.prepare(prompt(long_tokens), first)
    begin = time.perf_counter()
    frontend.submit([long], sink)
    while long.id not in times:
        frontend.step()
    beside = times.pop(long.id)[0] - begin
    frontend.abort_all()
    pairs = [pair for moments in times.values() for pair in itertools.pairwise(moments)]
    before = [later - earlier for earlier, later in pairs if later <= begin]
    gaps = [later - earlier for earlier, later in pairs if later > begin]
    found = percentiles(gaps, 50, 99, 100)
    return {
        "long_tokens": long_tokens,
        "streams": streams,
        "ttft_alone_s": round(alone, 3),
        "ttft_beside_s": round(beside, 3),
        "ttft_ratio": round(beside / alone, 2),
        "between_tokens_ms": {
            "before_p50": percentiles(before, 50)["p50"],
            "p50": found["p50"],
            "p99": found["p99"],
            "max": found["p100"],
        },
    }
