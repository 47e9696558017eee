"""The resolved configuration of a model's sparse layers."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from cairn.sparsity.policy import Fusion, Policy, Strategy

ALL_ROWS = 2**31 - 1
"""A limit on rows that includes all of them."""


@dataclass(frozen=True, slots=True)
class SparseConfig:
    policy: Policy | None
    """Makes and scores landmarks; None for backends without landmarks."""
    layers: tuple[int, ...]
    topk: int
    """Pages that a query reads outside its window, including sinks; the most of any layer."""
    window: int
    """Rows that a query always sees, including itself, extended to whole pages."""
    strategy: Strategy
    fusion: Fusion
    sinks: int = 0
    """Number of first pages of a sequence that are always selected."""
    top_p: float | None = None
    """A query stops taking pages once they and its window hold this share of the estimated
    attention of every head."""
    budgets: tuple[int, ...] | None = None
    """Pages of each of `layers`, in place of `topk`."""
    units: int = 1
    """Number of units of a page of the cache. A unit has a landmark and is selected as a whole;
    unit j of page p has the id p * units + j. Sparse attention reads units, and if a page has
    several, its code means units where it says pages."""
    null_split: bool = False
    """The merge includes an empty split of weight exp(0) and output zero (softmax1)."""
    landmark_rows: bool = False
    """The last row of each page is a landmark row. No query attends to its KV."""
    dense_below: int = 0
    """Rows below this position are dense: they see everything before them."""
    dense_prompt_below: int = 0
    """Prompt rows below this position are dense too."""
    by_row: bool = False
    """Queries select single rows, by an index: `topk` counts rows, not pages."""

    def topk_of(self, layer: int) -> int:
        return self.topk if self.budgets is None else self.budgets[self.layers.index(layer)]

    @property
    def mean_topk(self) -> float:
        """Pages of a layer, on average; with `top_p` the most."""
        return self.topk if self.budgets is None else sum(self.budgets) / len(self.budgets)

    @property
    def reads_densely(self) -> bool:
        """Whether some rows are dense."""
        return self.dense_below > 0 or self.dense_prompt_below > 0

    @property
    def stages_prompts(self) -> bool:
        """With a host tier: prompts read the pages of a layer from a stage."""
        return self.by_row or self.dense_prompt_below > 0

    def window_start(self, row: int, page_size: int) -> int:
        """First page of the window of a query at `row`. Earlier pages are candidates."""
        if row < self.dense_below:
            return 0
        return max(0, (row - self.window + 1) // page_size)

    def dense_until(self, prompt_rows: np.ndarray) -> np.ndarray:
        """The position [seqs] below which each sequence's rows are dense. `prompt_rows` [seqs] is
        the number of rows of its prompt."""
        until: np.ndarray = np.maximum(
            self.dense_below, np.minimum(prompt_rows, self.dense_prompt_below)
        )
        return until

    def window_starts(
        self, rows: np.ndarray, page_size: int, prompt_rows: np.ndarray
    ) -> np.ndarray:
        """`window_start` for one row of each sequence, also for dense prompt rows."""
        starts = np.maximum(0, (rows - self.window + 1) // page_size)
        return np.where(rows < self.dense_until(prompt_rows), 0, starts)
