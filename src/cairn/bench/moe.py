"""`cairn bench moe`: the experts of one layer, Cairn beside transformers, on the same weights."""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Iterator, Sequence
from statistics import median
from typing import Any

import torch

from cairn.bench.attention import time_cuda
from cairn.bench.report import show_rows, tell
from cairn.engine.resolve import resolve_device, resolve_dtype
from cairn.errors import ConfigError
from cairn.models.config_reader import ConfigReader
from cairn.models.experts import ExpertWeights
from cairn.models.layers import Factory
from cairn.models.loader import use_kernels
from cairn.models.presets import PRESETS

_REPEAT = 11


def command(arguments: argparse.Namespace) -> int:
    preset = PRESETS.get(arguments.model, {})
    if preset.get("architectures") != ["Qwen3MoeForCausalLM"]:
        names = [n for n in PRESETS if PRESETS[n]["architectures"] == ["Qwen3MoeForCausalLM"]]
        raise ConfigError(f"model is {arguments.model!r}; bench moe has {', '.join(names)}")
    device = resolve_device(arguments.device)
    dtype = resolve_dtype("auto", ConfigReader(preset, arguments.model), device)
    with torch.inference_mode():
        rows = tell(_run(preset, device, dtype, arguments.rows, arguments.baseline))
    show_rows("moe", rows, arguments.output)
    return 0


def _run(
    preset: Any, device: torch.device, dtype: torch.dtype, row_counts: Sequence[int], baseline: bool
) -> Iterator[dict[str, Any]]:
    hidden, inter = preset["hidden_size"], preset["moe_intermediate_size"]
    count, per_token = preset["num_experts"], preset["num_experts_per_tok"]
    factory = Factory(dtype, device, fused=use_kernels(dtype, device))
    ours = ExpertWeights(hidden, inter, count, factory)
    ours.gate_up.normal_(0, hidden**-0.5)
    ours.down.normal_(0, inter**-0.5)
    theirs = _transformers(preset, ours) if baseline else None
    for rows in row_counts:
        x = torch.randn(rows, hidden, dtype=dtype, device=device)
        order = torch.rand(rows, count, device=device).argsort(-1)
        ids, weights = order[:, :per_token], torch.rand(rows, per_token, device=device)
        calls: list[Callable[[], Any]] = [lambda: ours(x, ids.int(), weights)]  # noqa: B023
        if theirs is not None:
            calls.append(lambda: theirs(x, ids, weights.to(dtype)))  # noqa: B023
            torch.testing.assert_close(calls[0](), calls[1](), rtol=0.05, atol=0.05)
        seconds = _seconds(calls, device)
        used = len(torch.unique(ids)) * 3 * hidden * inter * dtype.itemsize
        row = {"rows": rows, "cairn_us": seconds[0] * 1e6, "GB/s": used / seconds[0] / 1e9}
        if theirs is not None:
            row |= {"transformers_us": seconds[1] * 1e6, "ratio": seconds[1] / seconds[0]}
        yield {name: round(value, 2) for name, value in row.items()}


def _transformers(preset: Any, ours: ExpertWeights) -> Any:
    """The experts of a model in transformers, as it would run them by default."""
    import transformers

    config = transformers.Qwen3MoeConfig(**{**preset, "num_hidden_layers": 1, "vocab_size": 8})
    model = transformers.AutoModelForCausalLM.from_config(config, dtype=ours.gate_up.dtype)
    own: Any = model.model.layers[0].mlp.experts
    own.to(ours.gate_up.device)
    own.gate_up_proj.data.copy_(ours.gate_up)
    own.down_proj.data.copy_(ours.down)
    return own


def _seconds(calls: list[Callable[[], Any]], device: torch.device) -> list[float]:
    """Median seconds of each call; on a CPU in turn, so that all meet the same machine."""
    if device.type == "cuda":
        return [time_cuda(call) for call in calls]
    times: list[list[float]] = [[] for _ in calls]
    for _ in range(_REPEAT):
        for own, call in zip(times, calls, strict=True):
            begin = time.perf_counter()
            call()
            own.append(time.perf_counter() - begin)
    return [median(own) for own in times]
