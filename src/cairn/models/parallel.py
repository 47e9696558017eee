"""Communication between the ranks of a model that is split over several devices."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch


class Parallel(Protocol):
    @property
    def rank(self) -> int: ...

    @property
    def size(self) -> int:
        """Ranks that share the model."""
        ...

    def sum(self, x: torch.Tensor) -> torch.Tensor:
        """The sum over all ranks, after attention and after the MLP. It may be stored in `x`."""
        ...

    def concat(self, part: torch.Tensor, dim: int = -1) -> torch.Tensor:
        """The parts of all ranks, in the order of ranks: of the vocabulary, or of the heads."""
        ...

    def from_first(self, x: torch.Tensor) -> torch.Tensor:
        """Rank 0's tensor of this shape and type. It may be stored in `x`."""
        ...


@dataclass(frozen=True, slots=True)
class Alone:
    """One device has the whole model, so nothing is exchanged.

    With a `size` above 1 it has the shapes of one rank among several, but cannot compute.
    """

    rank: int = 0
    size: int = 1

    def sum(self, x: torch.Tensor) -> torch.Tensor:
        return x

    def concat(self, part: torch.Tensor, dim: int = -1) -> torch.Tensor:
        return part

    def from_first(self, x: torch.Tensor) -> torch.Tensor:
        return x
