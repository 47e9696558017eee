"""Time to the first token of single prompts, and time of decode steps, offline.

    python benchmarks/steps.py --engine dense= --engine 'hsa=--attention-backend hsa'

Engines are built one after the other with the given flags. The first run of each prompt is not
counted. First tokens are medians, decode steps are means of 200; both are in ms. `--profile N`
shows where the time of a prompt of N tokens goes.
"""

from __future__ import annotations

import argparse
import functools
import itertools
import json
import shlex
import statistics
import time
from collections.abc import Iterator
from typing import Any

from cairn import LLM
from cairn.bench.engines import Running, first_token, measured, random_prompt
from cairn.bench.profile import profile_call
from cairn.cli_flags import add_flags, collect
from cairn.config import EngineConfig

_STEPS = 200


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
        seeds = itertools.count()  # of prompts, all different
        for length in prompts:
            repeat = arguments.repeat if length <= 40_000 else min(3, arguments.repeat)
            times = [_cold(llm, length, next(seeds)) for _ in range(repeat + 1)][1:]
            yield {"prompt": length, "ms": round(1e3 * statistics.median(times), 2)}
        for context, batch in itertools.product(contexts, batches):
            llm.engine.scheduler.cache.tree.clear()
            running = Running(llm, context - _STEPS // 2, _STEPS + 60)
            running.grow_to(batch)
            gaps = running.step_gaps(20, _STEPS)
            running.end()
            yield {"context": context, "batch": batch, "ms": round(1e3 * float(gaps.mean()), 3)}
        for length in arguments.profile:
            _cold(llm, length, next(seeds))
            again = functools.partial(_cold, llm, length, next(seeds))
            yield {"profile": length, **profile_call(again)}


def _cold(llm: LLM, length: int, seed: int) -> float:
    """Seconds to the first token of a prompt of which nothing is cached."""
    prompt = random_prompt(llm, length, seed)
    llm.engine.scheduler.cache.tree.clear()
    return first_token(llm, [prompt])


if __name__ == "__main__":
    main()
