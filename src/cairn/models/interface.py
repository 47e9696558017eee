"""What the runner asks of a model, Cairn's own or another library's."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from typing import Protocol

import torch

from cairn.attention.attend import Attend
from cairn.models.spec import ModelSpec


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
