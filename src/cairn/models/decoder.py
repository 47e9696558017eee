"""A decoder-only transformer over a paged KV cache, built from its spec.

All rows of a step, of any number of sequences, go through as one flat batch [rows, hidden]. What
belongs to which sequence is known to attention alone, which is a function handed in.
"""

from __future__ import annotations

from typing import Protocol

import torch
import torch.nn.functional as F
from torch import nn

from cairn.models.layers import Embedding, Factory, Linear, RMSNorm
from cairn.models.rope import RopeParameters, Rotary, rotate
from cairn.models.spec import DecoderSpec

CosSin = tuple[torch.Tensor, torch.Tensor]


class Attend(Protocol):
    """Stores the new rows' keys and values and attends to the sequence so far."""

    def __call__(
        self,
        layer: int,
        query: torch.Tensor,  # [rows, heads, head_dim]
        key: torch.Tensor,  # [rows, kv_heads, head_dim]
        value: torch.Tensor,  # [rows, kv_heads, head_dim]
    ) -> torch.Tensor: ...  # [rows, heads, head_dim]


class SelfAttention(nn.Module):
    def __init__(self, spec: DecoderSpec, layer: int, factory: Factory) -> None:
        super().__init__()
        self._layer = layer
        self._head_dim = spec.head_dim
        self._widths = (spec.num_heads * spec.head_dim, spec.num_kv_heads * spec.head_dim)
        query_width, kv_width = self._widths
        self.qkv_proj = Linear(
            spec.hidden_size,
            {"q_proj": query_width, "k_proj": kv_width, "v_proj": kv_width},
            factory,
            bias=spec.qkv_bias,
        )
        self.o_proj = Linear(
            query_width, {"o_proj": spec.hidden_size}, factory, bias=spec.output_bias
        )
        self._norm_heads = spec.qk_norm == "head"
        if spec.qk_norm != "none":
            dims = (spec.head_dim,) * 2 if self._norm_heads else self._widths
            self.q_norm = RMSNorm(dims[0], spec.norm_eps, factory)
            self.k_norm = RMSNorm(dims[1], spec.norm_eps, factory)
        self._has_norm = spec.qk_norm != "none"

    def forward(self, x: torch.Tensor, cos_sin: CosSin, attend: Attend) -> torch.Tensor:
        query_width, kv_width = self._widths
        query, key, value = self.qkv_proj(x).split((query_width, kv_width, kv_width), dim=-1)
        if self._has_norm and not self._norm_heads:
            query, key = self.q_norm(query), self.k_norm(key)
        query, key, value = (t.unflatten(-1, (-1, self._head_dim)) for t in (query, key, value))
        if self._has_norm and self._norm_heads:
            query, key = self.q_norm(query), self.k_norm(key)
        query, key = rotate(query, *cos_sin), rotate(key, *cos_sin)
        out: torch.Tensor = self.o_proj(attend(self._layer, query, key, value).flatten(-2))
        return out


class MLP(nn.Module):
    def __init__(self, spec: DecoderSpec, factory: Factory) -> None:
        super().__init__()
        width = spec.intermediate_size
        self.gate_up_proj = Linear(
            spec.hidden_size,
            {"gate_proj": width, "up_proj": width},
            factory,
            bias=spec.mlp_bias,
        )
        self.down_proj = Linear(width, {"down_proj": spec.hidden_size}, factory, bias=spec.mlp_bias)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        gate, up = self.gate_up_proj(x).chunk(2, dim=-1)
        out: torch.Tensor = self.down_proj(F.silu(gate) * up)
        return out


class PreNormLayer(nn.Module):
    def __init__(self, spec: DecoderSpec, layer: int, factory: Factory) -> None:
        super().__init__()
        self.input_layernorm = RMSNorm(spec.hidden_size, spec.norm_eps, factory)
        self.self_attn = SelfAttention(spec, layer, factory)
        self.post_attention_layernorm = RMSNorm(spec.hidden_size, spec.norm_eps, factory)
        self.mlp = MLP(spec, factory)

    def forward(self, x: torch.Tensor, cos_sin: CosSin, attend: Attend) -> torch.Tensor:
        x = x + self.self_attn(self.input_layernorm(x), cos_sin, attend)
        out: torch.Tensor = x + self.mlp(self.post_attention_layernorm(x))
        return out


class PostNormLayer(nn.Module):
    def __init__(self, spec: DecoderSpec, layer: int, factory: Factory) -> None:
        super().__init__()
        self.self_attn = SelfAttention(spec, layer, factory)
        self.post_attention_layernorm = RMSNorm(spec.hidden_size, spec.norm_eps, factory)
        self.mlp = MLP(spec, factory)
        self.post_feedforward_layernorm = RMSNorm(spec.hidden_size, spec.norm_eps, factory)

    def forward(self, x: torch.Tensor, cos_sin: CosSin, attend: Attend) -> torch.Tensor:
        x = x + self.post_attention_layernorm(self.self_attn(x, cos_sin, attend))
        out: torch.Tensor = x + self.post_feedforward_layernorm(self.mlp(x))
        return out


class Decoder(nn.Module):
    def __init__(self, spec: DecoderSpec, factory: Factory) -> None:
        super().__init__()
        self.embed_tokens = Embedding(spec.vocab_size, spec.hidden_size, factory)
        layer_class = PostNormLayer if spec.post_norm else PreNormLayer
        self.layers = nn.ModuleList(layer_class(spec, i, factory) for i in range(len(spec.layers)))
        self.norm = RMSNorm(spec.hidden_size, spec.norm_eps, factory)
        # Layers with the same rope share its cosines and sines.
        ropes: list[RopeParameters] = list(dict.fromkeys(layer.rope for layer in spec.layers))
        self._rope_of = [ropes.index(layer.rope) for layer in spec.layers]
        self._rotaries = [
            Rotary(rope, spec.head_dim, factory.dtype, factory.device) for rope in ropes
        ]

    def forward(
        self,
        token_ids: torch.Tensor,
        positions: torch.Tensor,
        lengths: torch.Tensor,
        attend: Attend,
    ) -> torch.Tensor:
        x = self.embed_tokens(token_ids)
        cos_sin = [rotary(positions, lengths) for rotary in self._rotaries]
        for layer, rope in zip(self.layers, self._rope_of, strict=True):
            x = layer(x, cos_sin[rope], attend)
        out: torch.Tensor = self.norm(x)
        return out


class CausalLM(nn.Module):
    """Decoder and output head. Module names are the checkpoint's names."""

    def __init__(self, spec: DecoderSpec, factory: Factory) -> None:
        super().__init__()
        self.spec = spec
        self.model = Decoder(spec, factory)
        if not spec.tie_embeddings:
            self.lm_head = Linear(spec.hidden_size, {"lm_head": spec.vocab_size}, factory)

    def forward(
        self,
        token_ids: torch.Tensor,  # [rows]
        positions: torch.Tensor,  # [rows]
        lengths: torch.Tensor,  # [rows], see Rotary
        attend: Attend,
    ) -> torch.Tensor:
        """Hidden states [rows, hidden], after the final norm."""
        out: torch.Tensor = self.model(token_ids, positions, lengths, attend)
        return out

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """[rows, hidden] -> [rows, vocab_size]"""
        if self.spec.tie_embeddings:
            return F.linear(hidden, self.model.embed_tokens.weight)
        out: torch.Tensor = self.lm_head(hidden)
        return out
