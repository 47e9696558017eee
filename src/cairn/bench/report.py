"""Results of `cairn bench` and `cairn eval`: a table, one JSON line, a file and a plot."""

from __future__ import annotations

import json
import os
import platform
import sys
from collections.abc import Callable, Iterable, Sequence
from datetime import date
from pathlib import Path
from typing import Any

import numpy as np
import torch
from rich.console import Console
from rich.table import Table

from cairn import __version__
from cairn.errors import ConfigError, install


def check_files(**paths: str | None) -> None:
    """Refuse output files that cannot be written, before there is a result to lose."""
    for name, given in paths.items():
        if given is None:
            continue
        path = Path(given).absolute()
        if path.is_dir():
            reason = "it is a folder"
        elif not path.parent.is_dir():
            reason = "there is no such folder"
        elif not os.access(path if path.exists() else path.parent, os.W_OK):
            reason = "there is no permission"
        else:
            continue
        raise ConfigError(
            f"--{name} {given} cannot be written: {reason}; name a file in a folder that exists"
        )
    if paths.get("plot") is not None:
        need_matplotlib()


def need_matplotlib() -> Any:
    """matplotlib's pyplot, which is imported only for plots."""
    try:
        import matplotlib
    except ImportError as error:
        raise ConfigError(f"--plot needs matplotlib: {install('bench')}") from error
    matplotlib.use("Agg")
    from matplotlib import pyplot

    return pyplot


def save_plot(figure: Any, title: str, path: str) -> None:
    figure.suptitle(title, fontsize=10)
    figure.tight_layout()
    figure.savefig(path, format="png", dpi=120)
    need_matplotlib().close(figure)


def stamp(*, cuda: bool | None = None) -> dict[str, str]:
    """When, with what and where: fields of every record."""
    cuda = torch.cuda.is_available() if cuda is None else cuda
    processor = f"{platform.processor() or platform.machine()}, {torch.get_num_threads()} threads"
    return {
        "date": date.today().isoformat(),
        "cairn": __version__,
        "torch": torch.__version__,
        "device": torch.cuda.get_device_name() if cuda else processor,
    }


def finish(record: dict[str, Any], output: str | None) -> None:
    """Print the JSON line, which comes last, and write it to `output`."""
    line = json.dumps(record)
    if output is not None:
        Path(output).write_text(line + "\n", encoding="utf-8")
    print(line)


def print_rows(
    title: str,
    rows: Iterable[dict[str, Any]],
    columns: Sequence[str],
    form: Callable[[Any], str] = lambda value: "" if value is None else str(value),
) -> None:
    table = Table(*(name.replace("_", " ") for name in columns), title=title)
    for row in rows:
        table.add_row(*(form(row.get(column)) for column in columns))
    Console().print(table)


def tell(rows: Iterable[dict[str, Any]]) -> list[dict[str, Any]]:
    """All rows, after each was printed to standard error when it came."""
    told = []
    for row in rows:
        print(", ".join(f"{name} {value}" for name, value in row.items()), file=sys.stderr)
        told.append(row)
    return told


def show_rows(name: str, rows: list[dict[str, Any]], output: str | None) -> None:
    """A table with one column per field, and one JSON line."""
    record = {"workload": name, **stamp(), "results": rows}
    columns = list(dict.fromkeys(field for row in rows for field in row))
    print_rows(f"{name}: {record['device']}, torch {record['torch']}", rows, columns)
    finish(record, output)


def percentiles(seconds: Sequence[float] | np.ndarray, *percents: int) -> dict[str, float]:
    """In ms, by names such as p50; empty if there is nothing."""
    if not len(seconds):
        return {}
    values = np.percentile(seconds, percents)
    return {f"p{p}": round(1e3 * float(v), 3) for p, v in zip(percents, values, strict=True)}
