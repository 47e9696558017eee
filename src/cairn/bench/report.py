"""Results as a table on the screen, one JSON line, a file and a plot."""

from __future__ import annotations

import json
import platform
from datetime import date
from pathlib import Path
from typing import Any

import numpy as np
import torch
from rich.console import Console
from rich.table import Table

from cairn import __version__
from cairn.bench.measure import Measurement
from cairn.bench.workloads import Workload
from cairn.errors import ConfigError


def summarize(runs: list[Measurement]) -> dict[str, Any]:
    """The run of median speed, with the speed of every run beside it."""
    measured = sorted(runs, key=lambda run: run.tokens_per_second)[len(runs) // 2]

    def percentiles(seconds: list[float]) -> dict[str, float] | None:
        if not seconds:
            return None
        values = np.array(seconds) * 1e3
        return {
            "mean": round(float(values.mean()), 3),
            "p50": round(float(np.percentile(values, 50)), 3),
            "p99": round(float(np.percentile(values, 99)), 3),
        }

    hit = measured.cached_tokens / measured.prompt_tokens if measured.prompt_tokens else 0.0
    return {
        "engine": measured.engine,
        "seconds": round(measured.seconds, 3),
        "output_tokens": measured.output_tokens,
        "tokens_per_second": round(measured.tokens_per_second, 2),
        "runs_tokens_per_second": [round(run.tokens_per_second, 2) for run in runs],
        "first_token_ms": percentiles(measured.first_token),
        "first_request_ttft_ms": _first(measured.first_token),
        "later_requests_ttft_ms": percentiles(measured.first_token[1:]),
        "between_tokens_ms": percentiles(measured.between_tokens),
        "prefix_hit_rate": round(hit, 4),
    }


def _first(seconds: list[float]) -> float | None:
    return round(seconds[0] * 1e3, 3) if seconds else None


def make_record(
    workload: Workload, rows: list[list[Measurement]], options: dict[str, Any], device: str
) -> dict[str, Any]:
    return {
        "workload": workload.name,
        "description": workload.description,
        "date": date.today().isoformat(),
        "cairn": __version__,
        "torch": torch.__version__,
        "device": _device_name(device),
        "threads": torch.get_num_threads(),
        "options": options,
        "results": [summarize(runs) for runs in rows],
    }


def show(record: dict[str, Any], output: str | None, plot: str | None) -> None:
    """Table first, the JSON line last."""
    console = Console()
    console.print(f"{record['workload']}: {record['description']}")
    console.print(f"[dim]{record['device']}, torch {record['torch']}, {record['date']}[/dim]")
    table = Table(
        "engine", "tok/s", "first token ms", "later requests ms", "ms/token", "p99", "hits"
    )
    for row in record["results"]:
        gaps = row["between_tokens_ms"] or {}
        later = row["later_requests_ttft_ms"] or {}
        table.add_row(
            row["engine"],
            f"{row['tokens_per_second']:.1f}",
            _cell(row["first_request_ttft_ms"]),
            _cell(later.get("p50")),
            _cell(gaps.get("p50")),
            _cell(gaps.get("p99")),
            f"{100 * row['prefix_hit_rate']:.0f} %",
        )
    console.print(table)
    if len(record["results"]) == 2:
        ours, theirs = (row["tokens_per_second"] for row in record["results"])
        console.print(f"cairn / transformers: {ours / theirs:.2f}x tokens/s")
    line = json.dumps(record)
    if output is not None:
        Path(output).write_text(line + "\n", encoding="utf-8")
    if plot is not None:
        _plot(record, Path(plot))
    print(line)


def _plot(record: dict[str, Any], path: Path) -> None:
    try:
        import matplotlib
    except ImportError as error:
        raise ConfigError("--plot needs matplotlib: pip install 'cairn[bench]'") from error
    matplotlib.use("Agg")
    from matplotlib import pyplot

    rows = record["results"]
    names = [row["engine"] for row in rows]
    panels = [
        ("output tokens/s (more is better)", [row["tokens_per_second"] for row in rows]),
        ("first token, first request, ms", [row["first_request_ttft_ms"] or 0 for row in rows]),
        (
            "first token, later requests, ms",
            [(row["later_requests_ttft_ms"] or {}).get("p50", 0) for row in rows],
        ),
    ]
    figure, axes = pyplot.subplots(1, len(panels), figsize=(4 * len(panels), 3.6))
    for axis, (title, values) in zip(axes, panels, strict=True):
        bars = axis.bar(names, values, color=["#2a6f97", "#b8b8b8"][: len(names)])
        axis.bar_label(bars, fmt="%.4g", padding=2)
        axis.set_title(title, fontsize=9)
        axis.margins(y=0.15)
        axis.spines[["top", "right"]].set_visible(False)
    figure.suptitle(f"{record['workload']}: {record['description']}", fontsize=10)
    figure.tight_layout()
    figure.savefig(path, dpi=120)
    pyplot.close(figure)


def _cell(value: float | None) -> str:
    return "-" if value is None else f"{value:.1f}"


def _device_name(device: str) -> str:
    if device == "cuda":
        return torch.cuda.get_device_name()
    return f"{platform.processor() or platform.machine()}, {torch.get_num_threads()} threads"


def show_rows(name: str, rows: list[dict[str, Any]], output: str | None) -> None:
    """A table with one column per field, and one JSON line."""
    record = {
        "workload": name,
        "date": date.today().isoformat(),
        "cairn": __version__,
        "torch": torch.__version__,
        "device": torch.cuda.get_device_name() if torch.cuda.is_available() else platform.machine(),
        "results": rows,
    }
    columns = list(dict.fromkeys(field for row in rows for field in row))
    table = Table(*columns, title=f"{name}: {record['device']}, torch {record['torch']}")
    for row in rows:
        table.add_row(*(str(row.get(column, "")) for column in columns))
    Console().print(table)
    line = json.dumps(record)
    print(line)
    if output is not None:
        Path(output).write_text(line + "\n", encoding="utf-8")
