"""Where a model split over several devices would talk: the few places go through this protocol."""

from __future__ import annotations

from typing import Protocol

import torch


class Parallel(Protocol):
    def sum(self, x: torch.Tensor) -> torch.Tensor:
        """Add up what every rank has of a row: after attention's output and the MLP's."""
        ...

    def concat(self, logits: torch.Tensor) -> torch.Tensor:
        """Put together the parts of the vocabulary: [rows, part] -> [rows, vocab]."""
        ...


class Alone:
    """One device has everything."""

    def sum(self, x: torch.Tensor) -> torch.Tensor:
        return x

    def concat(self, logits: torch.Tensor) -> torch.Tensor:
        return logits
