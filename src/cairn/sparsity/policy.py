"""The interface of page-selection policies.

A policy summarizes each complete page in a landmark, and scores the landmark against a query:

    score(query, page) = scale * map_query(query) . vectors(page) + bias(page)

The score is linear in the landmark, so that the same kernels serve every policy. With a `reach`,
mapped queries and vectors have two halves, and the product of the second is a variance:

    score(query, page) = scale * first + reach * sqrt(second) + bias(page)

A policy that overrides `score` runs in plain torch. Policies know nothing about kernels, requests
or memory.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal, NamedTuple

import torch

Fusion = Literal["landmark", "lse"]
"""The weight of a selected page in the merge: its landmark score, or its exact log-sum-exp."""

Strategy = Literal["group", "head", "softmax_head"]
"""How the query heads of one kv head choose pages together: by the sum of their scores, by the best
score, or by the best share of a head's attention."""


@dataclass(frozen=True, slots=True)
class PolicyShape:
    num_heads: int
    num_kv_heads: int
    head_dim: int
    scale: float  # of attention scores


class Landmark(NamedTuple):
    vectors: torch.Tensor  # [pages, landmark heads, width]
    bias: torch.Tensor | None  # [pages, landmark heads], float32 or wider


class Policy:
    needs_landmark_rows: ClassVar[bool] = False
    """Pages must end in a landmark row, which only models trained with landmark rows have."""
    pooling: ClassVar[str | None] = None
    """Name of the method that `landmark` implements: hils, last, box, mean or spread. A
    backend with a kernel of this name may call the kernel instead."""
    fusion: ClassVar[Fusion] = "lse"
    strategy: ClassVar[Strategy] = "softmax_head"
    has_bias: ClassVar[bool] = False
    reach: ClassVar[float] = 0.0
    """Number of deviations that are added to the score. 0: landmarks have no second half."""
    sinks_only: ClassVar[bool] = False
    """It reads no pages but the sinks and the window, so that the number of pages is theirs."""
    observed: ClassVar[int] = 0
    """Number of last rows of a prompt that choose the pages of the whole answer, by `vote`. The
    cache then keeps the queries of all rows. 0: every row chooses its own pages, by `score`."""

    def __init__(self, shape: PolicyShape) -> None:
        self.shape = shape

    @property
    def landmark_heads(self) -> int:
        """Number of landmarks per page: one per kv head, or one per query head."""
        return self.shape.num_kv_heads

    @property
    def landmark_width(self) -> int:
        return self.shape.head_dim

    def landmark(self, keys: torch.Tensor, prior: torch.Tensor | None) -> Landmark:
        """The landmarks of complete pages.

        keys [pages, page_size, kv_heads, head_dim]. prior [pages, heads, head_dim] is the scoring
        query of each page's last row; None if the model has no landmark rows.
        """
        raise NotImplementedError

    def map_query(self, query: torch.Tensor) -> torch.Tensor:
        """Map query [rows, heads, head_dim] to [rows, heads, landmark_width]."""
        return query

    def score(self, query: torch.Tensor, landmark: Landmark) -> torch.Tensor:
        """Scores [..., rows, heads, pages] of landmarks [..., pages, heads, width] for mapped query
        [..., rows, heads, width]."""
        vectors, bias = landmark
        # [..., rows, lm heads, shared, width]
        grouped = torch.unflatten(query, -2, (vectors.shape[-2], -1))
        width = self.landmark_width // 2 if self.reach else self.landmark_width

        def product(half: slice) -> torch.Tensor:
            return torch.einsum("...rhgw,...phw->...rhgp", grouped[..., half], vectors[..., half])

        scores = product(slice(width)) * self.shape.scale
        if self.reach:
            scores = scores + self.reach * product(slice(width, None)).sqrt()
        if bias is not None:
            scores = scores + bias.transpose(-1, -2)[..., None, :, None, :]
        return scores.flatten(-3, -2)

    def vote(self, query: torch.Tensor, keys: torch.Tensor, hidden: torch.Tensor) -> torch.Tensor:
        """Scores [seqs, kv_heads, pages] of a prompt's pages, if rows are `observed`.

        query [seqs, observed, heads, head_dim], keys [seqs, pages, page_size, kv_heads, head_dim].
        hidden [seqs, observed, pages, page_size] is True where a row does not see a key.
        """
        raise NotImplementedError
