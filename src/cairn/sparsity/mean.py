"""Uses a page's mean key as its landmark: the simplest policy for models without landmarks."""

from __future__ import annotations

import torch

from cairn.sparsity.policy import Landmark, Policy


class MeanPolicy(Policy):
    pooling = "mean"

    def landmark(self, keys: torch.Tensor, prior: torch.Tensor | None) -> Landmark:
        wide = torch.promote_types(keys.dtype, torch.float32)
        return Landmark(keys.mean(1, dtype=wide).to(keys.dtype), None)
