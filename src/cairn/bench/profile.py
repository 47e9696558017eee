"""Where a step's time goes on a GPU: attention, matrix products, sampling, the rest, and gaps."""

from __future__ import annotations

import math
import time
from collections.abc import Iterable
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile

from cairn.llm import LLM

_KINDS = {
    "attention": ("flash", "_decode_kernel", "_extend_kernel", "_plan_kernel"),
    "matrix products": ("nvjet", "gemm", "gemv", "cutlass", "splitk", "cublas"),
    "sampling": ("_best_kernel", "_pick_kernel", "argmax", "softmax", "sort"),
    "copies": ("memcpy", "memset"),
}


def kind_of(kernel: str) -> str:
    name = kernel.lower()
    for kind, words in _KINDS.items():
        if any(word in name for word in words):
            return kind
    return "norms, rope and the rest"


def covered(spans: Iterable[tuple[float, float]]) -> float:
    """The length that spans cover together: kernels start while their predecessors drain, so that
    their times add up to more than passes."""
    total, reached = 0.0, -math.inf
    for begin, end in sorted(spans):
        total += max(0.0, end - max(begin, reached))
        reached = max(reached, end)
    return total


def profile_steps(llm: LLM, steps: int) -> dict[str, Any]:
    """Milliseconds per step by kind, over the next steps of what is running."""
    frontend = llm._frontend_or_fail()
    with profile(activities=[ProfilerActivity.CUDA]) as recorded:
        torch.cuda.synchronize()
        begin = time.perf_counter()
        for _ in range(steps):
            frontend.step()
        torch.cuda.synchronize()
        wall = time.perf_counter() - begin
    by_kind: dict[str, float] = {}
    spans: list[tuple[float, float]] = []  # microseconds
    for event in recorded.events():
        if event.device_type.name == "CUDA":
            span = event.time_range
            spans.append((span.start, span.end))
            kind = kind_of(event.name)
            by_kind[kind] = by_kind.get(kind, 0.0) + (span.end - span.start) / 1e3
    busy = covered(spans) / 1e3
    return {
        "ms_per_step": round(1e3 * wall / steps, 3),
        "by_kind_ms": {kind: round(ms / steps, 3) for kind, ms in sorted(by_kind.items())},
        "kernels_per_step": round(len(spans) / steps),
        "host_gap_share": round(max(0.0, 1 - busy / (1e3 * wall)), 4),
    }
