"""`cairn bench step`: decode steps of a whole model with random weights, quantised and not."""

from __future__ import annotations

import argparse
import time
from collections.abc import Iterator
from statistics import median
from typing import Any

from cairn.bench.engines import Running, measured
from cairn.bench.report import show_rows, tell
from cairn.engine.resolve import resolve_device

_WARM = 8  # steps that are not counted


def command(arguments: argparse.Namespace) -> int:
    show_rows("step", tell(_run(arguments)), arguments.output)
    return 0


def _run(arguments: argparse.Namespace) -> Iterator[dict[str, Any]]:
    device = resolve_device(arguments.device)
    batches, context = sorted(arguments.batches), arguments.context
    counted = _WARM + arguments.steps
    first: dict[int, float] = {}
    for quantization in arguments.quantizations:
        begin = time.perf_counter()
        with measured(
            model=arguments.model,
            load_format="dummy",
            dtype="bfloat16" if device.type == "cuda" else "auto",
            device=device.type,
            context_length=context + 2 * len(batches) * counted,
            chunked_prefill_size=context,
            max_running_requests=batches[-1],
            quantization=quantization,
        ) as llm:
            started = time.perf_counter() - begin
            nbytes = sum(llm.engine.runner.stepper.model.bytes_by_module().values())
            running = Running(llm, context, max_tokens=2 * len(batches) * counted)
            for batch in batches:
                running.grow_to(batch)
                ms = 1e3 * median(running.step_gaps(_WARM, arguments.steps).tolist())
                first.setdefault(batch, ms)
                yield {
                    "model": arguments.model,
                    "quantization": quantization,
                    "weights_MB": round(nbytes / 1e6, 3),
                    "rows": batch,
                    "median_ms": round(ms, 3),
                    "times_as_fast": round(first[batch] / ms, 2),
                    "start_s": round(started, 1),
                }
            running.end()
