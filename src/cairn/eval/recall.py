"""`cairn eval recall`: how much of dense attention a policy's pages hold, layer by layer."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from cairn.attention.backend import AttentionBackend
from cairn.errors import ConfigError
from cairn.eval.dense_pages import DensePages
from cairn.eval.ppl import encode_text
from cairn.eval.settings import Setting
from cairn.llm import LLM
from cairn.memory.kv_pool import KVPool
from cairn.trace import LayerRead


@dataclass(frozen=True, slots=True)
class Kept:
    """Of one row and layer, means over its heads."""

    mass: float
    """Share of dense attention that lies in the window and the selected pages."""
    far: float
    """The same of what lies before the window; 1 where nothing does."""
    best: float
    """What `far` would be with the pages of most dense attention, as many of them."""
    top: float
    """Share of those pages that are selected."""
    read: float
    """Share of all pages that are read."""


_FIELDS = ("mass", "far", "best", "top", "read")


def compare(shares: torch.Tensor, read: LayerRead, window_start: int) -> Kept:
    """shares [heads, pages] of dense attention; pages before `window_start` are candidates.

    Query heads that share a kv head share its pages: the best ones are those of most attention
    over the group.
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


def attach(llm: LLM) -> DensePages:
    """Let the engine's attention be watched by a `DensePages`."""
    engine = llm.engine
    if engine.tier() is not None:
        raise ConfigError(
            "enable_hisparse moves pages away, and recall looks at all of them on the device; "
            "leave it out: what is selected is the same"
        )
    cache = engine.scheduler.cache
    layers = [layer for g in cache.groups if g.window is None for layer in g.layers]
    watchers: list[DensePages] = []

    def wrap(backend: AttentionBackend, pool: KVPool) -> DensePages:
        watchers.append(
            DensePages(
                backend,
                pool,
                layers=layers,
                scale=engine.spec.scale,
                landmark_rows=cache.geometry.has_landmark_row,
            )
        )
        return watchers[0]

    engine.wrap_attention(wrap)
    return watchers[0]


def query_places(tokens: int, rows: int) -> list[int]:
    """Lengths of the texts whose last tokens ask, evenly over the second half."""
    first = tokens // 2
    return sorted({first + (tokens - first) * (i + 1) // rows for i in range(rows)})


@dataclass(slots=True)
class _Sums:
    rows: int = 0
    values: dict[str, float] = field(default_factory=lambda: dict.fromkeys(_FIELDS, 0.0))

    def add(self, kept: Kept) -> None:
        self.rows += 1
        for name in _FIELDS:
            self.values[name] += getattr(kept, name)

    def means(self) -> dict[str, float]:
        return {name: round(value / self.rows, 4) for name, value in self.values.items()}


def measure(
    settings: Sequence[Setting],
    text: str,
    tokens: int,
    rows: int,
    progress: Callable[[int, int], None],
) -> list[dict[str, Any]]:
    results: list[dict[str, Any]] = []
    total = len(settings) * rows
    for setting in settings:
        begin = time.perf_counter()
        with LLM(**setting.options) as llm:
            ids = encode_text(llm, text, tokens)
            if not llm.engine.can_trace:
                raise ConfigError("recall needs sparse attention; add --attention-backend hsa")
            places = query_places(tokens, rows)
            layers = of_rows(llm, ids, places, _after(progress, len(results) * rows, total))
        whole = _Sums()
        for sums in layers.values():
            whole.rows += sums.rows
            for name, value in sums.values.items():
                whole.values[name] += value
        results.append(
            {
                **setting.as_dict(),
                "tokens": tokens,
                "rows": len(places),
                **whole.means(),
                "layers": [{"layer": n, **sums.means()} for n, sums in sorted(layers.items())],
                "seconds": round(time.perf_counter() - begin, 2),
            }
        )
    return results


def _after(progress: Callable[[int, int], None], before: int, total: int) -> Callable[[int], None]:
    return lambda done: progress(before + done, total)


def of_rows(
    llm: LLM, ids: Sequence[int], places: Sequence[int], progress: Callable[[int], None]
) -> dict[int, _Sums]:
    """Texts that end at each place, one after the other: each adds a piece to the last, and the
    prefix cache has the rest. Where prompts are read densely the first generated token asks."""
    watcher = attach(llm)
    layers: dict[int, _Sums] = {}
    sparse = llm.engine.sparse
    assert sparse is not None
    most = 2 if sparse.dense_prompt_below else 1
    for done, place in enumerate(places):
        progress(done)
        result = llm.generate(list(ids[:place]), max_tokens=most, ignore_eos=True, trace=True)
        trace = result.trace
        assert trace is not None
        records = watcher.take()[-len(trace.tokens) :]
        pairs = zip(trace.tokens, records, strict=True)
        token, record = list(pairs)[-1]
        start = sparse.window_start(record.cache_row, llm.engine.scheduler.cache.geometry.page_size)
        for read in token.layers:
            kept = compare(record.shares[read.layer], read, start)
            layers.setdefault(read.layer, _Sums()).add(kept)
    progress(len(places))
    return layers
