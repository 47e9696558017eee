"""Mean and spread: the landmark is the mean of a page's keys and their deviation in each dimension.

    score(query, page) = scale * (query . mean + REACH * |query| . deviation)

The mean alone hides the one key that matters. The box of `quest` lets every dimension take its best
value at once, so that pages with wide boxes win. This score lies between the two.
"""

from __future__ import annotations

import torch

from cairn.sparsity.policy import Landmark, Policy

REACH = 0.5
"""Deviations above the mean at which a page is scored, in every dimension."""


class SpreadPolicy(Policy):
    @property
    def landmark_width(self) -> int:
        return 2 * self.shape.head_dim

    def landmark(self, keys: torch.Tensor, prior: torch.Tensor | None) -> Landmark:
        wide = keys.to(torch.promote_types(keys.dtype, torch.float32))
        deviation, mean = torch.std_mean(wide, dim=1, correction=0)
        return Landmark(torch.cat((mean, deviation), -1).to(keys.dtype), None)

    def map_query(self, query: torch.Tensor) -> torch.Tensor:
        return torch.cat((query, REACH * query.abs()), -1)
