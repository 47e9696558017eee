"""HiLS: the page's landmark row summarizes the page.

The query of the landmark row attends to the page's keys. The landmark is the mean key under that
attention, and its bias is the entropy of that attention. Together they are the first-order
expansion of the page's log-sum-exp around that query.
"""

from __future__ import annotations

from typing import ClassVar

import torch

from cairn.sparsity.policy import Fusion, Landmark, Policy


class HiLSPolicy(Policy):
    pooling = "hils"
    needs_landmark_rows = True
    fusion: ClassVar[Fusion] = "landmark"
    has_bias = True

    @property
    def landmark_heads(self) -> int:
        return self.shape.num_heads

    def landmark(self, keys: torch.Tensor, prior: torch.Tensor | None) -> Landmark:
        assert prior is not None
        wide = torch.promote_types(keys.dtype, torch.float32)
        real = keys[:, :-1].to(wide)  # without the landmark row itself
        # [pages, kv_heads, group, dim]
        query = torch.unflatten(prior.to(wide), 1, (real.shape[2], -1))
        logits = torch.einsum("phgd,pshd->phgs", query, real) * self.shape.scale
        log_weights = logits.log_softmax(-1)
        weights = log_weights.exp()
        vectors = torch.einsum("phgs,pshd->phgd", weights, real).flatten(1, 2)
        entropy = -(weights * log_weights).sum(-1).flatten(1, 2)
        return Landmark(vectors.to(keys.dtype), entropy)
