"""Which pages generated tokens read: for the page map, and summed up for the metrics."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from cairn.memory.geometry import PageGeometry
from cairn.server.wire import LayerPages, TokenReads
from cairn.sparsity.config import SparseConfig
from cairn.sparsity.selection import Selection

_LEAST = 5e-4  # smaller shares are not told: nobody sees them, and they are most of the bytes
_DIGITS = 4


class PageReads:
    """Follows what the rows of one engine read; without sparse layers that is everything."""

    def __init__(self, sparse: SparseConfig | None, geometry: PageGeometry) -> None:
        self._sparse = sparse
        self._geometry = geometry
        self.read = 0
        self.held = 0

    def count(self, num_tokens: int) -> None:
        """A token was sampled from the row of token `num_tokens - 1`."""
        if self._sparse is not None:
            held, window = self._window(num_tokens)
            self.held += held
            self.read += held - window + min(self._sparse.topk, window)

    def tell(self, selections: Mapping[int, Selection], num_tokens: int) -> TokenReads:
        _, window = self._window(num_tokens)
        return TokenReads(
            window, [_layer(number, selection) for number, selection in selections.items()]
        )

    def _window(self, num_tokens: int) -> tuple[int, int]:
        """Pages up to the newest token, and the first page of its window."""
        row = self._geometry.row_of(num_tokens - 1)
        size = self._geometry.page_size
        start = 0 if self._sparse is None else self._sparse.window_start(row, size)
        return row // size + 1, start


def _layer(number: int, selection: Selection) -> LayerPages:
    """Mean shares over the heads; heads of different kv heads may have chosen different pages."""
    index = selection.page_index[0]  # [kv_heads, k]
    shares = selection.weights[0].float()  # [heads, k]
    heads = shares.shape[0]
    grouped = shares.view(index.shape[0], heads // index.shape[0], index.shape[1])
    by_kv_head = grouped.sum(1) / heads
    there = index >= 0
    pages, place = torch.unique(index[there], return_inverse=True)
    total = torch.zeros(len(pages)).index_add_(0, place, by_kv_head[there])
    keep = total >= _LEAST
    return LayerPages(
        number,
        pages[keep].tolist(),
        [round(share, _DIGITS) for share in total[keep].tolist()],
        round(float(selection.window_weight[0].float().mean()), _DIGITS),
    )
