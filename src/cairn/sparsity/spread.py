"""Mean and spread: estimates the best score of a page's keys from their mean and deviation.

If the dimensions of a page's keys vary independently, their scores have the mean

    mean = scale * query . (mean key)

and the variance

    variance = (scale * query)^2 . (variance of each dimension of the keys)

The score is `reach` deviations above the mean. The mean alone hides the one key that matters. The
box of `quest` lets all dimensions take their best value at once, so that pages with a wide box win
over the page with the key that matters.
"""

from __future__ import annotations

import torch

from cairn.sparsity.policy import Landmark, Policy


class SpreadPolicy(Policy):
    pooling = "spread"
    reach = 2.0

    @property
    def landmark_width(self) -> int:
        return 2 * self.shape.head_dim

    def landmark(self, keys: torch.Tensor, prior: torch.Tensor | None) -> Landmark:
        wide = keys.to(torch.promote_types(keys.dtype, torch.float32))
        variance, mean = torch.var_mean(wide, dim=1, correction=0)
        return Landmark(torch.cat((mean, variance), -1).to(keys.dtype), None)

    def map_query(self, query: torch.Tensor) -> torch.Tensor:
        return torch.cat((query, (query * self.shape.scale).square()), -1)
