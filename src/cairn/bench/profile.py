"""Where a step's time goes on a GPU: attention, matrix products, sampling, the rest, and gaps."""

from __future__ import annotations

import argparse
import time
from collections import defaultdict
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile

from cairn.bench.engines import measure_engine, need_cuda
from cairn.bench.workloads import seeded
from cairn.engine.sampling_params import SamplingParams
from cairn.llm import LLM

_KINDS = {
    "host memory": ("_swap_", "_drift_kernel"),
    "experts": (
        *("_route_kernel", "_sort_kernel", "_product_kernel", "_combine_kernel"),
        *("_few_gate_up_kernel", "_few_down_kernel"),
    ),
    "sparse attention": (
        *("score_kernel", "topk_kernel", "pages_kernel", "_begin_kernel", "_pool_kernel"),
        *("lay_out_kernel", "survey_kernel", "_rank_kernel", "_threshold_kernel"),
        *("choose_kernel", "few_kernel"),
        *("_union_kernel", "_attend_kernel", "union_attention"),
        *("_scan_plan_kernel", "_scan_kernel", "_sample_kernel", "_collect_kernel"),
        *("choose_rows", "attend_rows"),
        *("_slots_kernel", "_row_attention_kernel", "_row_merge_kernel"),
    ),
    "attention": (
        *("flash", "_decode_kernel", "_extend_kernel", "_plan_kernel"),
        *("latent_decode", "_latent_merge_kernel", "_latent_prompt_kernel", "_share_kernel"),
    ),
    "matrix products": (
        *("nvjet", "gemm", "gemv", "cutlass", "splitk", "cublas"),
        *("_one_row_kernel", "few_rows", "_many_rows_kernel", "_streamed_kernel", "_narrow_kernel"),
        *("code_row", "code_tiles", "prepare_codes", "prepare_rows"),
        *("_round_kernel", "_widen_kernel"),
    ),
    "sampling": ("_blocks_kernel", "_pick_kernel", "argmax", "softmax", "sort"),
    "copies": ("memcpy", "memset"),
}
_NAMES, _IDLE = 14, 6  # kernels that are listed
_WIDTH = 48  # of their names


def command(arguments: argparse.Namespace) -> int:
    need_cuda("profile", getattr(arguments, "device", "auto"))

    def measure(llm: LLM) -> dict[str, Any]:
        frontend = llm.frontend
        params = SamplingParams(temperature=0.6, ignore_eos=True, max_tokens=1000)
        for prompt in seeded(arguments.requests, llm.engine.spec.vocab_size).prompts:
            frontend.submit(frontend.prepare(prompt, params))
        while llm.engine.scheduler.num_waiting:
            frontend.step()
        for _ in range(20):
            frontend.step()
        return {"requests": arguments.requests, **profile_steps(llm, arguments.steps)}

    return measure_engine("profile", arguments, measure)


def kind_of(kernel: str) -> str:
    name = kernel.lower()
    for kind, words in _KINDS.items():
        if any(word in name for word in words):
            return kind
    return "norms, rope and the rest"


def share_out(
    spans: Iterable[tuple[float, float, str]],
) -> tuple[dict[str, float], dict[str, float]]:
    """Time in kernels, and idle time before kernels, by name; spans are (begin, end, name).

    Kernels may start while their predecessors still run. A kernel counts only for the time by
    which it ends later than all kernels before it.
    """
    spent: defaultdict[str, float] = defaultdict(float)
    idle: defaultdict[str, float] = defaultdict(float)
    ordered = sorted(spans)
    reached = ordered[0][0] if ordered else 0.0
    for begin, end, name in ordered:
        if begin > reached:
            idle[name] += begin - reached
        spent[name] += max(0.0, end - max(begin, reached))
        reached = max(reached, end)
    return spent, idle


def profile_steps(llm: LLM, steps: int) -> dict[str, Any]:
    """Where the time of the next steps goes; requests must be running."""
    frontend = llm.frontend

    def run() -> None:
        for _ in range(steps):
            frontend.step()

    return profile_call(run, steps)


def profile_call(call: Callable[[], object], steps: int = 1) -> dict[str, Any]:
    """Where the time of a call of `steps` steps goes, per step."""
    with profile(activities=[ProfilerActivity.CUDA]) as recorded:
        torch.cuda.synchronize()
        begin = time.perf_counter()
        call()
        torch.cuda.synchronize()
        wall = time.perf_counter() - begin
    spans = [  # microseconds
        (event.time_range.start, event.time_range.end, event.name)
        for event in recorded.events()
        if event.device_type.name == "CUDA"
    ]
    spent, idle = share_out(spans)
    by_kind: defaultdict[str, float] = defaultdict(float)
    for name, us in spent.items():
        by_kind[kind_of(name)] += us
    busy = sum(spent.values())
    return {
        "ms_per_step": round(1e3 * wall / steps, 3),
        "by_kind_ms": {kind: round(us / 1e3 / steps, 3) for kind, us in sorted(by_kind.items())},
        "by_kernel_us": per_step(spent, steps, _NAMES),
        "kernels_per_step": round(len(spans) / steps),
        "idle_before_us": per_step(idle, steps, _IDLE),
        "host_gap_share": round(max(0.0, 1 - busy / (1e6 * wall)), 4),
    }


def per_step(times: dict[str, float], steps: int, most: int) -> dict[str, float]:
    """The `most` longest times per step, by shortened name."""
    shortened: defaultdict[str, float] = defaultdict(float)
    for name, us in times.items():
        shortened[name[:_WIDTH]] += us
    longest = sorted(shortened.items(), key=lambda item: -item[1])[:most]
    return {name: round(us / steps, 1) for name, us in longest}
