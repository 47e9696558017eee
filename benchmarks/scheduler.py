"""What the scheduler costs: per step of many decoding requests, and in a run of many short ones.

python benchmarks/scheduler.py [MODEL] [--load-format dummy] [--requests 256] [--steps-only]
"""

from __future__ import annotations

import argparse
import random
import time
from array import array
from typing import Any

import numpy as np
import torch

from cairn import LLM
from cairn.engine.inputs import StepInputs
from cairn.engine.limits import Limits
from cairn.engine.plan import StepPlan
from cairn.engine.request import Request
from cairn.engine.sampler import Sampler
from cairn.engine.sampling_params import SamplingParams
from cairn.engine.scheduler import Scheduler
from cairn.memory.cache import PagedCache
from cairn.memory.geometry import PageGeometry
from cairn.memory.groups import group_layers

_PROMPT, _WARM, _STEPS = 128, 20, 400


def time_steps(requests: int, windows: list[int | None]) -> dict[str, float]:
    """Milliseconds of CPU time that a step's parts take, without a model, steps overlapping."""
    groups = group_layers(windows)
    pages = requests * ((_PROMPT + _WARM + _STEPS) // 64 + 2)
    cache = PagedCache(PageGeometry(64, 64), groups, [pages] * len(groups))
    limits = Limits(
        chunked_prefill_size=8192, max_running_requests=requests, max_queued_requests=requests
    )
    scheduler = Scheduler(cache, limits, time.perf_counter)
    draw = random.Random(0)
    for number in range(requests):
        prompt = array("q", (draw.randrange(1000) for _ in range(_PROMPT + number % 64)))
        params = SamplingParams(max_tokens=10_000, ignore_eos=True)
        scheduler.add(Request(str(number), prompt, params, 0, max_total_tokens=100_000))
    spent: dict[str, float] = {}

    def timed(name: str, call: Any, *arguments: Any) -> Any:
        begin = time.thread_time()
        result = call(*arguments)
        spent[name] = spent.get(name, 0.0) + time.thread_time() - begin
        return result

    table = np.zeros((len(groups), requests, 16), dtype=np.int32)
    sampler = Sampler(requests, 1000, torch.device("cpu"))

    def inputs(plan: StepPlan) -> None:
        StepInputs.of(plan, cache.geometry, table, table)
        sampler.plain_draws(plan.advances)

    flying = None
    for step in range(_WARM + _STEPS):
        if step == _WARM:
            spent.clear()
        plan = timed("plan", scheduler.plan)
        timed("inputs", inputs, plan)
        timed("launched", scheduler.launched, plan)
        if flying is not None:
            sampled = {advance.request_id: (7,) for advance in flying.advances if advance.samples}
            timed("commit", scheduler.commit, flying, sampled)
        flying = plan
    scheduler.check()
    return {part: 1e3 * seconds / _STEPS for part, seconds in spent.items()}


def time_run(model: str | None, options: dict[str, Any]) -> None:
    draw = random.Random(0)
    with LLM(model, device="cpu", **options) as llm:
        vocab = llm.engine.spec.vocab_size
        prompts = [[draw.randrange(vocab) for _ in range(draw.randint(8, 32))] for _ in range(1000)]
        begin = time.perf_counter()
        llm.generate(prompts, max_tokens=16, ignore_eos=True)
        seconds = time.perf_counter() - begin
        stats = llm.engine.stats
        share = 100 * stats.scheduler_seconds / seconds
        print(
            f"1000 requests, {stats.steps} steps, {seconds:.1f} s: "
            f"scheduler {stats.scheduler_seconds:.2f} s, {share:.1f} %"
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model", nargs="?")
    parser.add_argument("--load-format", choices=("auto", "dummy"), default="auto")
    parser.add_argument("--requests", type=int, default=256)
    parser.add_argument("--steps-only", action="store_true", help="Leave out the run with a model.")
    options = parser.parse_args()
    layers: dict[str, list[int | None]] = {"full layers": [None], "and a window": [None, 1024]}
    for name, windows in layers.items():
        spent = time_steps(options.requests, windows)
        split = ", ".join(f"{part} {ms:.2f}" for part, ms in spent.items())
        total = sum(spent.values())
        print(f"{options.requests} decoding requests, {name}: {total:.2f} ms a step ({split})")
    if not options.steps_only:
        time_run(options.model, {"load_format": options.load_format})


if __name__ == "__main__":
    main()
