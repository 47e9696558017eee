"""`cairn eval recall`: the share of dense attention that a policy's pages hold, by layer."""

from __future__ import annotations

import argparse
from collections.abc import Collection
from dataclasses import dataclass, field
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import torch

from cairn.attention.backend import AttentionBackend, Graph
from cairn.attention.batch import AttentionBatch, Scoring
from cairn.cli_flags import check_at_least
from cairn.errors import ConfigError
from cairn.eval import report
from cairn.eval.settings import compare
from cairn.llm import LLM
from cairn.memory.kv_pool import KVPool
from cairn.trace import LayerRead

_BLOCK = 256  # pages at a time
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


@dataclass(frozen=True, slots=True)
class DenseRow:
    """A traced row, and the share of dense attention that each page gets."""

    row: int  # of its step
    cache_row: int  # of its sequence
    pages: tuple[np.ndarray, ...]  # page ids of its sequence up to this row, by layer group
    shares: dict[int, torch.Tensor] = field(default_factory=dict)
    """By layer, [heads, pages] float32 on the host."""


class DensePages:
    """An attention backend that delegates to `inner`. In addition it computes the full softmax of
    the traced rows in `layers`, in plain torch, from the keys in the pool."""

    def __init__(
        self,
        inner: AttentionBackend,
        pool: KVPool,
        *,
        layers: Collection[int],
        scale: float,
        landmark_rows: bool,
    ) -> None:
        self._inner = inner
        self._pool = pool
        self._layers = frozenset(layers)
        self._scale = scale
        self._landmark_rows = landmark_rows
        self._taken: list[DenseRow] = []
        self._rows: list[DenseRow] = []  # of the step that was prepared last

    def take(self) -> list[DenseRow]:
        """The rows since the last call, in the order they ran."""
        taken, self._taken = self._taken, []
        return taken

    @property
    def name(self) -> str:
        return self._inner.name

    @property
    def graphs(self) -> Collection[Graph]:
        return self._inner.graphs

    def graph_for(self, batch: AttentionBatch, *, mixed: bool) -> Graph | None:
        return None if len(batch.traced_rows) else self._inner.graph_for(batch, mixed=mixed)

    def prepare(self, batch: AttentionBatch, groups: Collection[int] | None = None) -> Any:
        self._rows = []
        for row in batch.traced_rows.tolist():
            s = int(np.searchsorted(batch.cu_query, row, side="right")) - 1
            cache_row = int(row - batch.cu_query[s] + batch.kv_lens[s] - batch.query_lens[s])
            count = cache_row // batch.page_size + 1
            pages = tuple(group.host_pages[s, :count].astype(np.int64) for group in batch.groups)
            self._rows.append(DenseRow(row, cache_row, pages))
        self._taken += self._rows
        return self._inner.prepare(batch, groups)

    def begin(self, metadata: Any) -> None:
        self._inner.begin(metadata)

    def forward(
        self, layer: int, query: torch.Tensor, metadata: Any, scoring: Scoring | None = None
    ) -> torch.Tensor:
        if layer in self._layers:
            for row in self._rows:
                row.shares[layer] = self._shares(layer, query[row.row], row).cpu()
        return self._inner.forward(layer, query, metadata, scoring)

    def _shares(self, layer: int, query: torch.Tensor, row: DenseRow) -> torch.Tensor:
        """Shares [heads, pages] of dense attention for query [heads, dim]."""
        wide = torch.promote_types(query.dtype, torch.float32)
        kv_heads, size = self._pool.kv_heads(layer), self._pool.page_size
        own = query.to(wide).view(kv_heads, -1, query.shape[-1]) * self._scale
        pages = torch.from_numpy(row.pages[self._pool.group_of[layer]]).to(query.device)
        masses = []
        for begin in range(0, len(pages), _BLOCK):
            keys = self._pool.read_keys(layer, pages[begin : begin + _BLOCK], wide)
            scores = torch.einsum("hgd,pshd->hgps", own, keys)
            place = torch.arange(keys.shape[0] * size, device=query.device) + begin * size
            hidden = place > row.cache_row
            if self._landmark_rows:
                hidden |= place % size == size - 1
            scores.masked_fill_(hidden.view(-1, size), float("-inf"))
            masses.append(scores.logsumexp(-1))
        return torch.cat(masses, -1).flatten(0, 1).softmax(-1).float()


def attach(llm: LLM) -> DensePages:
    """Wrap the engine's attention in a `DensePages`."""
    engine = llm.engine
    if engine.tier() is not None:
        raise ConfigError(
            "enable_hisparse moves pages away, and recall looks at all of them on the device; "
            "leave it out: what is selected is the same"
        )
    cache = engine.scheduler.cache
    layers = [layer for g in cache.groups if g.window is None for layer in g.layers]
    watchers: list[Any] = []

    def wrap(backend: AttentionBackend, pool: KVPool) -> AttentionBackend:
        landmarks = cache.geometry.has_landmark_row
        scale = engine.spec.layers[layers[0]].scale
        watchers.append(
            DensePages(backend, pool, layers=layers, scale=scale, landmark_rows=landmarks)
        )
        wrapped: AttentionBackend = watchers[0]
        return wrapped

    engine.wrap_attention(wrap)
    watcher: DensePages = watchers[0]
    return watcher


def query_places(tokens: int, rows: int) -> list[int]:
    """Lengths of the prefixes whose last token is the query, spread evenly over the second half."""
    first = tokens // 2
    return sorted({first + (tokens - first) * (i + 1) // rows for i in range(rows)})


def measure(rows: int, llm: LLM, ids: list[int]) -> dict[str, Any]:
    """What an engine keeps for `rows` queries, over all layers and for each."""
    if not llm.engine.can_trace:
        raise ConfigError("recall needs sparse attention; add --attention-backend hsa")
    watcher = attach(llm)
    places = query_places(len(ids), rows)
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
    start = sparse.window_start(record.cache_row, llm.engine.scheduler.cache.geometry.page_size)
    reads = trace.tokens[-1].layers
    return {read.layer: keep(record.shares[read.layer], read, start) for read in reads}
