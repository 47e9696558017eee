"""SnapKV: the last rows of the prompt choose the pages that the whole answer reads.

A page's score is the attention that those rows give it, summed up. It does not depend on the row
that is generated. Pages are left out, not freed, since other requests may share them. Of the answer
itself only the window is read, whereas SnapKV keeps all of it.
"""

from __future__ import annotations

from typing import ClassVar

import torch

from cairn.sparsity.policy import Landmark, Policy

_WIDTH = 16  # landmarks are not used; this is the least that the cache keeps


class SnapKVPolicy(Policy):
    observed: ClassVar[int] = 32

    @property
    def landmark_width(self) -> int:
        return _WIDTH

    def landmark(self, keys: torch.Tensor, prior: torch.Tensor | None) -> Landmark:
        return Landmark(keys.new_zeros(keys.shape[0], keys.shape[2], _WIDTH), None)

    def map_query(self, query: torch.Tensor) -> torch.Tensor:
        return query.new_zeros(*query.shape[:-1], _WIDTH)

    def vote(self, query: torch.Tensor, keys: torch.Tensor, hidden: torch.Tensor) -> torch.Tensor:
        _, pages, size, kv_heads, _ = keys.shape
        grouped = torch.unflatten(query, 2, (kv_heads, -1)) * self.shape.scale
        scores = torch.einsum("srhgd,spkhd->shgrpk", grouped, keys)
        scores = scores.masked_fill(hidden[:, None, None], float("-inf")).flatten(-2)
        # A row that sees nothing, before the beginning of a short prompt, gives nothing.
        shares = scores.softmax(-1).nan_to_num(0.0)
        return torch.unflatten(shares.sum((2, 3)), -1, (pages, size)).sum(-1).log()
