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

from cairn.bench.report import measure_engine, percentiles
from cairn.cli_flags import check_at_least
from cairn.engine.sampling_params import SamplingParams
from cairn.errors import ConfigError
from cairn.llm import LLM
from cairn.outputs import Chunk

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
    frontend, engine = llm.frontend, llm.engine
    prompts = Prompts(engine.spec.vocab_size)
    times: dict[str, list[float]] = {}
    due: dict[str, float] = {}
    too_long = 0

    def sink(chunk: Chunk) -> None:
        times[chunk.request_id].append(time.perf_counter())

    waiting = sorted(trace, key=lambda request: request.arrival)
    first = waiting[0].arrival
    before = engine.stats.generated_tokens
    begin = time.perf_counter()
    while waiting or engine.has_work:
        while waiting:
            arrival = begin + (waiting[0].arrival - first) * time_scale
            if arrival > time.perf_counter():
                break
            request = waiting.pop(0)
            if request.input_length + request.output_length > engine.max_tokens:
                too_long += 1
                continue
            params = SamplingParams(max_tokens=request.output_length, ignore_eos=True)
            (prepared,) = frontend.prepare(prompts.of(request), params)
            times[prepared.id], due[prepared.id] = [], arrival
            frontend.submit([prepared], sink)
        if engine.has_work:
            frontend.step()
        elif waiting:
            time.sleep(min(0.01, max(0.0, arrival - time.perf_counter())))
    seconds = time.perf_counter() - begin
    ttft = [moments[0] - due[name] for name, moments in times.items()]
    pairs = (pair for moments in times.values() for pair in itertools.pairwise(moments))
    tbt = [later - earlier for earlier, later in pairs]
    cache, tier = engine.scheduler.cache.stats, engine.tier()
    return {
        "requests": len(times),
        "too_long": too_long,
        "time_scale": time_scale,
        "seconds": round(seconds, 2),
        "output_tokens_per_s": round((engine.stats.generated_tokens - before) / seconds, 1),
        "prefix_hit_rate": round(cache.hit_tokens / max(1, cache.lookup_tokens), 4),
        "retractions": engine.scheduler.stats.retractions,
        "ttft_ms": percentiles(ttft, 50, 90, 99),
        "tbt_ms": percentiles(tbt, 50, 90, 99),
        "tier": None if tier is None else str(tier),
    }
