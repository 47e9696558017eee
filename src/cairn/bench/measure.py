"""`cairn bench latency`, `offline`, `rag`, `summarize`: Cairn beside plain transformers."""

from __future__ import annotations

import argparse
import time
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import torch
from rich.console import Console
from torch.nn.utils.rnn import pad_sequence

from cairn.bench import report
from cairn.bench.engines import Arrivals, settled
from cairn.bench.workloads import Workload, make_workload, settle_lengths
from cairn.cli_flags import check_at_least, collect
from cairn.config import EngineConfig
from cairn.engine.locate import locate
from cairn.engine.resolve import resolve_device, resolve_dtype
from cairn.engine.sampling_params import SamplingParams
from cairn.errors import ConfigError, install
from cairn.llm import LLM
from cairn.models.blocks import dense
from cairn.models.source import ModelSource


@dataclass(frozen=True, slots=True)
class Measurement:
    """Seconds and tokens of one engine on one workload."""

    engine: str
    seconds: float
    output_tokens: int
    first_token: Sequence[float]  # per request
    between_tokens: Sequence[float]  # all gaps of all requests
    hit_rate: float = 0.0

    @property
    def tokens_per_second(self) -> float:
        return self.output_tokens / self.seconds


def command(arguments: argparse.Namespace) -> int:
    settle_lengths(arguments)
    check_at_least(arguments, 1, "requests", "input_len", "output_len", "repeat")
    report.check_files(output=arguments.output, plot=arguments.plot)
    options = collect(arguments, EngineConfig)
    with LLM(**options) as llm:
        workload = make_workload(arguments, llm.tokenizer, llm.engine.spec.vocab_size)
        llm.generate([1, 2, 3], max_tokens=8, ignore_eos=True)  # warm up
        device = resolve_device(llm.config.device)
        baseline = None
        if arguments.baseline:
            source = locate(llm.config)
            dtype = resolve_dtype(llm.config.dtype, source.config, device)
            baseline = TransformersBaseline(source, dtype, device)
            baseline.generate(torch.tensor([[1, 2, 3]]), 8)  # warm up
        runs: list[list[Measurement]] = [[], []]
        with settled():
            for _ in range(arguments.repeat):  # in turn: both meet the same state of the machine
                llm.engine.scheduler.cache.tree.clear()  # every run starts cold
                runs[0].append(measure_cairn(llm, workload))
                if baseline is not None:
                    runs[1].append(baseline.measure(workload))
    record = {
        "workload": workload.name,
        "description": workload.description,
        **report.stamp(cuda=device.type == "cuda"),
        "threads": torch.get_num_threads(),
        "options": options,
        "results": [_summary(some) for some in runs if some],
    }
    _show(record)
    if arguments.plot is not None:
        _plot(record, arguments.plot)
    report.finish(record, arguments.output)
    return 0


# -- measuring --------------------------------------------------------------------------------


def measure_cairn(llm: LLM, workload: Workload) -> Measurement:
    """Times are taken where a user would: when the text arrives."""
    arrivals = Arrivals(llm)
    begin = time.perf_counter()
    requests = zip(workload.prompts, workload.output_lens, strict=True)
    for index, (prompt, most) in enumerate(requests):
        params = SamplingParams(
            max_tokens=most,
            temperature=workload.temperature,
            seed=0 if workload.one_by_one else index,
            ignore_eos=True,
        )
        arrivals.send(prompt, params, None if workload.one_by_one else begin)
        if workload.one_by_one:
            arrivals.finish()
    arrivals.finish()
    return Measurement(
        "cairn",
        time.perf_counter() - begin,
        sum(result.usage.completion_tokens for result in arrivals.results),
        arrivals.first_tokens(),
        arrivals.gaps().tolist(),
        sum(result.usage.cached_tokens for result in arrivals.results)
        / sum(result.usage.prompt_tokens for result in arrivals.results),
    )


