"""Uses the key of a page's landmark row as its landmark: HiLS without the prior query."""

from __future__ import annotations

from typing import ClassVar

import torch

from cairn.sparsity.policy import Fusion, Landmark, Policy


class LandmarkKeyPolicy(Policy):
    pooling = "last"
    needs_landmark_rows = True
    fusion: ClassVar[Fusion] = "landmark"

    def landmark(self, keys: torch.Tensor, prior: torch.Tensor | None) -> Landmark:
        return Landmark(keys[:, -1], None)
