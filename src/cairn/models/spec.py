"""A decoder, described: all that the model code and the engine need, read from config.json once."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from cairn.models.rope import RopeParameters

QKNorm = Literal["none", "head", "layer"]
"""No norm, one over each head (Qwen3), or one over all heads together (OLMo)."""


@dataclass(frozen=True, slots=True)
class ModelSpec:
    """What the engine must know of a model, however it is implemented."""

    architecture: str
    vocab_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    scale: float  # of attention scores
    windows: tuple[int | None, ...]  # per layer: rows a query sees, itself included; None for all
    context_length: int
    dynamic_rope_context: int | None = None
    """The length beyond which rotation depends on a prompt's length; None if it never does."""

    def tokens_per_page(self, page_size: int) -> int:
        return page_size


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

    def for_engine(self) -> ModelSpec:
        dynamic = [s.rope.original_context for s in self.layers if s.rope.kind == "dynamic"]
        return ModelSpec(
            architecture=self.architecture,
            vocab_size=self.vocab_size,
            num_heads=self.num_heads,
            num_kv_heads=self.num_kv_heads,
            head_dim=self.head_dim,
            scale=self.head_dim**-0.5,
            windows=tuple(layer.window for layer in self.layers),
            context_length=self.context_length,
            dynamic_rope_context=min(dynamic, default=None),
        )
