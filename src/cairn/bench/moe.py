"""`cairn bench moe`: the experts of one layer by Cairn and by others, on the same weights, and on
CUDA the whole model in the engine."""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from importlib import import_module
from statistics import median
from typing import Any, NamedTuple

import torch

from cairn.attention.backend import missing_module
from cairn.bench.attention import read_bandwidth, time_cuda
from cairn.bench.engines import first_token, measured, need_cuda, random_prompt
from cairn.bench.report import show_rows, tell
from cairn.engine.resolve import resolve_device, resolve_dtype
from cairn.errors import ConfigError
from cairn.kernels.cpu import CpuKernels
from cairn.kernels.interface import Routing
from cairn.models import experts as in_torch
from cairn.models.config_reader import ConfigReader
from cairn.models.experts import ExpertWeights
from cairn.models.loader import use_kernels
from cairn.models.module import Factory
from cairn.models.presets import PRESETS

Rows = Iterator[dict[str, Any]]
Experts = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]
"""(x, ids, weights) -> [rows, hidden]"""

_REPEAT = 11
_SETS = 8  # inputs of one timed run: other rows read other experts, not what the cache still has
_SGLANG = "sglang.srt.layers.moe.fused_moe_triton.fused_moe"
_SERVED, _LENGTH = 64, 1024  # requests, and tokens in and out of each


class Inputs(NamedTuple):
    x: torch.Tensor
    ids: torch.Tensor
    weights: torch.Tensor


def command(arguments: argparse.Namespace) -> int:
    preset = PRESETS.get(arguments.model, {})
    if preset.get("architectures") != ["Qwen3MoeForCausalLM"]:
        names = [n for n in PRESETS if PRESETS[n]["architectures"] == ["Qwen3MoeForCausalLM"]]
        raise ConfigError(f"model is {arguments.model!r}; bench moe has {', '.join(names)}")
    if arguments.parts != ["layer"]:
        need_cuda(f"moe --parts {','.join(arguments.parts)}", arguments.device)
    with torch.inference_mode():
        show_rows("moe", tell(_run(arguments, preset)), arguments.output)
    return 0


def _run(arguments: argparse.Namespace, preset: Any) -> Rows:
    device = resolve_device(arguments.device)
    if "layer" in arguments.parts:
        dtype = resolve_dtype("auto", ConfigReader(preset, arguments.model), device)
        yield from _layer(preset, device, dtype, arguments.rows, arguments.baseline)
    if "serve" in arguments.parts:
        yield from _serve(arguments)


def _layer(
    preset: Any, device: torch.device, dtype: torch.dtype, row_counts: Sequence[int], baseline: bool
) -> Rows:
    hidden, inter = preset["hidden_size"], preset["moe_intermediate_size"]
    routing = Routing(preset["num_experts"], preset["num_experts_per_tok"], normalize=True)
    cuda = device.type == "cuda"
    factory = Factory(dtype, device, fused=use_kernels(dtype, device))
    if not cuda:
        factory = replace(factory, keep=True, cpu=CpuKernels.load())
    ours = ExpertWeights(hidden, inter, routing.experts, factory)
    gate_up = torch.randn(routing.experts, 2 * inter, hidden, dtype=dtype, device=device)
    down = torch.randn(routing.experts, hidden, inter, dtype=dtype, device=device)
    matrices = gate_up.mul_(hidden**-0.5), down.mul_(inter**-0.5)
    for (_, slot, _), matrix in zip(ours.joint_slots(""), matrices, strict=True):
        slot.write(matrix)
    calls: dict[str, Experts] = {"cairn": ours, **_others(preset, matrices, baseline)}
    bandwidth = read_bandwidth(device) if cuda else None
    for rows in row_counts:
        sets = [_draw(rows, hidden, routing, factory) for _ in range(_SETS if cuda else 1)]
        results = {name: call(*sets[0]) for name, call in calls.items()}
        for result in results.values():
            torch.testing.assert_close(results["cairn"], result, rtol=0.05, atol=0.05)
        seconds = dict(zip(calls, _seconds(list(calls.values()), sets), strict=True))
        own = seconds["cairn"]
        used = sum(len(torch.unique(given.ids)) for given in sets) / len(sets)
        used *= 3 * hidden * inter * dtype.itemsize
        row = {"rows": rows, "cairn_us": own * 1e6, "GB/s": used / own / 1e9}
        if bandwidth is not None:
            row["share_of_read"] = used / bandwidth / own
            row["TFLOP/s"] = 6.0 * rows * routing.per_token * inter * hidden / own / 1e12
            row["router_us"] = _router_seconds(rows, routing, device) * 1e6
        row |= {f"{name}_us": one * 1e6 for name, one in seconds.items()}
        names = ("transformers", "torch", "sglang")
        row |= {_ratio(name): seconds[name] / own for name in names if name in seconds}
        yield {name: round(value, 2) for name, value in row.items()}
    if cuda:
        yield {"skipped": missing_module(_SGLANG, "sglang") or "nothing"}


