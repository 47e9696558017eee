"""Quest: the landmark is the bounding box of a page's keys. The score is the largest score that any
key in the box could have.

Each dimension contributes the larger of q * max and q * min. That is linear in [max, min] if the
query is split into its positive and negative parts.
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
