"""`cairn bench mix`: how much a long prompt delays requests that are being answered."""

from __future__ import annotations

import argparse
import random
from functools import partial
from typing import Any

import numpy as np

from cairn.bench.engines import FIRST_TOKEN, Arrivals, first_token, measure_engine
from cairn.bench.load import draw_tokens
from cairn.bench.report import percentiles
from cairn.engine.sampling_params import SamplingParams
from cairn.llm import LLM

_WARM_TOKENS = 64  # tokens of each stream before the long prompt arrives


def command(arguments: argparse.Namespace) -> int:
    return measure_engine("mix", arguments, partial(_run, arguments))


def _run(arguments: argparse.Namespace, llm: LLM) -> dict[str, Any]:
    stream_tokens, long_tokens = arguments.stream_tokens, arguments.long_tokens
    prompt = partial(draw_tokens, random.Random(0), llm.engine.spec.vocab_size)
    first_token(llm, [prompt(2 * llm.engine.scheduler.limits.chunked_prefill_size)])  # warm up
    alone = first_token(llm, [prompt(long_tokens)])
    llm.engine.scheduler.cache.tree.clear()
    arrivals = Arrivals(llm)
    endless = SamplingParams(max_tokens=llm.engine.max_tokens - stream_tokens, ignore_eos=True)
    for _ in range(arguments.streams):
        arrivals.send(prompt(stream_tokens), endless)
    arrivals.step_until(_WARM_TOKENS, *arrivals.requests)
    long = arrivals.send(prompt(long_tokens), FIRST_TOKEN)
    arrivals.step_until(1, long)
    begin, end = arrivals.moments.pop(long.id)
    gaps = arrivals.gaps()
    beside = np.concatenate([moments[2:] for moments in arrivals.moments.values()]) > begin
    found = percentiles(gaps[beside], 50, 99, 100)
    return {
        "long_tokens": long_tokens,
        "streams": arguments.streams,
        "ttft_alone_s": round(alone, 3),
        "ttft_beside_s": round(end - begin, 3),
        "ttft_ratio": round((end - begin) / alone, 2),
        "between_tokens_ms": {
            "before_p50": percentiles(gaps[~beside], 50)["p50"],
            "p50": found["p50"],
            "p99": found["p99"],
            "max": found["p100"],
        },
    }
