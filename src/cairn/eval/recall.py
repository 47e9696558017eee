"""`cairn eval recall`: the share of dense attention that a policy's pages hold, by layer."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import torch

from cairn.attention.dense_pages import DensePages
from cairn.cli_flags import check_at_least
from cairn.engine.budgets import query_places, watch
from cairn.errors import ConfigError
from cairn.eval import report
from cairn.eval.settings import compare
from cairn.llm import LLM
from cairn.trace import LayerRead

_COLUMNS = ("setting", "topk", "read", "mass", "far", "best", "top", "seconds")


def command(arguments: argparse.Namespace) -> int:
    check_at_least(arguments, 1, "rows")
    record = compare(arguments, "recall", partial(measure, arguments.rows), dense=False)
    report.show_layers(record)
    report.show_rows(record, _COLUMNS)
    report.finish(record, arguments)
    return 0


class Kept(NamedTuple):
    """Means over the heads of one row and layer."""

    mass: float
    """Share of dense attention that lies in the window and the selected pages."""
    far: float
    """The same share, of attention before the window only; 1 if there is none."""
    best: float
    """`far` of the same number of pages with the most dense attention."""
    top: float
    """Share of those best pages that were selected."""
    read: float
    """Share of all pages that are read."""


def keep(shares: torch.Tensor, read: LayerRead, window_start: int) -> Kept:
    """Compare a selection with `shares` [heads, pages] of dense attention.

    Pages before `window_start` are candidates. Query heads that share a kv head share its pages,
    so the best pages are those with the most attention over the group.
    """
    pages = shares.shape[1]
    kv_heads = len(read.pages)
    grouped = shares.double().view(kv_heads, -1, pages)
    near = grouped[..., window_start:].sum(-1)  # [kv_heads, group]
    far = grouped[..., :window_start]
    kept, best, top = [], [], []
    for own, selected in zip(far, read.pages, strict=True):
        count = len(selected)
        kept.append(own[:, selected].sum(-1))
        wanted = own.sum(0).topk(count).indices
        best.append(own[:, wanted].sum(-1))
        top.append(len(set(selected) & set(wanted.tolist())) / count if count else 1.0)
    held, most, whole = torch.stack(kept), torch.stack(best), far.sum(-1)

    def of_far(part: torch.Tensor) -> float:
        return float(torch.where(whole > 0, part / whole.clamp(min=1e-300), 1.0).mean())

    selected_pages = sum(map(len, read.pages)) / kv_heads
    return Kept(
        mass=float((held + near).mean()),
        far=of_far(held),
        best=of_far(most),
        top=sum(top) / kv_heads,
        read=(selected_pages + pages - window_start) / pages,
    )


def measure(rows: int, llm: LLM, ids: list[int]) -> dict[str, Any]:
    """What an engine keeps for `rows` queries over the second half of the text."""
    return measure_at(llm, ids, query_places(len(ids) // 2, len(ids), rows))


def measure_at(llm: LLM, ids: list[int], places: Sequence[int]) -> dict[str, Any]:
    """What an engine keeps for the queries at the end of these prefixes, over all layers and for
    each."""
    if not llm.engine.can_trace:
        raise ConfigError("recall needs sparse attention; add --attention-backend hsa")
    watcher = watch(llm.engine)
    layers: dict[int, list[Kept]] = {}
    for place in places:
        for layer, kept in _keep_at(llm, watcher, ids[:place]).items():
            layers.setdefault(layer, []).append(kept)
    return {
        "rows": len(places),
        **_means([kept for some in layers.values() for kept in some]),
        "layers": [{"layer": layer, **_means(some)} for layer, some in sorted(layers.items())],
    }


def _means(kept: list[Kept]) -> dict[str, float]:
    return dict(zip(Kept._fields, np.mean(kept, 0).round(4).tolist(), strict=True))


def _keep_at(llm: LLM, watcher: DensePages, ids: list[int]) -> dict[int, Kept]:
    """What each layer keeps for the last row of a prompt, or for the first generated token if
    prompts are read densely. Prompts that extend each other share the prefix cache."""
    sparse = llm.engine.sparse
    assert sparse is not None
    most = 2 if sparse.dense_prompt_below else 1
    trace = llm.generate(ids, max_tokens=most, ignore_eos=True, trace=True).trace
    assert trace is not None
    record = watcher.take()[-1]
    start = sparse.window_start(record.cache_row, llm.engine.selected.page_size)
    reads = trace.tokens[-1].layers
    return {read.layer: keep(record.shares[read.layer], read, start) for read in reads}
