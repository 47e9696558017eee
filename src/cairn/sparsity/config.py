"""How the sparse layers of a model attend, with every choice made."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from cairn.sparsity.policy import Fusion, Policy, Strategy

ALL_ROWS = 2**31 - 1
"""As a bound on rows: all of them."""


@dataclass(frozen=True, slots=True)
class SparseConfig:
    policy: Policy | None
    """None for backends without landmarks."""
    layers: tuple[int, ...]
    topk: int
    """Pages a query reads outside its window, sinks included."""
    window: int
    """Rows a query always sees, itself included, widened to whole pages."""
    strategy: Strategy
    fusion: Fusion
    sinks: int = 0
    """First pages of a sequence, which are always among the selected."""
    null_split: bool = False
    """A split of weight exp(0) and output zero takes part in the merge (softmax1)."""
    landmark_rows: bool = False
    """The last row of a page is a landmark row, whose KV nobody attends to."""
    dense_below: int = 0
    """Rows below this one see everything before them."""
    dense_prompt_below: int = 0
    """So do the rows of a prompt below this one."""

    @property
    def reads_densely(self) -> bool:
        """Some rows see everything."""
        return self.dense_below > 0 or self.dense_prompt_below > 0

    def window_start(self, row: int, page_size: int) -> int:
        """First page of the window of a query at `row`; earlier pages are candidates."""
        if row < self.dense_below:
            return 0
        return max(0, (row - self.window + 1) // page_size)

    def dense_until(self, prompt_rows: np.ndarray) -> np.ndarray:
        """Rows of each sequence before this one see everything; `prompt_rows` [seqs] are those of
        its prompt."""
        until: np.ndarray = np.maximum(
            self.dense_below, np.minimum(prompt_rows, self.dense_prompt_below)
        )
        return until

    def window_starts(
        self, rows: np.ndarray, page_size: int, prompt_rows: np.ndarray
    ) -> np.ndarray:
        """`window_start` of a row of each of several sequences, dense ones of a prompt included."""
        starts = np.maximum(0, (rows - self.window + 1) // page_size)
        return np.where(rows < self.dense_until(prompt_rows), 0, starts)
