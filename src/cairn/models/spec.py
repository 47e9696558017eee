"""A decoder, described: all that the model code and the engine need, read from config.json once."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from cairn.models.rope import RopeParameters

QKNorm = Literal["none", "head", "layer"]
"""No norm, one over each head (Qwen3), or one over all heads together (OLMo)."""


@dataclass(frozen=True, slots=True)
class LayerSpec:
    window: int | None  # rows a query sees, itself included; None for all
    rope: RopeParameters


@dataclass(frozen=True, slots=True)
class DecoderSpec:
    architecture: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    norm_eps: float
    context_length: int
    tie_embeddings: bool
    layers: tuple[LayerSpec, ...]
    qk_norm: QKNorm = "none"
    qkv_bias: bool = False
    output_bias: bool = False
    mlp_bias: bool = False
    post_norm: bool = False
    """Norms after attention and MLP (OLMo) instead of before them."""

    @property
    def windows(self) -> tuple[int | None, ...]:
        return tuple(layer.window for layer in self.layers)

    @property
    def dynamic_rope_context(self) -> int | None:
        """The length beyond which rotation depends on a prompt's length; None if it never does."""
        lengths = [s.rope.original_context for s in self.layers if s.rope.kind == "dynamic"]
        return min(lengths) if lengths else None

    def tokens_per_page(self, page_size: int) -> int:
        return page_size
