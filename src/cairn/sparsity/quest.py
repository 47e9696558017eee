"""Quest: the box around a page's keys, and the largest score any key in that box could have.

For each dimension the larger of q * max and q * min counts. That is linear in [max, min] once the
query is split into its positive and its negative part.
"""

from __future__ import annotations

import torch

from cairn.sparsity.policy import Landmark, Policy


class QuestPolicy(Policy):
    pooling = "box"

    @property
    def landmark_width(self) -> int:
        return 2 * self.shape.head_dim

    def landmark(self, keys: torch.Tensor, prior: torch.Tensor | None) -> Landmark:
        low, high = keys.aminmax(dim=1)
        return Landmark(torch.cat((high, low), -1), None)

    def map_query(self, query: torch.Tensor) -> torch.Tensor:
        return torch.cat((query.clamp(min=0), query.clamp(max=0)), -1)
