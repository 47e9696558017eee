"""Results as a table on the screen, one JSON line, and a file."""

from __future__ import annotations

import json
import os
import platform
from collections.abc import Sequence
from datetime import date
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from rich.text import Text

from cairn import __version__
from cairn.errors import ConfigError


def check_files(**paths: str | None) -> None:
    """Before the work is done whose result would be lost."""
    for name, path in paths.items():
        if path is None:
            continue
        folder = Path(path).absolute().parent
        if Path(path).is_dir() or not folder.is_dir() or not os.access(folder, os.W_OK):
            raise ConfigError(
                f"--{name} {path} cannot be written; name a file in a folder that exists"
            )
    if paths.get("plot") is not None:
        from cairn.eval.plots import need_matplotlib

        need_matplotlib()


def make_record(
    kind: str, options: dict[str, Any], asked: dict[str, Any], results: Sequence[dict[str, Any]]
) -> dict[str, Any]:
    cuda = torch.cuda.is_available()
    return {
        "eval": kind,
        "date": date.today().isoformat(),
        "cairn": __version__,
        "torch": torch.__version__,
        "device": torch.cuda.get_device_name() if cuda else platform.machine(),
        "options": options,
        "asked": asked,
        "results": list(results),
    }


def finish(record: dict[str, Any], output: str | None) -> None:
    """The JSON line, last."""
    line = json.dumps(record)
    if output is not None:
        Path(output).write_text(line + "\n", encoding="utf-8")
    print(line)


def show_needle(record: dict[str, Any]) -> None:
    """A map of each task: depths down, lengths across."""
    console = Console()
    for task, cells in by_task(record["results"]).items():
        lengths = sorted({length for length, _ in cells})
        depths = sorted({depth for _, depth in cells if depth is not None})
        table = Table("depth", *(f"{length:,}" for length in lengths), title=f"needle: {task}")
        for depth in depths:
            table.add_row(f"{depth:.0%}", *(_cell(cells.get((n, depth))) for n in lengths))
        table.add_section()
        table.add_row("all", *(_cell(cells[n, None], interval=True) for n in lengths))
        console.print(table)


def by_task(
    results: Sequence[dict[str, Any]],
) -> dict[str, dict[tuple[int, float | None], dict[str, Any]]]:
    """task -> (length, depth) -> cell"""
    tasks: dict[str, dict[tuple[int, float | None], dict[str, Any]]] = {}
    for row in results:
        tasks.setdefault(row["task"], {})[row["length"], row["depth"]] = row
    return tasks


def _cell(row: dict[str, Any] | None, *, interval: bool = False) -> Text:
    if row is None:
        return Text("-")
    text = f"{row['right']}/{row['asked']}"
    if interval:
        text = f"{row['share']:.0%} ({row['low']:.0%} to {row['high']:.0%})"
    color = "green" if row["share"] >= 0.9 else "yellow" if row["share"] >= 0.5 else "red"
    return Text(text, style=color)


def show_rows(record: dict[str, Any], columns: Sequence[str]) -> None:
    table = Table(*(name.replace("_", " ") for name in columns), title=record["eval"])
    for row in record["results"]:
        table.add_row(*(_value(row.get(column)) for column in columns))
    Console().print(table)


def show_layers(record: dict[str, Any]) -> None:
    """Share of the attention before the window that each setting keeps, layer by layer."""
    results = record["results"]
    layers = [entry["layer"] for entry in results[0]["layers"]]
    table = Table("layer", *(row["setting"] for row in results), title="far, by layer")
    for i, layer in enumerate(layers):
        table.add_row(str(layer), *(_value(row["layers"][i]["far"]) for row in results))
    Console().print(table)


def _value(value: object) -> str:
    if value is None:
        return "-"
    return f"{value:.4g}" if isinstance(value, float) else str(value)
