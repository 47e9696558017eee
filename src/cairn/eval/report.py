"""Results of `cairn eval` as tables, plots and one JSON line."""

from __future__ import annotations

import argparse
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from cairn.bench import report

Cells = dict[tuple[int, float | None], dict[str, Any]]
"""Results of a task by length and depth; depth None stands for all depths."""


def make_record(
    kind: str, options: dict[str, Any], asked: dict[str, Any], results: Sequence[dict[str, Any]]
) -> dict[str, Any]:
    own = {"options": options, "asked": asked, "results": list(results)}
    return {"eval": kind, **report.stamp(), **own}


def finish(record: dict[str, Any], arguments: argparse.Namespace) -> None:
    """Draw the plot if requested, then print and write the JSON line."""
    if arguments.plot is not None:
        _PLOTS[record["eval"]](record, arguments.plot)
    report.finish(record, arguments.output)


# -- tables -----------------------------------------------------------------------------------


def show_needle(record: dict[str, Any]) -> None:
    """Print a table for each task: depths down, lengths across."""
    for task, cells in _by_task(record).items():
        lengths, depths = _axes(cells)
        table = Table("depth", *(f"{length:,}" for length in lengths), title=f"needle: {task}")
        for depth in depths:
            table.add_row(f"{depth:.0%}", *(_cell(cells.get((n, depth))) for n in lengths))
        table.add_section()
        table.add_row("all", *(_cell(cells[n, None], interval=True) for n in lengths))
        Console().print(table)

    if "against" in record:
        _show_against(record["against"])


def _show_against(found: dict[str, Any]) -> None:
    share = "none were right there"
    if found["kept"] is not None:
        share = f"{found['kept']:.0%} of them ({found['low']:.0%} to {found['high']:.0%})"
    text = f"{found['right']} of {found['asked']} right, {found['theirs']} in {found['answers']}"
    print(f"{text}: {share}; {found['lost']} lost, {found['won']} won")


def show_ruler(record: dict[str, Any]) -> None:
    """Print a table: tasks down, lengths across."""
    scores, tasks, lengths = _by_length(record)
    table = Table("task", *(f"{length:,}" for length in lengths), title="RULER")
    for task in tasks:
        if task == "all":
            table.add_section()
        table.add_row(task, *(_score(scores.get((task, length))) for length in lengths))
    Console().print(table)


def _by_length(
    record: dict[str, Any],
) -> tuple[dict[tuple[str, int], dict[str, Any]], list[str], list[int]]:
    """Results by task and length, all tasks, all lengths."""
    results = record["results"]
    scores = {(row["task"], row["length"]): row for row in results}
    lengths = sorted({row["length"] for row in results})
    return scores, list(dict.fromkeys(row["task"] for row in results)), lengths


def _score(row: dict[str, Any] | None) -> Text:
    if row is None:
        return Text("-")
    interval = f" ({row['low']:.0%} to {row['high']:.0%})" if "low" in row else ""
    return Text(f"{row['share']:.1%}{interval}", style=_color(row["share"]))


def _color(share: float) -> str:
    return "green" if share >= 0.9 else "yellow" if share >= 0.5 else "red"


def _by_task(record: dict[str, Any]) -> dict[str, Cells]:
    tasks: dict[str, Cells] = {}
    for row in record["results"]:
        tasks.setdefault(row["task"], {})[row["length"], row["depth"]] = row
    return tasks


def _axes(cells: Cells) -> tuple[list[int], list[float]]:
    depths = {depth for _, depth in cells if depth is not None}
    return sorted({length for length, _ in cells}), sorted(depths)


def _cell(row: dict[str, Any] | None, *, interval: bool = False) -> Text:
    if row is None:
        return Text("-")
    text = f"{row['right']}/{row['asked']}"
    if interval:
        text = f"{row['share']:.0%} ({row['low']:.0%} to {row['high']:.0%})"
    return Text(text, style=_color(row["share"]))


def show_rows(record: dict[str, Any], columns: Sequence[str]) -> None:
    report.print_rows(record["eval"], record["results"], columns, _value)


def show_layers(record: dict[str, Any]) -> None:
    """Print the share of attention before the window that each setting keeps, by layer."""
    results = record["results"]
    rows = [
        {"layer": layers[0]["layer"]}
        | {row["setting"]: layer["far"] for row, layer in zip(results, layers, strict=True)}
        for layers in zip(*(row["layers"] for row in results), strict=True)
    ]
    report.print_rows("far, by layer", rows, list(rows[0]), _value)


def _value(value: object) -> str:
    if value is None:
        return "-"
    return f"{value:.4g}" if isinstance(value, float) else str(value)


# -- plots ------------------------------------------------------------------------------------


def _plot_needle(record: dict[str, Any], path: str) -> None:
    """A heat map of right answers for each task: lengths across, depths down."""
    tasks = _by_task(record)
    width = max(len(_axes(cells)[0]) for cells in tasks.values())
    size = (len(tasks) * (1.6 + 0.9 * width), 4.2)
    figure, axes = report.need_matplotlib().subplots(1, len(tasks), figsize=size, squeeze=False)
    for axis, (task, cells) in zip(axes[0], tasks.items(), strict=True):
        lengths, depths = _axes(cells)
        rows = [[cells[n, depth] for n in lengths] for depth in depths]
        texts = [[f"{cell['right']}/{cell['asked']}" for cell in row] for row in rows]
        _draw_heat(axis, [[cell["share"] for cell in row] for row in rows], texts, lengths)
        axis.set_yticks(range(len(depths)), [f"{depth:.0%}" for depth in depths])
        axis.set_title(task, fontsize=10)
    axes[0][0].set_ylabel("depth of the fact")
    report.save_plot(figure, f"{_model(record)}: right answers", path)


