"""Which pages generated tokens read: for traces, and summed up for the metrics."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from cairn.engine.request import Request
from cairn.memory.geometry import PageGeometry
from cairn.sparsity.config import ALL_ROWS, SparseConfig
from cairn.sparsity.selection import Selection
from cairn.trace import LayerRead, TokenReads


class PageReads:
    """Without sparse layers every token reads every page."""

    def __init__(self, sparse: SparseConfig | None, geometry: PageGeometry) -> None:
        self._sparse = sparse
        self._geometry = geometry
        self.read = 0
        self.held = 0

    def count(self, requests: Sequence[Request], tokens: Sequence[int]) -> None:
        """These requests got so many tokens, each sampled from the row of the token before it."""
        if self._sparse is not None:
            got = [
                (own, i) for own, count in zip(requests, tokens, strict=True) for i in range(count)
            ]
            known = np.array([len(own.token_ids) - i for own, i in got], dtype=np.int64)
            held, window = self._windows(known - 1, [own for own, _ in got])
            self.held += int(held.sum())
            self.read += int((held - window + np.minimum(self._sparse.mean_topk, window)).sum())

    def of_token(
        self, selections: Mapping[int, Selection], num_tokens: int, request: Request
    ) -> TokenReads:
        """What the row of token `num_tokens - 1` read."""
        _, window = self._windows(np.array([num_tokens]), [request])
        layers = [LayerRead.of(*item).averaged() for item in selections.items()]
        return TokenReads(int(window[0]), layers)

    def _windows(
        self, num_tokens: np.ndarray, requests: Sequence[Request]
    ) -> tuple[np.ndarray, np.ndarray]:
        """Number of pages up to the newest of `num_tokens`, and the first page of its window."""
        size = self._geometry.page_size
        rows = self._rows(num_tokens - 1)
        if self._sparse is None:
            return rows // size + 1, np.zeros_like(rows)
        prompts = np.array([request.prompt_len for request in requests], dtype=np.int64)
        dense = np.array([request.dense for request in requests], dtype=bool)
        prompt_rows = np.where(dense, ALL_ROWS, self._rows(prompts))
        return rows // size + 1, self._sparse.window_starts(rows, size, prompt_rows)

    def _rows(self, tokens: np.ndarray) -> np.ndarray:
        """Number of cache rows before the row of each token."""
        page, offset = np.divmod(tokens, self._geometry.tokens_per_page)
        return page * self._geometry.page_size + offset
