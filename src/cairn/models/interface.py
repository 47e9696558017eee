"""What the runner asks of a model, Cairn's own or another library's."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from typing import Protocol

import torch

from cairn.attention.batch import Scoring
from cairn.kernels.interface import ScoringHeads
from cairn.models.spec import ModelSpec


class Attend(Protocol):
    """Stores the new rows' keys and values and attends to the sequence so far."""

    def __call__(
        self,
        layer: int,
        query: torch.Tensor,  # [rows, heads, head_dim]
        key_value: torch.Tensor,  # [rows, 2 * kv_heads, head_dim], keys first
        scoring: Scoring | None = None,  # from layers with landmarks of their own
    ) -> torch.Tensor: ...  # [rows, heads, head_dim]

    def fused(
        self,
        layer: int,
        qkv: torch.Tensor,  # [rows, (heads + 2 * kv_heads) * head_dim], as projected
        cos_sin: tuple[torch.Tensor, torch.Tensor],  # [rows, 1, head_dim] each
        norm: tuple[torch.Tensor, torch.Tensor, float] | None,  # q and k weights per head, eps
        scoring: ScoringHeads | None = None,
        *,
        hils: bool = False,
    ) -> torch.Tensor:  # [rows, heads, head_dim]
        """Norm, rotate, store and attend; for CUDA with triton.

        A `hils` layer without scoring heads of its own scores pages with its queries.
        """
        ...


class LanguageModel(Protocol):
    @property
    def spec(self) -> ModelSpec: ...

    def excerpt(self, kind_of: Callable[[int], Hashable]) -> LanguageModel:
        """The same model with one layer of each kind, or the model itself.

        Layers differ if `kind_of` or the model says so, and keep their numbers.
        """
        ...

    def __call__(
        self,
        token_ids: torch.Tensor,  # [rows], all sequences back to back
        positions: torch.Tensor,  # [rows] within the sequence
        lengths: torch.Tensor,  # [rows] sequence length a row is rotated for, see Rotary
        attend: Attend,
        logit_rows: torch.Tensor | None,  # [n] rows whose logits are wanted; None for all
    ) -> torch.Tensor: ...  # [n, vocab_size]