def _plot_ruler(record: dict[str, Any], path: str) -> None:
    """A heat map of scores: lengths across, tasks down."""
    scores, tasks, lengths = _by_length(record)
    size = (2.4 + 0.9 * len(lengths), 1.2 + 0.36 * len(tasks))
    figure, axis = report.need_matplotlib().subplots(figsize=size)
    shares = [
        [scores[task, n]["share"] if (task, n) in scores else float("nan") for n in lengths]
        for task in tasks
    ]
    texts = [["-" if share != share else f"{share:.0%}" for share in row] for row in shares]
    _draw_heat(axis, shares, texts, lengths)
    axis.set_yticks(range(len(tasks)), tasks)
    report.save_plot(figure, f"{_model(record)}: RULER", path)


def _draw_heat(
    axis: Any, shares: list[list[float]], texts: list[list[str]], lengths: Sequence[int]
) -> None:
    axis.imshow(shares, cmap="RdYlGn", vmin=0, vmax=1, aspect="auto")
    for row, (own, labels) in enumerate(zip(shares, texts, strict=True)):
        for column, (share, label) in enumerate(zip(own, labels, strict=True)):
            color = "white" if share <= 0.15 or share >= 0.85 else "black"
            axis.text(column, row, label, ha="center", va="center", fontsize=9, color=color)
    axis.set_xticks(range(len(lengths)), [_short(n) for n in lengths])
    axis.set_xlabel("tokens")


def _plot_ppl(record: dict[str, Any], path: str) -> None:
    """Perplexity of the text's second half against the page budget."""
    figure, axis = report.need_matplotlib().subplots(figsize=(5.4, 3.8))
    results = record["results"]
    for policy in dict.fromkeys(row["policy"] for row in results):
        rows = [row for row in results if row["policy"] == policy and row["budget"] is not None]
        budgets = [100 * row["budget"] for row in rows]
        if rows:
            axis.plot(budgets, [row["ppl_tail"] for row in rows], marker="o", label=policy)
    for row in results:
        if row["budget"] is None:
            axis.axhline(row["ppl_tail"], color="#808080", ls="--", label=row["setting"])
    _save_lines(record, figure, axis, "% of pages read", "perplexity of the second half", path)


def _plot_recall(record: dict[str, Any], path: str) -> None:
    """Share of attention before the window that each setting keeps, by layer."""
    figure, axis = report.need_matplotlib().subplots(figsize=(6.4, 3.8))
    for row in record["results"]:
        layers = [entry["layer"] for entry in row["layers"]]
        kept = [entry["far"] for entry in row["layers"]]
        axis.plot(layers, kept, marker=".", label=row["setting"])
    axis.set_ylim(0, 1.02)
    _save_lines(record, figure, axis, "layer", "share of far attention kept", path)


def _plot_policies(record: dict[str, Any], path: str) -> None:
    """Facts with their intervals, RULER and perplexity against the share of the KV bytes read.
    Policies that read equally much are drawn side by side."""
    results = record["results"]
    figure, axes = report.need_matplotlib().subplots(1, 3, figsize=(13, 3.8))
    base = results[0]["policy"]
    shown = {"facts": "facts found", "ruler": "RULER's score", "ratio": f"perplexity / {base}"}
    for axis, (column, label) in zip(axes, shown.items(), strict=True):
        for i, policy in enumerate(dict.fromkeys(row["policy"] for row in results)):
            rows = [row for row in results if row["policy"] == policy]
            if rows[0]["budget"] is None:
                axis.axhline(rows[0][column], color="#808080", ls="--", label=policy)
                continue
            rows.sort(key=lambda row: float(row["bytes"]))
            across = [100 * row["bytes"] + 0.4 * i for row in rows]
            up = [float("nan") if row[column] is None else row[column] for row in rows]
            (line,) = axis.plot(across, up, marker="o", label=policy)
            if column == "facts":
                ends = [row["low"] for row in rows], [row["high"] for row in rows]
                axis.vlines(across, *ends, color=line.get_color(), alpha=0.35)
        axis.set_xlabel("% of the KV bytes read")
        axis.set_ylabel(label)
    axes[0].legend(fontsize=8)
    report.save_plot(figure, f"{_model(record)}: {results[0]['tokens']:,} tokens", path)


def _save_lines(
    record: dict[str, Any], figure: Any, axis: Any, across: str, up: str, path: str
) -> None:
    axis.set_xlabel(across)
    axis.set_ylabel(up)
    axis.legend(fontsize=8)
    report.save_plot(figure, f"{_model(record)}: {record['results'][0]['tokens']:,} tokens", path)


def _model(record: dict[str, Any]) -> str:
    return Path(record["asked"]["model"]).name


def _short(tokens: int) -> str:
    if tokens % 1_000_000 == 0:
        return f"{tokens // 1_000_000}M"
    return f"{tokens // 1024}K" if tokens % 1024 == 0 else str(tokens)


_PLOTS: Mapping[str, Any] = {
    "needle": _plot_needle,
    "ruler": _plot_ruler,
    "ppl": _plot_ppl,
    "recall": _plot_recall,
    "policies": _plot_policies,
}
