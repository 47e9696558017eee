"""Pictures of results. Only here is matplotlib imported, and only when one is asked for."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from cairn.errors import ConfigError
from cairn.eval.report import by_task


def need_matplotlib() -> Any:
    try:
        import matplotlib
    except ImportError as error:
        raise ConfigError("--plot needs matplotlib: pip install 'cairn[bench]'") from error
    matplotlib.use("Agg")
    from matplotlib import pyplot

    return pyplot


def plot_needle(record: dict[str, Any], path: Path) -> None:
    """A heat map of each task: lengths across, depths down, right answers of those asked."""
    pyplot = need_matplotlib()
    tasks = by_task(record["results"])
    width = max(len({n for n, _ in cells}) for cells in tasks.values())
    size = (len(tasks) * (1.6 + 0.9 * width), 4.2)
    figure, axes = pyplot.subplots(1, len(tasks), figsize=size, squeeze=False)
    for axis, (task, cells) in zip(axes[0], tasks.items(), strict=True):
        lengths = sorted({length for length, _ in cells})
        depths = sorted({depth for _, depth in cells if depth is not None})
        shares = [[cells[n, depth]["share"] for n in lengths] for depth in depths]
        axis.imshow(shares, cmap="RdYlGn", vmin=0, vmax=1, aspect="auto")
        for row, depth in enumerate(depths):
            for column, length in enumerate(lengths):
                cell = cells[length, depth]
                text = f"{cell['right']}/{cell['asked']}"
                color = "black" if 0.15 < cell["share"] < 0.85 else "white"
                axis.text(column, row, text, ha="center", va="center", fontsize=9, color=color)
        axis.set_xticks(range(len(lengths)), [_short(n) for n in lengths])
        axis.set_yticks(range(len(depths)), [f"{depth:.0%}" for depth in depths])
        axis.set_xlabel("tokens")
        axis.set_title(task, fontsize=10)
    axes[0][0].set_ylabel("depth of the fact")
    _finish(figure, f"{_model(record)}: right answers", path)


def plot_ppl(record: dict[str, Any], path: Path) -> None:
    """Perplexity of the text's second half against the budget of pages."""
    pyplot = need_matplotlib()
    figure, axis = pyplot.subplots(figsize=(5.4, 3.8))
    for policy, rows in _by_policy(record).items():
        axis.plot(
            [100 * row["budget"] for row in rows],
            [row["ppl_tail"] for row in rows],
            marker="o",
            label=policy,
        )
    for row in record["results"]:
        if row["budget"] is None:
            axis.axhline(row["ppl_tail"], color="#808080", ls="--", label=row["setting"])
    axis.set_xlabel("% of pages read")
    axis.set_ylabel("perplexity of the second half")
    axis.legend(fontsize=8)
    tokens = record["results"][0]["tokens"]
    _finish(figure, f"{_model(record)}: {tokens:,} tokens", path)


def plot_recall(record: dict[str, Any], path: Path) -> None:
    """What each setting keeps of the attention before the window, layer by layer."""
    pyplot = need_matplotlib()
    figure, axis = pyplot.subplots(figsize=(6.4, 3.8))
    for row in record["results"]:
        layers = row["layers"]
        kept = [entry["far"] for entry in layers]
        axis.plot([entry["layer"] for entry in layers], kept, marker=".", label=row["setting"])
    axis.set_ylim(0, 1.02)
    axis.set_xlabel("layer")
    axis.set_ylabel("share of far attention kept")
    axis.legend(fontsize=8)
    _finish(figure, f"{_model(record)}: {record['results'][0]['tokens']:,} tokens", path)


def _by_policy(record: dict[str, Any]) -> dict[str, list[dict[str, Any]]]:
    policies: dict[str, list[dict[str, Any]]] = {}
    for row in record["results"]:
        if row["budget"] is not None:
            policies.setdefault(row["policy"], []).append(row)
    return policies


def _model(record: dict[str, Any]) -> str:
    return Path(record["asked"]["model"]).name


def _short(tokens: int) -> str:
    if tokens % 1_000_000 == 0:
        return f"{tokens // 1_000_000}M"
    return f"{tokens // 1024}K" if tokens % 1024 == 0 else str(tokens)


def _finish(figure: Any, title: str, path: Path) -> None:
    figure.suptitle(title, fontsize=10)
    figure.tight_layout()
    figure.savefig(path, format="png", dpi=120)
    need_matplotlib().close(figure)
