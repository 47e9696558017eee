"""The single rows that decoding sequences read, with a host tier: in frames, or in hot slots."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np
import torch

from cairn.attention.batch import AttentionBatch, to_device
from cairn.memory.hisparse import HiSparseCoordinator, SwappedIn


class HotRows:
    """The selections of a step's decoding sequences, and where the rows are.

    A layer that selects makes a plan. Layers that share its selection carry out the same plan.
    """

    def __init__(self, tier: HiSparseCoordinator, batch: AttentionBatch, seqs: np.ndarray) -> None:
        """`seqs` [n] are sequences with one new row each."""
        tables, device = batch.groups[tier.page_group], batch.device
        self._tier = tier
        self._size = batch.page_size
        self._pages = to_device(tables.host_pages[seqs].astype(np.int64), device)
        self._lives = to_device(tables.host_generations[seqs].astype(np.int64), device)
        self._wanted: tuple[torch.Tensor, torch.Tensor] | None = None
        self._swapped: list[tuple[slice, SwappedIn]] = []

    def select(self, positions: Sequence[torch.Tensor]) -> None:
        """Set the positions that each sequence reads, [k] each, until the next call."""
        most = max(len(own) for own in positions)
        at = self._pages.new_full((len(positions), most), -1)
        for row, own in zip(at, positions, strict=True):
            row[: len(own)] = own
        place = at.clamp(min=0) // self._size
        rows = self._pages.gather(1, place) * self._size + at % self._size
        rows = rows.masked_fill(at < 0, -1)
        self._wanted = rows[:, None], self._lives.gather(1, place)[:, None]
        self._swapped = []

    def swap_in(self, layer: int) -> Iterator[tuple[int, torch.Tensor]]:
        """Make the rows readable for one run of sequences after the other. Yields the first
        one of the run, and the row of the pool [sequences, k] at each position."""
        if self._wanted is None:
            for part, swapped in self._swapped:
                self._tier.swap_in_again(layer, swapped)
                yield part.start, swapped.places[:, 0]
            return
        (rows, lives), self._wanted = self._wanted, None
        for part in self._tier.parts(layer, rows, lives, len(rows)):
            swapped = self._tier.swap_in(layer, rows[part], lives[part])
            self._swapped.append((part, swapped))
            yield part.start, swapped.places[:, 0]
