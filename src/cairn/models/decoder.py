"""A decoder-only transformer over a paged KV cache, built from its spec.

All rows of a step, of any number of sequences, go through as one flat batch [rows, hidden]. What
belongs to which sequence is known to attention alone, which is a function handed in.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn

from cairn.models.interface import Attend
from cairn.models.layers import Embedding, Factory, Linear, RMSNorm
from cairn.models.rope import RopeParameters, Rotary, rotate
from cairn.models.spec import DecoderSpec, ModelSpec

CosSin = tuple[torch.Tensor, torch.Tensor]


def _norm(dim: int, spec: DecoderSpec, factory: Factory) -> RMSNorm:
    # OLMo rounds after the weight, the others before it.
    return RMSNorm(dim, spec.norm_eps, factory, round_last=spec.post_norm)


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
            self.q_norm = _norm(dims[0], spec, factory)
            self.k_norm = _norm(dims[1], spec, factory)
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
        self.input_layernorm = _norm(spec.hidden_size, spec, factory)
        self.self_attn = SelfAttention(spec, layer, factory)
        self.post_attention_layernorm = _norm(spec.hidden_size, spec, factory)
        self.mlp = MLP(spec, factory)

    def forward(self, x: torch.Tensor, cos_sin: CosSin, attend: Attend) -> torch.Tensor:
        x = x + self.self_attn(self.input_layernorm(x), cos_sin, attend)
        out: torch.Tensor = x + self.mlp(self.post_attention_layernorm(x))
        return out


class PostNormLayer(nn.Module):
    def __init__(self, spec: DecoderSpec, layer: int, factory: Factory) -> None:
        super().__init__()
        self.self_attn = SelfAttention(spec, layer, factory)
        self.post_attention_layernorm = _norm(spec.hidden_size, spec, factory)
        self.mlp = MLP(spec, factory)
        self.post_feedforward_layernorm = _norm(spec.hidden_size, spec, factory)

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
        self.norm = _norm(spec.hidden_size, spec, factory)
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

    def __init__(self, config: DecoderSpec, factory: Factory) -> None:
        super().__init__()
        self.config = config
        self.model = Decoder(config, factory)
        if not config.tie_embeddings:
            self.lm_head = Linear(config.hidden_size, {"lm_head": config.vocab_size}, factory)

    @property
    def spec(self) -> ModelSpec:
        return self.config.for_engine()

    def forward(
        self,
        token_ids: torch.Tensor,
        positions: torch.Tensor,
        lengths: torch.Tensor,
        attend: Attend,
        logit_rows: torch.Tensor,
    ) -> torch.Tensor:
        hidden = self.model(token_ids, positions, lengths, attend)[logit_rows]
        if self.config.tie_embeddings:
            return F.linear(hidden, self.model.embed_tokens.weight)
        logits: torch.Tensor = self.lm_head(hidden)
        return logits
