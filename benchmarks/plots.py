"""Pictures of what `cairn bench` measured, from the JSON lines it ends in.

python benchmarks/plots.py benchmarks/results/*.jsonl --out docs/plots
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")
from matplotlib import pyplot

Rows = list[dict[str, Any]]
Belongs = Callable[[dict[str, Any]], bool]
Draw = Callable[[Rows, str], None]
_SUBJECT = (
    *("case", "backend", "model", "context", "batch", "selection"),
    *("tier", "running", "copies"),
)
"""Fields that say what a row is of."""
COLORS = {"triton": "#2a6f97", "sgl_kernel": "#e09f3e", "flashinfer": "#9e2a2b", "torch": "#8d99ae"}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("files", nargs="+", type=Path)
    parser.add_argument("--out", type=Path, default=Path("docs/plots"))
    arguments = parser.parse_args()
    arguments.out.mkdir(parents=True, exist_ok=True)
    for file in arguments.files:
        records = [json.loads(line) for line in file.read_text(encoding="utf-8").splitlines()]
        for workload, drawings in DRAWINGS.items():
            own = [record for record in records if record["workload"] == workload]
            for name, (belongs, draw) in drawings.items():
                rows, dates = _newest(own, belongs)
                if not rows:
                    continue
                draw(rows, f"{own[-1]['device']}, {dates}")
                path = arguments.out / f"{name}.png"
                pyplot.tight_layout()
                pyplot.savefig(path, dpi=110)
                pyplot.close()
                print(path)


def _newest(records: list[dict[str, Any]], belongs: Belongs) -> tuple[Rows, str]:
    """Of all runs in a file the newest row of everything measured, and the dates of these rows."""
    found: dict[tuple[Any, ...], tuple[str, dict[str, Any]]] = {}
    for record in records:
        for row in filter(belongs, record["results"]):
            found[tuple(row.get(name) for name in _SUBJECT)] = record["date"], row
    dates = sorted({date for date, _ in found.values()})
    return [row for _, row in found.values()], " to ".join(dict.fromkeys(dates[:1] + dates[-1:]))


def attention_decode(rows: Rows, where: str) -> None:
    """Bytes of keys and values per second."""
    _bars(rows, "TB/s", f"Decode attention, one layer ({where})")
    for row in rows:
        if row["case"].startswith("plain read"):
            label = f"{row['case']}: {row['TB/s']}"
            pyplot.axhline(row["TB/s"], color="black", linestyle=":", linewidth=1, label=label)
    pyplot.legend(fontsize=8, loc="upper center", ncol=4)


def attention_prefill(rows: Rows, where: str) -> None:
    _bars(rows, "TFLOP/s", f"Prefill attention, one layer ({where})")


def _bars(rows: Rows, unit: str, title: str) -> None:
    measured = [row for row in rows if "backend" in row]
    cases = list(dict.fromkeys(row["case"] for row in measured))
    backends = list(dict.fromkeys(row["backend"] for row in measured))
    pyplot.figure(figsize=(8, 3.6))
    for b, backend in enumerate(backends):
        values = {row["case"]: row[unit] for row in measured if row["backend"] == backend}
        shift = 0.8 * (b + 0.5) / len(backends) - 0.4
        places = [c + shift for c, case in enumerate(cases) if case in values]
        bars = pyplot.bar(
            places,
            [values[case] for case in cases if case in values],
            0.75 / len(backends),
            label=backend,
            color=COLORS.get(backend),
        )
        pyplot.bar_label(bars, fmt="%.3g", fontsize=8)
    pyplot.xticks(range(len(cases)), [case.replace(", ", "\n") for case in cases], fontsize=8)
    pyplot.ylabel(unit)
    pyplot.title(title, fontsize=10)
    pyplot.ylim(0, 1.25 * max(row[unit] for row in measured))
    pyplot.legend(fontsize=8, loc="upper center", ncol=3)


def hsa_decode(rows: Rows, where: str) -> None:
    """Milliseconds of a step against the context, hsa beside dense."""
    _lines(rows, f"Decode step, 345M parameters ({where})")


def hsa_prefill(rows: Rows, where: str) -> None:
    _lines(rows, f"Time to the first token, 345M parameters ({where})")
    pyplot.yscale("log")


def _lines(measured: Rows, title: str) -> None:
    pyplot.figure(figsize=(6.4, 3.8))

    def series(row: dict[str, Any]) -> tuple[str, int, str]:
        return row["model"], row["batch"], row.get("selection", "")

    for model, batch, selection in dict.fromkeys(map(series, measured)):
        own = [row for row in measured if series(row) == (model, batch, selection)]
        sparse = model.startswith("hils")
        name = "hsa" if sparse else "dense"
        pyplot.plot(
            [row["context"] for row in own],
            [row["ms"] for row in own],
            marker="o",
            label=f"{name}, {selection or f'batch {batch}'}",
            linestyle="-" if sparse else "--",
        )
    pyplot.xscale("log", base=2)
    lengths = sorted({row["context"] for row in measured})
    pyplot.xticks(lengths, [f"{length // 1024}K" for length in lengths])
    pyplot.xlabel("tokens of context")
    pyplot.ylabel("ms")
    pyplot.title(title, fontsize=10)
    pyplot.legend(fontsize=8)


def tier_throughput(rows: Rows, where: str) -> None:
    """Tokens per second against requests that run at once, with the tier and without."""
    context = rows[0]["context"]
    pyplot.figure(figsize=(5.2, 3.4))
    for tier, name in ((False, "device alone"), (True, "with host memory")):
        own = [row for row in rows if row["tier"] == tier and "copies" not in row]
        pyplot.plot(
            [row["running"] for row in own],
            [row["tokens_per_s"] for row in own],
            marker="o",
            label=name,
        )
    pyplot.xticks(sorted({row["running"] for row in rows}))
    pyplot.ylim(bottom=0)
    pyplot.xlabel("requests at once")
    pyplot.ylabel("tokens/s")
    pyplot.title(f"{context // 1024}K contexts, 16 GiB of device memory ({where})", fontsize=9)
    pyplot.legend(fontsize=8)


def _of(name: str, value: Any) -> Belongs:
    return lambda row: row.get(name) == value


def _throughput(context: int) -> Belongs:
    return lambda row: "running" in row and row["context"] == context


DRAWINGS: dict[str, dict[str, tuple[Belongs, Draw]]] = {
    "attention": {
        "attention-decode": (lambda row: "TB/s" in row, attention_decode),
        "attention-prefill": (lambda row: "TFLOP/s" in row, attention_prefill),
    },
    "hsa": {
        "hsa-decode": (_of("what", "decode"), hsa_decode),
        "hsa-prefill": (_of("what", "prefill"), hsa_prefill),
    },
    "tier": {
        "tier-128k": (_throughput(131072), tier_throughput),
        "tier-32k": (_throughput(32768), tier_throughput),
    },
}
"""What a picture shows, and who draws it."""


if __name__ == "__main__":
    main()
