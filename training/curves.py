"""Plots of a run's log."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any


def read_log(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def draw(log: Path, picture: Path) -> None:
    """Loss and accuracy by kind of token, and held-out answers, over all steps."""
    try:
        import matplotlib
    except ImportError:  # a failed plot must not end the run
        return

    matplotlib.use("Agg")
    from matplotlib import pyplot

    records = read_log(log)
    figure, axes = pyplot.subplots(3, 1, figsize=(9, 11), sharex=True)
    for axis, prefix, label in (
        (axes[0], "loss/", "loss"),
        (axes[1], "right/", "share of tokens right"),
        (axes[2], "held/", "share of held-out answers right"),
    ):
        names = sorted({name for record in records for name in record if name.startswith(prefix)})
        for name in names:
            points = [(r["total"], r[name]) for r in records if name in r]
            style = "o-" if prefix == "held/" else "-"
            axis.plot(*zip(*points, strict=True), style, label=name.removeprefix(prefix), ms=3)
        axis.set_ylabel(label)
        axis.grid(alpha=0.3)
        if names:
            axis.legend(fontsize=8)
    begins: dict[str, int] = {}
    for record in records:
        begins.setdefault(record["phase"], record["total"])
    for name, total in begins.items():
        for axis in axes:
            axis.axvline(total, color="grey", lw=0.8)
        axes[0].text(total, axes[0].get_ylim()[1], f" {name}", va="bottom", fontsize=8)
    axes[2].set_xlabel("steps")
    figure.tight_layout()
    figure.savefig(picture, dpi=120)
    pyplot.close(figure)
