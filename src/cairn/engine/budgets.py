"""Pages for each sparse layer (`--hsa-budget auto`), from where dense attention lies in a text.

A layer whose attention is spread over many pages gets more of them than one that looks at few. All
layers together read as many pages as with the same top-k everywhere.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from typing import Any

import torch

from cairn.attention.backend import AttentionBackend
from cairn.attention.dense_pages import DensePages, DenseRow
from cairn.engine.engine import Engine
from cairn.engine.sampling_params import SamplingParams
from cairn.errors import ConfigError
from cairn.memory.kv_pool import KVPool
from cairn.sparsity.config import SparseConfig

_TOKENS = 4096  # of the text, at least
_ROWS = 12


def choose_budgets(engine: Engine, text: Sequence[int]) -> tuple[int, ...]:
    """The number of pages of each sparse layer, for an engine that reads prompts densely.

    Queries have twice top-k pages before their window, so that a layer can get more than top-k. If
    the text or the engine is too short for that, they have more than top-k pages, or ConfigError is
    raised.
    """
    sparse = engine.sparse
    assert sparse is not None
    page_size = engine.selected.page_size
    wanted = 2 * sparse.topk * page_size + sparse.window
    ids = text[: min(max(_TOKENS, wanted * 5 // 4), engine.max_tokens - 2)]
    first = max(len(ids) // 2, min(wanted, len(ids) * 4 // 5))
    if _candidates(sparse, first, page_size) <= sparse.topk:
        least = (sparse.topk + 1) * page_size + sparse.window
        raise ConfigError(
            f"hsa_budget is 'auto' and hsa_topk {sparse.topk}; queries need more than top-k pages "
            f"of {page_size} rows before their window of {sparse.window}, in a text of about "
            f"{least * 5 // 4} tokens, and {len(ids)} can be read: lower hsa_topk, hsa_unit_size "
            "or hsa_window, raise context_length or kv_cache_gib, or list the pages of each layer"
        )
    watcher = watch(engine)
    rows = []
    for place in query_places(first, len(ids), _ROWS):
        params = SamplingParams(max_tokens=2, temperature=0.0, ignore_eos=True)
        requests = engine.make_requests(list(ids[:place]), params, traced=True)
        engine.submit_all(requests)
        while engine.has_work:
            engine.step()
        rows.append(watcher.take()[-1])
    gains = [_gains(sparse, rows, layer, page_size) for layer in sparse.layers]
    return share_out(gains, sparse.topk * len(gains), max(1, sparse.sinks))


def share_out(gains: Sequence[Sequence[float]], total: int, least: int) -> tuple[int, ...]:
    """Share `total` pages out over layers so that they gain most; each gets at least `least`.

    gains[layer] is what each further page brings, descending. So the best page overall is the best
    of the layers' next ones. Layers that have no pages left get no more.
    """
    counts = [least] * len(gains)
    heap = [(-own[least], layer) for layer, own in enumerate(gains) if len(own) > least]
    heapq.heapify(heap)
    for _ in range(total - sum(counts)):
        if not heap:
            break
        _, layer = heapq.heappop(heap)
        counts[layer] += 1
        if counts[layer] < len(gains[layer]):
            heapq.heappush(heap, (-gains[layer][counts[layer]], layer))
    return tuple(counts)


def _gains(
    sparse: SparseConfig, rows: Sequence[DenseRow], layer: int, page_size: int
) -> list[float]:
    """Mean dense attention of the best page before the window, the second best and so on."""
    assert sparse.policy is not None
    kv_heads = sparse.policy.shape.num_kv_heads
    means = []
    for row in rows:
        shares = row.shares[layer][:, : _candidates(sparse, row.cache_row, page_size)]
        grouped = torch.unflatten(shares, 0, (kv_heads, -1)).mean(1)
        means.append(grouped.sort(-1, descending=True).values.mean(0))
    width = min(len(mean) for mean in means)
    gains: list[float] = torch.stack([mean[:width] for mean in means]).mean(0).tolist()
    return gains


def _candidates(sparse: SparseConfig, row: int, page_size: int) -> int:
    """Pages before the window of a query at `row`, also if the engine reads such rows densely."""
    return max(0, (row - sparse.window + 1) // page_size)


def query_places(first: int, tokens: int, rows: int) -> list[int]:
    """Lengths of the prefixes whose last token is the query, spread evenly behind `first`."""
    return sorted({first + (tokens - first) * (i + 1) // rows for i in range(rows)})


def watch(engine: Engine) -> DensePages:
    """Wrap the engine's attention in a `DensePages`."""
    if engine.tier() is not None:
        raise ConfigError(
            "enable_hisparse moves pages away, and dense attention is compared with all of them on "
            "the device; leave it out: what is selected is the same"
        )
    cache = engine.scheduler.cache
    layers = [layer for group in cache.groups if group.window is None for layer in group.layers]
    watchers: list[Any] = []

    def wrap(backend: AttentionBackend, pool: KVPool) -> AttentionBackend:
        scale = engine.spec.layers[layers[0]].scale
        watchers.append(DensePages(backend, pool, engine.selected, layers=layers, scale=scale))
        wrapped: AttentionBackend = watchers[0]
        return wrapped

    engine.wrap_attention(wrap)
    watcher: DensePages = watchers[0]
    return watcher
