"""Where a model that is split over several ranks talks: the few places go through this protocol."""

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
        """Add up what every rank has of a row: after attention's output and the MLP's.

        The result may be stored in `x`.
        """
        ...

    def concat(self, part: torch.Tensor, dim: int = -1) -> torch.Tensor:
        """Put the ranks' parts together, in the order of ranks: the vocabulary's, or the heads'."""
        ...

    def from_first(self, x: torch.Tensor) -> torch.Tensor:
        """What rank 0 has in a tensor of this shape, which may be stored in `x`."""
        ...


@dataclass(frozen=True, slots=True)
class Alone:
    """One device has everything, and there is nobody to talk to.

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