def _ratio(name: str) -> str:
    return "ratio" if name == "transformers" else f"{name}_ratio"


def _others(
    preset: Any, matrices: tuple[torch.Tensor, torch.Tensor], baseline: bool
) -> dict[str, Experts]:
    others: dict[str, Experts] = {}
    dtype = matrices[0].dtype
    if baseline:
        theirs = _transformers(preset, *matrices)
        others["transformers"] = lambda x, ids, weights: theirs(x, ids.long(), weights.to(dtype))
    if matrices[0].is_cuda:
        others["torch"] = lambda x, ids, weights: in_torch.experts(x, ids, weights, *matrices)
        if missing_module(_SGLANG, "sglang") is None:
            fused = import_module(_SGLANG).fused_experts_impl
            others["sglang"] = lambda x, ids, weights: fused(x, *matrices, weights, ids)
    return others


def _transformers(preset: Any, gate_up: torch.Tensor, down: torch.Tensor) -> Any:
    """The experts of a model in transformers, as it would run them by default."""
    import transformers

    config = transformers.Qwen3MoeConfig(**{**preset, "num_hidden_layers": 1, "vocab_size": 8})
    model = transformers.AutoModelForCausalLM.from_config(config, dtype=gate_up.dtype)
    own: Any = model.model.layers[0].mlp.experts
    own.to(gate_up.device)
    own.gate_up_proj.data.copy_(gate_up)
    own.down_proj.data.copy_(down)
    return own


def _draw(rows: int, hidden: int, routing: Routing, factory: Factory) -> Inputs:
    x = torch.randn(rows, hidden, dtype=factory.dtype, device=factory.device)
    logits = torch.randn(rows, routing.experts, device=factory.device)
    weights, ids = in_torch.route(logits, None, routing)
    return Inputs(x, ids, weights)


def _seconds(calls: list[Experts], sets: list[Inputs]) -> list[float]:
    """Median seconds of each call; on a CPU in turn, so that all meet the same machine."""
    if sets[0].x.is_cuda:
        return [time_cuda(lambda c=call: [c(*own) for own in sets]) / len(sets) for call in calls]  # type: ignore[misc]
    times: list[list[float]] = [[] for _ in calls]
    for _ in range(_REPEAT):
        for own, call in zip(times, calls, strict=True):
            begin = time.perf_counter()
            call(*sets[0])
            own.append(time.perf_counter() - begin)
    return [median(own) for own in times]


def _router_seconds(rows: int, routing: Routing, device: torch.device) -> float:
    from cairn.kernels.route import route

    logits = torch.randn(rows, routing.experts, device=device)
    ids = route(logits, None, routing, torch.float32)[1]
    assert torch.equal(ids, in_torch.route(logits, None, routing)[1]), "the router chose others"
    return time_cuda(lambda: route(logits, None, routing, torch.float32))


def _serve(arguments: argparse.Namespace) -> Rows:
    """Requests served together by the whole model, with random weights."""
    model = arguments.model
    with measured(
        model=model,
        load_format="dummy",
        dtype="bfloat16",
        device="cuda",
        context_length=4 * _LENGTH,
        max_running_requests=_SERVED,
        quantization=arguments.quantization,
    ) as llm:
        prompts = [random_prompt(llm, _LENGTH, seed) for seed in range(_SERVED)]
        prefill = first_token(llm, prompts)
        llm.engine.scheduler.cache.tree.clear()
        begin = time.perf_counter()
        llm.generate(prompts, max_tokens=_LENGTH, ignore_eos=True)
        seconds = time.perf_counter() - begin
        tokens = _SERVED * _LENGTH
        named = model if arguments.quantization == "none" else f"{model}, {arguments.quantization}"
        what = f"{_SERVED} requests of {_LENGTH} in and out, {named}"
        rates = {"prefill_tokens/s": tokens / prefill, "output_tokens/s": tokens / seconds}
        yield {"what": what, **{name: round(rate) for name, rate in rates.items()}}
