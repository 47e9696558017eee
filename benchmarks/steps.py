"""Time to the first token of single prompts, and time of decode steps, offline.

    python benchmarks/steps.py --engine dense= --engine 'hsa=--attention-backend hsa'

Engines are built one after the other with the given flags. The first run of each prompt is not
counted. First tokens are medians, decode steps are means of 200; both are in ms. `--profile N`
shows where the time of a prompt of N tokens goes.
"""

from __future__ import annotations

import argparse
import json
import random
import shlex
import statistics
import time
from collections.abc import Iterator
from typing import Any

from cairn import LLM, SamplingParams
from cairn.bench.engines import measured
from cairn.bench.profile import profile_call
from cairn.cli_flags import add_flags, collect
from cairn.config import EngineConfig


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default="qwen3-0.6b-long")
    parser.add_argument("--engine", action="append", required=True, metavar="LABEL=FLAGS")
    parser.add_argument("--prompts", default="20,100,256,1000,2000,4000,8192,32768,131072")
    parser.add_argument("--contexts", default="2048,8192,16384", help="For decode steps.")
    parser.add_argument("--batches", default="1,16", help="Sequences in decode steps.")
    parser.add_argument("--repeat", type=int, default=7)
    parser.add_argument("--profile", type=int, action="append", default=[])
    arguments = parser.parse_args()
    for engine in arguments.engine:
        label, _, flags = engine.partition("=")
        for row in _measure(arguments, shlex.split(flags)):
            print(json.dumps({"engine": label, **row}), flush=True)


def _measure(arguments: argparse.Namespace, flags: list[str]) -> Iterator[dict[str, Any]]:
    prompts, contexts, batches = (
        [int(part) for part in text.split(",") if part]
        for text in (arguments.prompts, arguments.contexts, arguments.batches)
    )
    longest = max([*prompts, *contexts, *arguments.profile]) + 600
    parser = argparse.ArgumentParser()
    add_flags(parser, EngineConfig)
    own = ["--model", arguments.model, "--load-format", "dummy", "--context-length", str(longest)]
    options = collect(parser.parse_args([*own, *flags]), EngineConfig)
    begin = time.perf_counter()
    with measured(**options) as llm:
        yield {"ready_s": round(time.perf_counter() - begin, 2)}
        for length in prompts:
            repeat = arguments.repeat if length <= 40_000 else 3
            times = [_first_token(llm, length) for _ in range(repeat + 1)][1:]
            yield {"prompt": length, "ms": round(statistics.median(times), 2)}
        for context in contexts:
            for batch in batches:
                yield {"context": context, "batch": batch, "ms": _step(llm, context, batch)}
        for length in arguments.profile:
            _first_token(llm, length)
            prompt = _prompt(llm, length)
            params = SamplingParams(max_tokens=1, ignore_eos=True)
            yield {"profile": length, **profile_call(lambda: llm.generate(prompt, params))}  # noqa: B023


def _prompt(llm: LLM, length: int) -> list[int]:
    llm.engine.scheduler.cache.tree.clear()
    return random.choices(range(100, 10_000), k=length)


def _first_token(llm: LLM, length: int) -> float:
    prompt = _prompt(llm, length)
    begin = time.perf_counter()
    llm.generate(prompt, SamplingParams(max_tokens=1, ignore_eos=True))
    return 1e3 * (time.perf_counter() - begin)


def _step(llm: LLM, context: int, batch: int) -> float:
    """Milliseconds per decode step of `batch` sequences with about `context` tokens each."""
    frontend, steps = llm.frontend, 200
    params = SamplingParams(max_tokens=steps + 60, ignore_eos=True)
    requests = []
    for _ in range(batch):
        requests += frontend.prepare(_prompt(llm, context - steps // 2), params)
    frontend.submit(requests)
    while not all(request.num_output for request in requests):
        frontend.step()
    for _ in range(20):
        frontend.step()
    begin = time.perf_counter()
    for _ in range(steps):
        frontend.step()
    spent = time.perf_counter() - begin
    frontend.abort_all()
    while llm.engine.has_work:
        frontend.step()
    return round(1e3 * spent / steps, 3)


if __name__ == "__main__":
    main()
