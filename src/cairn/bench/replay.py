"""`cairn bench replay`: the requests of a recorded trace, at their times, with shared prefixes.

Traces are in Mooncake's format: a line of JSON per request, whose `hash_ids` name the blocks of 512
tokens of its prompt. Tokens are random, but equal ids become equal tokens, so that the prompts
share the same prefixes as those that were recorded.
"""

from __future__ import annotations

import argparse
import itertools
import json
import time
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np

from cairn.bench.engines import Arrivals, measure_engine
from cairn.bench.report import percentiles
from cairn.cli_flags import check_at_least
from cairn.engine.sampling_params import SamplingParams
from cairn.errors import ConfigError
from cairn.llm import LLM

_BLOCK = 512  # tokens per id
_FIRST_TOKEN = 3  # ids below are special tokens in most vocabularies


@dataclass(frozen=True, slots=True)
class TracedRequest:
    arrival: float  # seconds
    input_length: int
    output_length: int
    hash_ids: tuple[int, ...]


def command(arguments: argparse.Namespace) -> int:
    check_at_least(arguments, 1, "requests")
    if not 0 <= arguments.time_scale < float("inf"):
        raise ConfigError("--time-scale must be 0 or more")
    trace = read_trace(Path(arguments.trace), arguments.requests)

    def measure(llm: LLM) -> dict[str, Any]:
        llm.generate([1, 2, 3], max_tokens=8, ignore_eos=True)  # warm up
        return run(llm, trace, time_scale=arguments.time_scale)

    return measure_engine("replay", arguments, measure)


def read_trace(path: Path, count: int) -> list[TracedRequest]:
    """The first `count` requests."""
    found: list[TracedRequest] = []
    try:
        with path.open() as lines:
            for number, line in enumerate(itertools.islice(lines, count), start=1):
                found.append(_parse(line, f"line {number} of {path}"))
    except OSError as error:
        raise ConfigError(f"trace {path} cannot be read: {error.strerror}") from error
    if not found:
        raise ConfigError(f"trace {path} holds no request")
    return found


def _parse(line: str, where: str) -> TracedRequest:
    try:
        record = json.loads(line)
        request = TracedRequest(
            float(record["timestamp"]) / 1e3,
            int(record["input_length"]),
            int(record["output_length"]),
            tuple(int(block) for block in record["hash_ids"]),
        )
    except (ValueError, KeyError, TypeError) as error:
        raise ConfigError(
            f"{where} is no request: {error!r}; each line is an object with timestamp, "
            "input_length, output_length and hash_ids"
        ) from error
    blocks = -(-request.input_length // _BLOCK)
    if len(request.hash_ids) != blocks or request.input_length < 1 or request.output_length < 1:
        raise ConfigError(
            f"{where}: input_length {request.input_length} takes {blocks} hash_ids of {_BLOCK} "
            f"tokens, there are {len(request.hash_ids)}; lengths are at least 1"
        )
    return request


class Prompts:
    """Token ids of traced prompts."""

    def __init__(self, vocab_size: int) -> None:
        self._vocab_size = vocab_size
        self._block = lru_cache(maxsize=4096)(self._draw)

    def _draw(self, block: int) -> list[int]:
        generator = np.random.default_rng(block)
        tokens: list[int] = generator.integers(_FIRST_TOKEN, self._vocab_size, _BLOCK).tolist()
        return tokens

    def of(self, request: TracedRequest) -> list[int]:
        tokens = [token for block in request.hash_ids for token in self._block(block)]
        return tokens[: request.input_length]


def run(llm: LLM, trace: Sequence[TracedRequest], *, time_scale: float) -> dict[str, Any]:
    """Replay; `time_scale` 2 takes twice as long as the recording, 0 sends all at once."""
    engine, arrivals = llm.engine, Arrivals(llm)
    prompts = Prompts(engine.spec.vocab_size)
    ordered = sorted(trace, key=lambda request: request.arrival)
    fitting = [one for one in ordered if one.input_length + one.output_length <= engine.max_tokens]
    before = engine.stats.generated_tokens
    begin = time.perf_counter()
    for request in fitting:
        due = begin + (request.arrival - ordered[0].arrival) * time_scale
        while (wait := due - time.perf_counter()) > 0:
            if engine.has_work:
                llm.frontend.step()
            else:
                time.sleep(min(0.01, wait))
        params = SamplingParams(max_tokens=request.output_length, ignore_eos=True)
        arrivals.send(prompts.of(request), params, due)
    arrivals.finish()
    seconds = time.perf_counter() - begin
    cache, tier = engine.scheduler.cache.stats, engine.tier()
    return {
        "requests": len(fitting),
        "too_long": len(trace) - len(fitting),
        "time_scale": time_scale,
        "seconds": round(seconds, 2),
        "output_tokens_per_s": round((engine.stats.generated_tokens - before) / seconds, 1),
        "prefix_hit_rate": round(cache.hit_tokens / max(1, cache.lookup_tokens), 4),
        "retractions": engine.scheduler.stats.retractions,
        "ttft_ms": percentiles(arrivals.first_tokens(), 50, 90, 99),
        "tbt_ms": percentiles(arrivals.gaps(), 50, 90, 99),
        "tier": None if tier is None else str(tier),
    }