class TransformersBaseline:
    """The same weights in transformers' own model code, with its own cache and generate."""

    def __init__(self, source: ModelSource, dtype: torch.dtype, device: torch.device) -> None:
        try:
            import transformers
        except ImportError as error:
            raise ConfigError(
                f"the baseline needs transformers: {install('bench')}, or --no-baseline"
            ) from error
        if source.folder is not None:
            model = transformers.AutoModelForCausalLM.from_pretrained(source.folder, dtype=dtype)
        else:
            name = source.config.architecture.removesuffix("ForCausalLM")
            config = getattr(transformers, f"{name}Config")(**source.config.values())
            model = transformers.AutoModelForCausalLM.from_config(config, dtype=dtype)
            if source.gguf is not None:
                tensors = {name: dense(tensor) for _, name, tensor in source.gguf.tensors()}
                missing, unexpected = model.load_state_dict(tensors, strict=False)
                tied = {"lm_head.weight"} if config.tie_word_embeddings else set()
                assert set(missing) <= tied and not unexpected
        self.model: Any = model.eval().to(device)
        self._device = device

    def measure(self, workload: Workload) -> Measurement:
        first_token: list[float] = []
        between_tokens: list[float] = []
        begin = time.perf_counter()
        if workload.one_by_one:
            for prompt, most in zip(workload.prompts, workload.output_lens, strict=True):
                sent, clock = time.perf_counter(), _Clock()
                self.generate(torch.tensor([prompt]), most, streamer=clock)
                first, *others = np.diff([sent, *clock.moments[1:]]).tolist()
                first_token.append(first)
                between_tokens += others
        else:  # padded on the left; everybody waits for the longest answer
            prompts = [torch.tensor(prompt, device=self._device) for prompt in workload.prompts]
            pad = partial(pad_sequence, batch_first=True, padding_side="left")
            mask = pad([torch.ones_like(prompt) for prompt in prompts])
            self.generate(pad(prompts), max(workload.output_lens), attention_mask=mask)
        seconds = time.perf_counter() - begin
        tokens = sum(workload.output_lens)
        return Measurement("transformers", seconds, tokens, first_token, between_tokens)

    def generate(self, prompts: torch.Tensor, most: int, **options: Any) -> None:
        self.model.generate(
            prompts.to(self._device),
            max_new_tokens=most,
            min_new_tokens=most,
            do_sample=False,
            pad_token_id=0,
            **options,
        )


class _Clock:
    """A streamer for `generate`: it keeps when it got the prompt, and then each token."""

    def __init__(self) -> None:
        self.moments: list[float] = []

    def put(self, ids: torch.Tensor) -> None:  # on the CPU, so the step has ended
        self.moments.append(time.perf_counter())

    def end(self) -> None:
        pass


# -- reporting --------------------------------------------------------------------------------


def _summary(runs: list[Measurement]) -> dict[str, Any]:
    """The run of median speed, with the speed of every run beside it."""
    run = sorted(runs, key=lambda run: run.tokens_per_second)[len(runs) // 2]
    return {
        "engine": run.engine,
        "seconds": round(run.seconds, 3),
        "output_tokens": run.output_tokens,
        "tokens_per_second": round(run.tokens_per_second, 2),
        "runs_tokens_per_second": [round(run.tokens_per_second, 2) for run in runs],
        "first_token_ms": _spread(run.first_token),
        "first_request_ttft_ms": round(run.first_token[0] * 1e3, 3) if run.first_token else None,
        "later_requests_ttft_ms": _spread(run.first_token[1:]),
        "between_tokens_ms": _spread(run.between_tokens),
        "prefix_hit_rate": round(run.hit_rate, 4),
    }


def _spread(seconds: Sequence[float]) -> dict[str, float] | None:
    """Mean, median and P99 in ms."""
    if not seconds:
        return None
    mean = round(1e3 * sum(seconds) / len(seconds), 3)
    return {"mean": mean, **report.percentiles(seconds, 50, 99)}


def _show(record: dict[str, Any]) -> None:
    console = Console()
    console.print(f"{record['workload']}: {record['description']}")
    console.print(f"[dim]{record['device']}, torch {record['torch']}, {record['date']}[/dim]")
    rows = []
    for row in record["results"]:
        gaps = row["between_tokens_ms"] or {}
        times = {
            "tok/s": row["tokens_per_second"],
            "first token ms": row["first_request_ttft_ms"],
            "later requests ms": (row["later_requests_ttft_ms"] or {}).get("p50"),
            "ms/token": gaps.get("p50"),
            "p99": gaps.get("p99"),
        }
        cells = {name: "-" if ms is None else f"{ms:.1f}" for name, ms in times.items()}
        hits = f"{100 * row['prefix_hit_rate']:.0f} %"
        rows.append({"engine": row["engine"], **cells, "hits": hits})
    report.print_rows("", rows, list(rows[0]))
    if len(rows) == 2:
        ours, theirs = (row["tokens_per_second"] for row in record["results"])
        console.print(f"cairn / transformers: {ours / theirs:.2f}x tokens/s")


def _plot(record: dict[str, Any], path: str) -> None:
    rows = record["results"]
    names = [row["engine"] for row in rows]
    later = [(row["later_requests_ttft_ms"] or {}).get("p50", 0) for row in rows]
    panels = {
        "output tokens/s (more is better)": [row["tokens_per_second"] for row in rows],
        "first token, first request, ms": [row["first_request_ttft_ms"] or 0 for row in rows],
        "first token, later requests, ms": later,
    }
    figure, axes = report.need_matplotlib().subplots(1, len(panels), figsize=(4 * len(panels), 3.6))
    for axis, (title, values) in zip(axes, panels.items(), strict=True):
        bars = axis.bar(names, values, color=["#2a6f97", "#b8b8b8"][: len(names)])
        axis.bar_label(bars, fmt="%.4g", padding=2)
        axis.set_title(title, fontsize=9)
        axis.margins(y=0.15)
        axis.spines[["top", "right"]].set_visible(False)
    report.save_plot(figure, f"{record['workload']}: {record['description']}", path)
