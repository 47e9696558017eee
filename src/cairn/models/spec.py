"""A decoder, described: all that the model code and the engine need, read from config.json once."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch

from cairn.memory.groups import LayerGroup, group_layers
from cairn.memory.layout import CacheLayout
from cairn.models.rope import RopeParameters

QKNorm = Literal["none", "head", "layer"]
"""No norm, one over each head (Qwen3), or one over all heads together (OLMo)."""


@dataclass(frozen=True, slots=True)
class NativeSparsity:
    """Sparse attention a model was trained with."""

    policy: str
    layers: tuple[int, ...]
    chunk_size: int  # rows of a page, its landmark row included
    topk: int
    window: int
    null_split: bool
    landmark_id: int  # what a landmark row embeds; no token of the tokenizer
    hides_landmark_rows: bool
    """Layers that are not sparse do not see landmark rows."""


@dataclass(frozen=True, slots=True)
class AttentionSpec:
    """Attention of one layer, and what the layer keeps in the cache."""

    num_heads: int
    num_kv_heads: int
    head_dim: int
    scale: float  # of attention scores
    window: int | None = None  # rows a query sees, itself included; None for all
    cache: CacheLayout | None = None
    """What the layer keeps of each row; None for keys and values of its kv heads."""
    value_dim: int | None = None
    """Size of what a head reads, if it is not `head_dim`: the first columns of a latent row."""

    @property
    def layout(self) -> CacheLayout:
        return self.cache or CacheLayout.of_heads(self.num_kv_heads, self.head_dim)


@dataclass(frozen=True, slots=True)
class ModelSpec:
    """What the engine must know of a model, however it is implemented."""

    architecture: str
    vocab_size: int
    layers: tuple[AttentionSpec, ...]
    context_length: int
    dynamic_rope_context: int | None = None
    """The length beyond which rotation depends on a prompt's length; None if it never does."""
    sparsity: NativeSparsity | None = None
    index_topk: int | None = None
    """Rows that a query reads, if an index of every layer selects them."""
    embedding_rows: int | None = None
    """Ids that can be embedded, if more than the vocabulary; never generated, but may be scored."""

    @property
    def windows(self) -> tuple[int | None, ...]:
        return tuple(layer.window for layer in self.layers)

    def groups(self, cache_dtype: torch.dtype) -> tuple[LayerGroup, ...]:
        """Layers that share page tables; `cache_dtype` is for parts without a type of their own."""
        layouts = [layer.layout.of_type(cache_dtype) for layer in self.layers]
        return group_layers(self.windows, layouts)

    def tokens_per_page(self, page_size: int) -> int:
        return page_size if self.sparsity is None else page_size - 1


@dataclass(frozen=True, slots=True)
class LayerSpec:
    window: int | None  # rows a query sees, itself included; None for all
    rope: RopeParameters | None  # None: queries and keys are not rotated
    qk_norm: QKNorm = "none"
    qkv_bias: bool = False
    output_bias: bool = False


@dataclass(frozen=True, slots=True)
class Dimensions:
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int


@dataclass(frozen=True, slots=True)
class DecoderSpec:
    architecture: str
    dims: Dimensions
    norm_eps: float
    context_length: int
    tie_embeddings: bool
    layers: tuple[LayerSpec, ...]
    mlp_bias: bool = False
    post_norm: bool = False
    """Norms after attention and MLP (OLMo) instead of before them."""
    sparsity: NativeSparsity | None = None
    embedding_rows: int | None = None  # vocab_size, if None
    head_rows: int | None = None  # likewise
    landmark_embedding: bool = False
    """Landmark rows have an embedding beside the table, not in it."""

    def for_engine(self) -> ModelSpec:
        ropes = [layer.rope for layer in self.layers if layer.rope is not None]
        dynamic = [rope.original_context for rope in ropes if rope.kind == "dynamic"]
        return ModelSpec(
            architecture=self.architecture,
            vocab_size=self.dims.vocab_size,
            layers=tuple(
                AttentionSpec(
                    self.dims.num_heads,
                    self.dims.num_kv_heads,
                    self.dims.head_dim,
                    scale=self.dims.head_dim**-0.5,
                    window=layer.window,
                )
                for layer in self.layers
            ),
            context_length=self.context_length,
            dynamic_rope_context=min(dynamic, default=None),
            sparsity=self.sparsity,
            embedding_rows=self.embedding_rows,
        )
