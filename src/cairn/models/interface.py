"""What the runner and the loader ask of a model, Cairn's own or another library's."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Mapping

import torch

from cairn.attention.attend import Attend
from cairn.kernels.cpu import CpuKernels
from cairn.models.layers import Embedding
from cairn.models.module import Module
from cairn.models.spec import ModelSpec


class LanguageModel(Module):
    """A model, or one rank's part of it. Names of modules are the checkpoint's names."""

    spec: ModelSpec
    tied: Mapping[str, Embedding] = {}
    """Tensors that a checkpoint may leave out, because they are copies of an embedding."""

    cpu: CpuKernels | None = None
    """The factory's: attention uses them too."""

    @property
    def cache_scales(self) -> Mapping[int, tuple[float, float]]:
        """By layer: scales of cached keys and values that the checkpoint gives, 0 for none."""
        return {}

    def ignores(self, name: str) -> bool:
        """Whether a tensor of the checkpoint has no effect on the output."""
        # Buffers that old exports carry follow from the config.
        return name.endswith("rotary_emb.inv_freq")

    gives_hidden = False
    """Whether it has `hidden` and `head`, of which `__call__` is the composition."""

    def hidden(
        self,
        token_ids: torch.Tensor,
        positions: torch.Tensor,
        lengths: torch.Tensor,
        attend: Attend,
    ) -> torch.Tensor:
        """The last layer's hidden states [rows, hidden size], normalised, as the head gets them."""
        raise NotImplementedError

    def head(self, hidden: torch.Tensor) -> torch.Tensor:
        """Logits [n, vocab_size] of hidden states [n, hidden size]."""
        raise NotImplementedError

    def rehearse_head(self, row_counts: Iterable[int]) -> None:
        """Run a quantised output head once with each number of rows, so that it is compiled."""

    def excerpt(self, kind_of: Callable[[int], Hashable]) -> LanguageModel:
        """The same model with one layer of each kind, or the model itself.

        Layers are of one kind if `kind_of` and the model say so. They keep their numbers.
        """
        return self

    def __call__(
        self,
        token_ids: torch.Tensor,  # [rows], all sequences back to back
        positions: torch.Tensor,  # [rows] within the sequence
        lengths: torch.Tensor,  # [rows] sequence length a row is rotated for, see Rotary
        attend: Attend,
        logit_rows: torch.Tensor | None,  # [n] rows whose logits are wanted; None for all
    ) -> torch.Tensor:  # [n, vocab_size]
        raise NotImplementedError
