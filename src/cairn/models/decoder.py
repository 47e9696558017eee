"""A decoder-only transformer over a paged KV cache, built from its spec, or a rank's part of one.

All rows of a step, of any number of sequences, go through as one flat batch [rows, hidden]. What
belongs to which sequence is known to attention alone, which is a function handed in.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from copy import copy

import torch

from cairn.attention.attend import Attend
from cairn.models.hils_attention import CosSin, HiLSAttention
from cairn.models.layers import Embedding, Factory, Linear, Parameter, RMSNorm
from cairn.models.module import Module
from cairn.models.rope import RopeParameters, Rotary, rotate, with_values_unrotated
from cairn.models.spec import DecoderSpec, ModelSpec

Stream = torch.Tensor | None
"""The residual stream before what was `added`; None where that is all of it."""


def _norm(dim: int, spec: DecoderSpec, factory: Factory, *, split: bool = False) -> RMSNorm:
    # OLMo rounds after the weight, the others before it.
    return RMSNorm(dim, spec.norm_eps, factory, round_last=spec.post_norm, split=split)


class SelfAttention(Module):
    def __init__(self, spec: DecoderSpec, layer: int, factory: Factory) -> None:
        own = spec.layers[layer]
        self._layer = layer
        self._head_dim = spec.dims.head_dim
        self._heads = spec.dims.num_heads
        self._widths = (
            spec.dims.num_heads * spec.dims.head_dim,
            spec.dims.num_kv_heads * spec.dims.head_dim,
        )
        query_width, kv_width = self._widths
        self.qkv_proj = Linear(
            spec.dims.hidden_size,
            {"q_proj": query_width, "k_proj": kv_width, "v_proj": kv_width},
            factory,
            bias=own.qkv_bias,
            split="out",
        )
        self.o_proj = Linear(
            query_width,
            {"o_proj": spec.dims.hidden_size},
            factory,
            bias=own.output_bias,
            split="in",
        )
        self._norm_heads = own.qk_norm == "head"
        if own.qk_norm != "none":
            dims = (spec.dims.head_dim,) * 2 if self._norm_heads else self._widths
            split = not self._norm_heads
            self.q_norm = _norm(dims[0], spec, factory, split=split)
            self.k_norm = _norm(dims[1], spec, factory, split=split)
        self._has_norm = own.qk_norm != "none"

        self._fused = factory.fused
        self._parallel = factory.parallel

    def __call__(
        self,
        x: torch.Tensor,
        cos_sin: CosSin | None,
        attend: Attend,
        *,
        norm: RMSNorm | None = None,
        add_to: torch.Tensor | None = None,
    ) -> torch.Tensor:
        qkv = self.qkv_proj(x, norm=norm)
        if self._fused and cos_sin is not None:
            attended = self._attend_fused(qkv, cos_sin, attend)
        else:
            attended = self._attend(qkv, cos_sin, attend)
        return self._parallel.sum(self.o_proj(attended.view(x.shape[0], -1), add_to=add_to))

    def _attend_fused(self, qkv: torch.Tensor, cos_sin: CosSin, attend: Attend) -> torch.Tensor:
        """Norm of heads, rotation and the write of keys and values in one kernel."""
        if self._has_norm and not self._norm_heads:
            qkv = self._normed(qkv)
        weights = None
        if self._norm_heads:
            weights = (self.q_norm.weight, self.k_norm.weight, self.q_norm.eps)
        query, _ = attend.write_rotated(self._layer, qkv, self._heads, cos_sin, weights)
        return attend.forward(self._layer, query)

    def _attend(self, qkv: torch.Tensor, cos_sin: CosSin | None, attend: Attend) -> torch.Tensor:
        if self._has_norm:
            qkv = self._normed(qkv)
        # [rows, heads + 2 * kv_heads, head_dim], rotated all at once; values stand still.
        qkv = qkv.view(qkv.shape[0], -1, self._head_dim)
        if cos_sin is not None:
            qkv = rotate(qkv, *cos_sin)
        return attend(self._layer, qkv[:, : self._heads], qkv[:, self._heads :])

    def _normed(self, qkv: torch.Tensor) -> torch.Tensor:
        query_width, kv_width = self._widths
        query = qkv[:, :query_width]
        key = qkv[:, query_width : query_width + kv_width]
        rest = qkv[:, query_width + kv_width :]
        if self._norm_heads:
            query = query.reshape(len(qkv), -1, self._head_dim)
            key = key.reshape(len(qkv), -1, self._head_dim)
        query, key = self.q_norm(query), self.k_norm(key)
        return torch.cat((query.flatten(1), key.flatten(1), rest), dim=-1)


class MLP(Module):
    def __init__(self, spec: DecoderSpec, factory: Factory) -> None:
        width = spec.dims.intermediate_size
        self.gate_up_proj = Linear(
            spec.dims.hidden_size,
            {"gate_proj": width, "up_proj": width},
            factory,
            bias=spec.mlp_bias,
            split="out",
        )
        self.down_proj = Linear(
            width, {"down_proj": spec.dims.hidden_size}, factory, bias=spec.mlp_bias, split="in"
        )

        self._parallel = factory.parallel

    def __call__(
        self, x: torch.Tensor, *, norm: RMSNorm | None = None, add_to: torch.Tensor | None = None
    ) -> torch.Tensor:
        gate_up = self.gate_up_proj(x, norm=norm)
        return self._parallel.sum(self.down_proj.after_silu(gate_up, add_to=add_to))


def _attention(spec: DecoderSpec, layer: int, factory: Factory) -> SelfAttention | HiLSAttention:
    kind = SelfAttention if spec.layers[layer].hils is None else HiLSAttention
    return kind(spec, layer, factory)


class PreNormLayer(Module):
    def __init__(self, spec: DecoderSpec, layer: int, factory: Factory) -> None:
        self.input_layernorm = _norm(spec.dims.hidden_size, spec, factory)
        self.self_attn = _attention(spec, layer, factory)
        self.post_attention_layernorm = _norm(spec.dims.hidden_size, spec, factory)
        self.mlp = MLP(spec, factory)
        self._products_do_more = factory.products_do_more

    def __call__(
        self, added: torch.Tensor, stream: Stream, cos_sin: CosSin | None, attend: Attend
    ) -> tuple[torch.Tensor, Stream]:
        if stream is None and self._products_do_more(len(added)):
            x = self.self_attn(added, cos_sin, attend, norm=self.input_layernorm, add_to=added)
            return self.mlp(x, norm=self.post_attention_layernorm, add_to=x), None
        normed, stream = self.input_layernorm.add(added, stream)
        attended = self.self_attn(normed, cos_sin, attend)
        normed, stream = self.post_attention_layernorm.add(attended, stream)
        return self.mlp(normed), stream


class PostNormLayer(Module):
    def __init__(self, spec: DecoderSpec, layer: int, factory: Factory) -> None:
        self.self_attn = _attention(spec, layer, factory)
        self.post_attention_layernorm = _norm(spec.dims.hidden_size, spec, factory)
        self.mlp = MLP(spec, factory)
        self.post_feedforward_layernorm = _norm(spec.dims.hidden_size, spec, factory)

    def __call__(
        self, added: torch.Tensor, stream: Stream, cos_sin: CosSin | None, attend: Attend
    ) -> tuple[torch.Tensor, Stream]:
        x = added if stream is None else stream + added
        x = x + self.post_attention_layernorm(self.self_attn(x, cos_sin, attend))
        return self.post_feedforward_layernorm(self.mlp(x)), x


class Decoder(Module):
    def __init__(self, spec: DecoderSpec, factory: Factory) -> None:
        rows = spec.embedding_rows or spec.dims.vocab_size
        self.embed_tokens = Embedding(rows, spec.dims.hidden_size, factory)
        self._vocab_size = spec.dims.vocab_size
        self.lmk_embed: Parameter | None = None
        if spec.landmark_embedding:
            self.lmk_embed = Parameter((spec.dims.hidden_size,), factory)
        layer_class = PostNormLayer if spec.post_norm else PreNormLayer
        self.layers = [layer_class(spec, i, factory) for i in range(len(spec.layers))]
        self.norm = _norm(spec.dims.hidden_size, spec, factory)
        self._fused = factory.fused
        self._rotated, self._unrotated = (
            spec.dims.num_heads + spec.dims.num_kv_heads,
            spec.dims.num_kv_heads,
        )
        # Layers with the same rope share its cosines and sines.
        self._rope_of = [(layer.rope, layer.hils is not None) for layer in spec.layers]
        self._rotaries = {
            rope: Rotary(
                rope, spec.dims.head_dim, factory.dtype, factory.device, fused=factory.fused
            )
            for rope, _ in self._rope_of
            if rope is not None
        }

    def __call__(
        self,
        token_ids: torch.Tensor,
        positions: torch.Tensor,
        lengths: torch.Tensor,
        attend: Attend,
    ) -> torch.Tensor:
        # Each layer adds to the stream; the addition waits for the norm that follows it.
        added, stream = self._embed(token_ids), None
        cos_sin = self._cos_sin(positions, lengths)
        for layer, rope in zip(self.layers, self._rope_of, strict=True):
            added, stream = layer(added, stream, cos_sin[rope], attend)
        return self.norm.add(added, stream)[0]

    def with_layers(self, layers: Sequence[int]) -> Decoder:
        """The same decoder with these of its layers only."""
        short = copy(self)
        short.layers = [self.layers[layer] for layer in layers]
        short._rope_of = [self._rope_of[layer] for layer in layers]
        return short

    def _embed(self, token_ids: torch.Tensor) -> torch.Tensor:
        if self.lmk_embed is None:
            return self.embed_tokens(token_ids)
        landmark = token_ids == self._vocab_size
        x = self.embed_tokens(token_ids.masked_fill(landmark, 0))
        return torch.where(landmark[:, None], self.lmk_embed.weight, x)

    def _cos_sin(
        self, positions: torch.Tensor, lengths: torch.Tensor
    ) -> dict[tuple[RopeParameters | None, bool], CosSin | None]:
        """By rope and kind of layer: plain layers rotate queries, keys and values at once."""
        turns = {rope: rotary(positions, lengths) for rope, rotary in self._rotaries.items()}
        found: dict[tuple[RopeParameters | None, bool], CosSin | None] = {}
        for rope, hils in dict.fromkeys(self._rope_of):
            if rope is None:
                found[rope, hils] = None
            elif hils or self._fused:
                found[rope, hils] = turns[rope]
            else:
                found[rope, hils] = with_values_unrotated(
                    turns[rope], self._rotated, self._unrotated
                )
        return found


class CausalLM(Module):
    """Decoder and output head. Module names are the checkpoint's names."""

    def __init__(self, config: DecoderSpec, factory: Factory) -> None:
        self.config = config
        self._parallel = factory.parallel
        self.model = Decoder(config, factory)
        if not config.tie_embeddings:
            rows = config.head_rows or config.dims.vocab_size
            own = {"lm_head": -(-rows // factory.parallel.size)}
            self.lm_head = Linear(config.dims.hidden_size, own, factory, split="out", total=rows)

    @property
    def spec(self) -> ModelSpec:
        return self.config.for_engine()

    def excerpt(self, kind_of: Callable[[int], Hashable]) -> CausalLM:
        first: dict[Hashable, int] = {}
        for layer, own in enumerate(self.config.layers):
            first.setdefault((own, kind_of(layer)), layer)
        short = copy(self)
        short.model = self.model.with_layers(list(first.values()))
        return short

    def __call__(
        self,
        token_ids: torch.Tensor,
        positions: torch.Tensor,
        lengths: torch.Tensor,
        attend: Attend,
        logit_rows: torch.Tensor | None,
    ) -> torch.Tensor:
        hidden = self.model(token_ids, positions, lengths, attend)
        if logit_rows is not None:
            hidden = hidden[logit_rows]
        tied = self.config.tie_embeddings
        logits = self.model.embed_tokens.logits(hidden) if tied else self.lm_head(hidden)
        # Rows beyond the vocabulary, such as the landmark's, are no tokens.
        return self._parallel.concat(logits)[:, : self.config.dims.vocab_size]
