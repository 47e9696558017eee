"""Where a step's time goes on a GPU: attention, matrix products, sampling, the rest, and gaps."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile

from cairn.llm import LLM

_KINDS = {
    "host memory": ("_swap_", "_drift_kernel"),
    "sparse attention": (
        *("score_kernel", "topk_kernel", "pages_kernel", "_begin_kernel", "_pool_kernel"),
        *("lay_out_kernel", "survey_kernel", "_rank_kernel", "_threshold_kernel"),
        "choose_kernel",
        *("_union_kernel", "_attend_kernel"),
    ),
    "attention": ("flash", "_decode_kernel", "_extend_kernel", "_plan_kernel"),
    "matrix products": ("nvjet", "gemm", "gemv", "cutlass", "splitk", "cublas"),
    "sampling": ("_best_kernel", "_pick_kernel", "argmax", "softmax", "sort"),
    "copies": ("memcpy", "memset"),
}
_NAMES, _IDLE = 14, 6  # kernels that are listed


def kind_of(kernel: str) -> str:
    name = kernel.lower()
    for kind, words in _KINDS.items():
        if any(word in name for word in words):
            return kind
    return "norms, rope and the rest"


def idle_before(spans: Iterable[tuple[float, float, str]]) -> dict[str, float]:
    """Time in which nothing runs, by the name of what it ends with. Kernels start while their
    predecessors drain, so that their own times add up to more than passes."""
    idle: dict[str, float] = {}
    reached = None
    for begin, end, name in sorted(spans):
        if reached is not None and begin > reached:
            idle[name] = idle.get(name, 0.0) + begin - reached
        reached = end if reached is None else max(reached, end)
    return idle


def profile_steps(llm: LLM, steps: int) -> dict[str, Any]:
    """Milliseconds per step by kind, over the next steps of what is running."""
    frontend = llm.frontend

    def run() -> None:
        for _ in range(steps):
            frontend.step()

    return profile_call(run, steps)


def profile_call(call: Callable[[], object], steps: int = 1) -> dict[str, Any]:
    """Where the time of a call goes, divided by `steps`."""
    with profile(activities=[ProfilerActivity.CUDA]) as recorded:
        torch.cuda.synchronize()
        begin = time.perf_counter()
        call()
        torch.cuda.synchronize()
        wall = time.perf_counter() - begin
    by_kind: Counter[str] = Counter()
    by_name: Counter[str] = Counter()
    spans: list[tuple[float, float, str]] = []  # microseconds
    for event in recorded.events():
        if event.device_type.name == "CUDA":
            span, name = event.time_range, event.name[:48]
            spans.append((span.start, span.end, name))
            by_kind[kind_of(event.name)] += span.end - span.start
            by_name[name] += span.end - span.start
    idle = idle_before(spans)
    first, last = min(begin for begin, _, _ in spans), max(end for _, end, _ in spans)
    busy = last - first - sum(idle.values())
    waits = sorted(idle.items(), key=lambda item: -item[1])[:_IDLE]
    return {
        "ms_per_step": round(1e3 * wall / steps, 3),
        "by_kind_ms": {kind: round(us / 1e3 / steps, 3) for kind, us in sorted(by_kind.items())},
        "by_kernel_us": {name: round(us / steps, 1) for name, us in by_name.most_common(_NAMES)},
        "kernels_per_step": round(len(spans) / steps),
        "idle_before_us": {name: round(us / steps, 1) for name, us in waits},
        "host_gap_share": round(max(0.0, 1 - busy / (1e6 * wall)), 4),
    }
