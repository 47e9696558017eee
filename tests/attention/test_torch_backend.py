"""The torch backend against attention written out by hand, over scattered pages full of traps."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from cairn.attention.backend import AttentionShape
from cairn.attention.batch import AttentionBatch, GroupTables
from cairn.attention.torch_backend import TorchBackend
from cairn.memory.groups import group_layers
from cairn.memory.kv_pool import KVPool

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
    groups = group_layers(windows)
    pages_of = [-(-total // page_size) for _, total in lengths]
    num_pages = sum(pages_of) + 5
    pool = KVPool(groups, [num_pages] * 3, page_size, kv_heads, dim, torch.float64, CPU)
    shape = AttentionShape(heads, kv_heads, dim, dim**-0.5, page_size, torch.float64, CPU, groups)
    backend = TorchBackend(shape, pool)
    query_lens = np.array([new for new, _ in lengths])
    kv_lens = np.array([total for _, total in lengths])
    cu_query = np.concatenate(([0], np.cumsum(query_lens)))
    query = torch.randn(int(cu_query[-1]), heads, dim, dtype=torch.float64)
    keys = [torch.randn(n, kv_heads, dim, dtype=torch.float64) for _, n in lengths]
    values = [torch.randn(n, kv_heads, dim, dtype=torch.float64) for _, n in lengths]

    group_tables = []
    for g, group in enumerate(groups):
        (layer,) = group.layers
        pool.keys[layer].fill_(float("nan"))
        pool.values[layer].fill_(float("nan"))
        free = (1 + torch.randperm(num_pages)).tolist()
        table = torch.zeros(len(lengths), max(pages_of), dtype=torch.int32)
        for s, (new, total) in enumerate(lengths):
            # Pages that the window has left behind are gone: the null page stands in the table.
            first = group.first_reachable_page(total - new, page_size)
            for index in range(first, pages_of[s]):
                table[s, index] = free.pop()
            rows = torch.arange(first * page_size, total)
            pages = table[s, rows // page_size].long()
            pool.write(layer, pages, rows % page_size, keys[s][rows], values[s][rows])
        group_tables.append(GroupTables(table, torch.empty(0)))
        assert g == pool.group_of[layer]
    batch = AttentionBatch(
        page_size, query_lens, kv_lens, cu_query, torch.empty(0), tuple(group_tables), CPU
    )
    metadata = backend.prepare(batch)
    for layer, window in enumerate(windows):
        out = backend.forward(layer, query, metadata)
        for s in range(len(lengths)):
            own = slice(int(cu_query[s]), int(cu_query[s + 1]))
            expected = by_hand(query[own], keys[s], values[s], window)
            torch.testing.assert_close(out[own], expected, rtol=0, atol=1e-12)
