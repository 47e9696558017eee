"""StreamingLLM: reads the window and the first pages, whatever the query is."""

from __future__ import annotations

from typing import ClassVar

import torch

from cairn.sparsity.policy import Landmark, Policy

_WIDTH = 16  # the least that kernels read


class StreamingPolicy(Policy):
    sinks_only: ClassVar[bool] = True

    @property
    def landmark_width(self) -> int:
        return _WIDTH

    def landmark(self, keys: torch.Tensor, prior: torch.Tensor | None) -> Landmark:
        return Landmark(keys.new_zeros(keys.shape[0], keys.shape[2], _WIDTH), None)

    def map_query(self, query: torch.Tensor) -> torch.Tensor:
        return query.new_zeros(*query.shape[:-1], _WIDTH)
