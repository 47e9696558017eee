"""A toy model with a latent cache, and the attention backend that reads it, as one file outside of
the package.

LLM(folder, model_impl="tests.models.toy_latent:build",
    attention_backend="tests.models.toy_latent:LatentBackend")

A row keeps one latent vector that all heads share, as key and as value; there are no kv heads.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import replace

import torch

from cairn.attention.attend import Attend
from cairn.attention.backend import DenseBackend
from cairn.attention.batch import AttentionBatch
from cairn.memory.layout import CacheLayout, CachePart
from cairn.models.config_reader import ConfigReader
from cairn.models.decoder import Attention, CausalLM
from cairn.models.fields import FULL, read_decoder, read_dimensions
from cairn.models.layers import Linear
from cairn.models.module import Factory
from cairn.models.rope import CosSin
from cairn.models.spec import AttentionSpec, DecoderSpec

LATENT = "latent"


def attention(
    query: torch.Tensor, latents: torch.Tensor, past: int, window: int | None, scale: float
) -> torch.Tensor:
    """query [rows, heads, width] of rows from `past` on, over latents [keys, width]"""
    rows = torch.arange(past, past + len(query))[:, None]
    keys = torch.arange(len(latents))[None]
    seen = (keys <= rows) & (keys > rows - (window or len(latents) + 1))
    # Rows behind the window may be gone; what stands in their place may be NaN.
    latents = latents.masked_fill(~seen.any(0)[:, None], 0).to(query.dtype)
    scores = torch.einsum("rhw,kw->hrk", query, latents) * scale
    weights = scores.masked_fill(~seen, float("-inf")).softmax(-1)
    return torch.einsum("hrk,kw->rhw", weights, latents)


class LatentBackend(DenseBackend):
    """Reads the latent rows of each sequence from its pages."""

    name = LATENT
    dtypes = (torch.float64, torch.float32)
    reads = (LATENT,)

    def prepare(
        self, batch: AttentionBatch, groups: Collection[int] | None = None
    ) -> AttentionBatch:
        return batch

    def attend(self, layer: int, query: torch.Tensor, metadata: AttentionBatch) -> torch.Tensor:
        g = self._pool.group_of[layer]
        out = torch.empty_like(query)
        for s, kv_len in enumerate(metadata.kv_lens.tolist()):
            rows = slice(int(metadata.cu_query[s]), int(metadata.cu_query[s + 1]))
            pages = metadata.groups[g].page_table[s, : -(-kv_len // metadata.page_size)].long()
            latents = self._pool.part(layer, LATENT)[pages].flatten(0, 1)[:kv_len]
            past = kv_len - int(metadata.query_lens[s])
            window = self._shape.groups[g].window
            out[rows] = attention(query[rows], latents, past, window, self._shape.scale)
        return out


class LatentAttention(Attention):
    def __init__(self, spec: DecoderSpec, layer: int, factory: Factory, width: int) -> None:
        self._layer, self._heads, self._width = layer, spec.dims.num_heads, width
        hidden, all_heads = spec.dims.hidden_size, spec.dims.num_heads * width
        self.q_proj = Linear(hidden, {"q_proj": all_heads}, factory)
        self.kv_a_proj = Linear(hidden, {"kv_a_proj": width}, factory)
        self.o_proj = Linear(all_heads, {"o_proj": hidden}, factory)

    def __call__(self, x: torch.Tensor, cos_sin: CosSin | None, attend: Attend) -> torch.Tensor:
        query = self.q_proj(x).view(len(x), self._heads, self._width)
        # The row that the layer keeps stands where keys and values stand for others.
        return self.o_proj(attend(self._layer, query, self.kv_a_proj(x)).flatten(1))


def build(config: ConfigReader, factory: Factory) -> CausalLM:
    """Layers are full, rounded to float32 in the cache, or with a window, in turn."""
    dims = read_dimensions(config)
    width = config.take_positive("latent_size")
    window = config.take_positive("sliding_window")
    spec = read_decoder(config, dims, [FULL] * dims.num_layers)

    def make(spec: DecoderSpec, layer: int, factory: Factory) -> LatentAttention:
        return LatentAttention(spec, layer, factory, width)

    model = CausalLM(spec, factory, attention=make)
    kinds = (
        AttentionSpec(dims.num_heads, 1, width, width**-0.5, None, _layout(width, None)),
        AttentionSpec(dims.num_heads, 1, width, width**-0.5, None, _layout(width, torch.float32)),
        AttentionSpec(dims.num_heads, 1, width, width**-0.5, window, _layout(width, None)),
    )
    layers = tuple(kinds[i % len(kinds)] for i in range(dims.num_layers))
    model.spec = replace(model.spec, layers=layers)
    return model


def _layout(width: int, dtype: torch.dtype | None) -> CacheLayout:
    return CacheLayout((CachePart(LATENT, (width,), dtype),))
