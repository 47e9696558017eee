"""The torch backend against attention written out by hand, over scattered pages full of traps."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch

from cairn.attention.backend import AttentionShape
from cairn.attention.torch_backend import TorchBackend
from cairn.engine.inputs import StepInputs
from cairn.memory.groups import group_layers
from cairn.memory.kv_pool import KVPool
from cairn.memory.layout import CacheLayout

CPU = torch.device("cpu")


def by_hand(
    query: torch.Tensor,  # [rows, heads, dim]
    key: torch.Tensor,  # [keys, kv_heads, dim]
    value: torch.Tensor,
    window: int | None,
) -> torch.Tensor:
    rows, heads, dim = query.shape
    keys, kv_heads, _ = key.shape
    out = torch.empty_like(query)
    for r in range(rows):
        last = keys - rows + r
        first = 0 if window is None else max(0, last - window + 1)
        for h in range(heads):
            kv = h // (heads // kv_heads)
            scores = key[first : last + 1, kv] @ query[r, h] / math.sqrt(dim)
            out[r, h] = scores.softmax(-1) @ value[first : last + 1, kv]
    return out


@pytest.mark.parametrize("page_size", [1, 16, 64])
@pytest.mark.parametrize(("heads", "kv_heads"), [(4, 4), (6, 2), (5, 1)])
@pytest.mark.parametrize(
    "lengths",
    [
        [(1, 1)],
        [(1, 63), (1, 64), (1, 65), (1, 1)],
        [(65, 65)],
        [(7, 200), (1, 130), (300, 300), (1, 2), (2, 66)],
    ],
    ids=["one", "decode", "prefill", "mixed"],
)
def test_matches_attention_by_hand(
    page_size: int, heads: int, kv_heads: int, lengths: list[tuple[int, int]]
) -> None:
    """lengths: (new rows, rows in the cache with them) of each sequence."""
    torch.manual_seed(0)
    dim, windows = 8, [None, 33, 1]
    layout = CacheLayout.of_heads(kv_heads, dim, torch.float64)
    groups = group_layers(windows, [layout] * len(windows))
    pages_of = [-(-total // page_size) for _, total in lengths]
    num_pages = sum(pages_of) + 5
    pool = KVPool(groups, [num_pages] * 3, page_size, CPU)
    shape = AttentionShape(heads, kv_heads, dim, dim**-0.5, page_size, torch.float64, CPU, groups)
    backend = TorchBackend(shape, pool)
    query = torch.randn(sum(new for new, _ in lengths), heads, dim, dtype=torch.float64)
    keys = [torch.randn(n, kv_heads, dim, dtype=torch.float64) for _, n in lengths]
    values = [torch.randn(n, kv_heads, dim, dtype=torch.float64) for _, n in lengths]

    tables = []
    for group in groups:
        pool.part(group.layers[0]).fill_(float("nan"))
        free = (1 + torch.randperm(num_pages)).tolist()
        table = torch.zeros(len(lengths), max(pages_of), dtype=torch.int32)
        for s in range(len(lengths)):
            for index in range(pages_of[s]):
                table[s, index] = free.pop()
        tables.append(table)

    def step(new: list[int], total: list[int]) -> Any:
        """Prepare a step, as the runner does, and then write its new rows."""
        query_lens, kv_lens = np.array(new), np.array(total)
        own = [table[: len(new)].numpy() for table in tables]
        batch = StepInputs.made_up(page_size, query_lens, kv_lens, own).send(CPU, True).batch
        metadata = backend.prepare(batch)
        for g, group in enumerate(groups):
            for s in range(len(new)):
                rows = torch.arange(total[s] - new[s], total[s])
                pages = tables[g][s, rows // page_size].long()
                key_value = torch.cat((keys[s][rows], values[s][rows]), dim=1)
                pool.write(group.layers[0], pages, rows % page_size, key_value)
        return metadata

    past = [total - new for new, total in lengths]
    for s, before in enumerate(past):
        if before:  # what earlier steps computed, one sequence at a time
            ones = [0] * s + [before]
            step([n or 0 for n in ones], [0] * s + [before])
    for g, group in enumerate(groups):
        # Pages that the window has left behind are gone: the null page stands in the table.
        for s, before in enumerate(past):
            tables[g][s, : group.first_reachable_page(before, page_size)] = 0
    metadata = step([new for new, _ in lengths], [total for _, total in lengths])
    cu_query = np.concatenate(([0], np.cumsum([new for new, _ in lengths])))
    for layer, window in enumerate(windows):
        out = backend.forward(layer, query, metadata)
        for s in range(len(lengths)):
            own = slice(int(cu_query[s]), int(cu_query[s + 1]))
            expected = by_hand(query[own], keys[s], values[s], window)
            torch.testing.assert_close(out[own], expected, rtol=0, atol=1e-12)
