"""Which pages generated tokens read: for the page map, and summed up for the metrics."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import torch

from cairn.engine.request import Request
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

    def count(self, requests: Sequence[Request]) -> None:
        """A token was sampled for each of these from the row of the token before it."""
        if self._sparse is not None:
            known = np.array([len(request.token_ids) for request in requests], dtype=np.int64)
            prompt = np.array([request.prompt_len for request in requests], dtype=np.int64)
            held, window = self._windows(known - 1, prompt)
            self.held += int(held.sum())
            self.read += int((held - window + np.minimum(self._sparse.topk, window)).sum())

    def tell(
        self, selections: Mapping[int, Selection], num_tokens: int, prompt_len: int
    ) -> TokenReads:
        """What the row of token `num_tokens - 1` read."""
        _, window = self._windows(np.array([num_tokens]), np.array([prompt_len]))
        return TokenReads(
            int(window[0]), [_layer(number, selection) for number, selection in selections.items()]
        )

    def _windows(
        self, num_tokens: np.ndarray, prompt_lens: np.ndarray
    ) -> tuple[np.ndarray, np.ndarray]:
        """Pages up to the newest of so many tokens, and the first page of its window."""
        size = self._geometry.page_size
        rows, prompt_rows = self._rows(num_tokens - 1), self._rows(prompt_lens)
        if self._sparse is None:
            return rows // size + 1, np.zeros_like(rows)
        return rows // size + 1, self._sparse.window_starts(rows, size, prompt_rows)

    def _rows(self, tokens: np.ndarray) -> np.ndarray:
        """Rows of the cache before the row of each token."""
        page, offset = np.divmod(tokens, self._geometry.tokens_per_page)
        return page * self._geometry.page_size + offset


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
