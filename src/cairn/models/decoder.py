"""A decoder-only transformer over a paged KV cache, made from its spec.

All rows of a step, of any number of sequences, go through as one flat batch [rows, hidden]. Only
attention knows which row belongs to which sequence. A model chooses the attention and the
feed-forward of every layer; those here are the usual ones.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Hashable, Iterable, Iterator, Mapping
from copy import copy
from functools import partial

import torch

from cairn.attention.attend import Attend
from cairn.errors import LoadError
from cairn.kernels.cpu import HEAD_DIMS, Replays
from cairn.models.interface import LanguageModel
from cairn.models.layers import Embedding, Linear, Parameter, RMSNorm
from cairn.models.module import Factory, Module, TensorSlot
from cairn.models.rope import CosSin, Rotary, Rotation, rotate
from cairn.models.spec import DecoderSpec
from cairn.models.split import rank_spec

Stream = torch.Tensor | None
"""The residual stream without the last addition; None where there is none yet."""

CUT_ROWS = 32
"""Rows of the smallest step whose last layer computes only the rows that are asked for."""
_REPLAYED_ROWS = 8
"""Rows of the largest step that is recorded on a CPU. With more rows the kernels take much longer
than Python between them, and each number of rows keeps memory of its own."""


class Attention(Module):
    """Attention of one layer, its projections included."""

    rotation: Rotation | None = None
    """The angles that a call gets as `cos_sin`. Layers that ask for the same share them."""
    cache_scales: Mapping[str, float] = {}
    """Scales of cached keys ("k") and values ("v") that the checkpoint gives."""

    def __call__(self, x: torch.Tensor, cos_sin: CosSin | None, attend: Attend) -> torch.Tensor:
        """x [rows, hidden] -> [rows, hidden], the sum over all ranks; or in parts, see
        `Linear.in_parts`, if a norm with addition follows"""
        raise NotImplementedError

    def add_normed(
        self, x: torch.Tensor, norm: RMSNorm, cos_sin: CosSin | None, attend: Attend
    ) -> torch.Tensor:
        """x + self(norm(x)), which may be stored in x."""
        return x + self(norm(x), cos_sin, attend)


class FeedForward(Module):
    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """x [rows, hidden] -> [rows, hidden], the sum over all ranks; or in parts like attention"""
        raise NotImplementedError

    def add_normed(self, x: torch.Tensor, norm: RMSNorm) -> torch.Tensor:
        """x + self(norm(x)), which may be stored in x."""
        return x + self(norm(x))


MakeAttention = Callable[[DecoderSpec, int, Factory], Attention]
MakeFeedForward = Callable[[DecoderSpec, int, Factory], FeedForward]
"""(spec, layer, factory). The spec is a rank's: its heads and its share of the width."""


def _norm(dim: int, spec: DecoderSpec, factory: Factory) -> RMSNorm:
    # OLMo rounds after the weight, the others before it.
    return RMSNorm(dim, spec.norm_eps, factory, round_last=spec.post_norm)


class SelfAttention(Attention):
    """Heads of queries, keys and values, with or without norms and rope."""

    def __init__(
        self,
        spec: DecoderSpec,
        layer: int,
        factory: Factory,
        *,
        more_parts: Mapping[str, int] | None = None,
        whole: Collection[str] = (),
        norm_eps: float | None = None,
    ) -> None:
        """`more_parts` are projected together with queries, keys and values; see Linear. With
        `norm_eps` the norms of heads have an epsilon of their own, and round after the weight."""
        own, dims = spec.layers[layer], spec.dims
        self._layer, self._heads, self._head_dim = layer, dims.num_heads, dims.head_dim
        self._adds_later = not spec.post_norm
        self.cache_scales = {}
        width, kv_width = dims.num_heads * dims.head_dim, dims.num_kv_heads * dims.head_dim
        parts = {"q_proj": width, "k_proj": kv_width, "v_proj": kv_width, **(more_parts or {})}
        self._widths = list(parts.values())
        self.qkv_proj = Linear(
            dims.hidden_size, parts, factory, bias=own.qkv_bias, split="out", whole=whole
        )
        self.o_proj = Linear(
            width, {"o_proj": dims.hidden_size}, factory, bias=own.output_bias, split="in"
        )
        self._qk_norm = own.qk_norm
        if own.qk_norm != "none":
            eps = spec.norm_eps if norm_eps is None else norm_eps
            round_last = spec.post_norm or norm_eps is not None
            split = own.qk_norm == "layer"
            q_dim, k_dim = (width, kv_width) if split else (dims.head_dim, dims.head_dim)
            self.q_norm = RMSNorm(q_dim, eps, factory, round_last=round_last, split=split)
            self.k_norm = RMSNorm(k_dim, eps, factory, round_last=round_last, split=split)
        self._cpu = factory.cpu if dims.head_dim in HEAD_DIMS else None
        self._fused = factory.fused or self._cpu is not None
        self._parallel = factory.parallel
        if own.rope is not None:
            # Kernels rotate by head. In torch one product rotates queries, keys and values at once.
            together = (dims.num_heads + dims.num_kv_heads, dims.num_kv_heads)
            heads = None if self._fused else together
            self.rotation = Rotation(own.rope, dims.head_dim, heads)

    def joint_slots(self, name: str) -> Iterator[tuple[str, TensorSlot, tuple[str, ...]]]:
        """Scales of cached keys and values, under either of the names that checkpoints use."""
        for kind in "kv":
            slot = TensorSlot((), partial(self._keep_scale, kind))
            for path in (f"{name}.{kind}_scale", f"{name}.{kind}_proj.{kind}_scale"):
                yield path, slot, ()

    def _keep_scale(self, kind: str, scale: torch.Tensor) -> None:
        value = float(scale)
        if not 0 < value < math.inf:
            raise LoadError(f"{kind}_scale of layer {self._layer} is {value}; it must be positive")
        self.cache_scales = {**self.cache_scales, kind: value}

    def __call__(self, x: torch.Tensor, cos_sin: CosSin | None, attend: Attend) -> torch.Tensor:
        return self._output(self.qkv_proj(x), cos_sin, attend)

    def add_normed(
        self, x: torch.Tensor, norm: RMSNorm, cos_sin: CosSin | None, attend: Attend
    ) -> torch.Tensor:
        return self._output(self.qkv_proj(x, norm=norm), cos_sin, attend, add_to=x)

    def _output(
        self,
        qkv: torch.Tensor,
        cos_sin: CosSin | None,
        attend: Attend,
        add_to: torch.Tensor | None = None,
    ) -> torch.Tensor:
        if self._fused and cos_sin is not None:
            attended = self._attend_fused(qkv, cos_sin, attend)
        else:
            attended = self._attend(qkv, cos_sin, attend)
        flat = attended.reshape(len(qkv), -1)
        if add_to is None and self._adds_later:
            return self._parallel.sum(self.o_proj.in_parts(flat))
        return self._parallel.sum(self.o_proj(flat, add_to=add_to))

    def _attend_fused(self, qkv: torch.Tensor, cos_sin: CosSin, attend: Attend) -> torch.Tensor:
        """Norm of heads, rotation and the write of keys and values in one kernel."""
        weights = None
        if self._qk_norm == "layer":
            qkv = self._normed(qkv)
        elif self._qk_norm == "head":
            weights = (self.q_norm.weight, self.k_norm.weight, self.q_norm.eps)
        query, _ = attend.write_rotated(
            self._layer, qkv, self._heads, cos_sin, weights, cpu=self._cpu
        )
        return attend.forward(self._layer, query)

    def _attend(self, qkv: torch.Tensor, cos_sin: CosSin | None, attend: Attend) -> torch.Tensor:
        if self._qk_norm != "none":
            qkv = self._normed(qkv)
        # [rows, heads + 2 * kv_heads, head_dim]; the angles leave values as they are.
        qkv = qkv.view(len(qkv), -1, self._head_dim)
        if cos_sin is not None:
            qkv = rotate(qkv, *cos_sin)
        return attend(self._layer, qkv[:, : self._heads], qkv[:, self._heads :])

    def _normed(self, qkv: torch.Tensor) -> torch.Tensor:
        query, key, value = torch.split(qkv, self._widths, dim=-1)
        if self._qk_norm == "head":
            query, key = (x.reshape(len(x), -1, self._head_dim) for x in (query, key))
        query, key = self.q_norm(query), self.k_norm(key)
        return torch.cat((query.flatten(1), key.flatten(1), value), dim=-1)


class MLP(FeedForward):
    """down(silu(gate(x)) * up(x))"""

    def __init__(
        self, spec: DecoderSpec, layer: int, factory: Factory, *, width: int | None = None
    ) -> None:
        """`width` is this rank's, by default the spec's."""
        hidden, width = spec.dims.hidden_size, width or spec.dims.intermediate_size
        bias = spec.mlp_bias
        gate_up = {"gate_proj": width, "up_proj": width}
        self.gate_up_proj = Linear(hidden, gate_up, factory, bias=bias, split="out")
        self.down_proj = Linear(width, {"down_proj": hidden}, factory, bias=bias, split="in")
        self._adds_later = not spec.post_norm
        self._parallel = factory.parallel

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        gate_up = self.gate_up_proj(x)
        return self._parallel.sum(self.down_proj.after_silu(gate_up, in_parts=self._adds_later))

    def own_part(self, x: torch.Tensor, *, add_to: torch.Tensor | None = None) -> torch.Tensor:
        """What this rank adds to the result, or to `add_to`."""
        return self.down_proj.after_silu(self.gate_up_proj(x), add_to=add_to)

    def add_normed(self, x: torch.Tensor, norm: RMSNorm) -> torch.Tensor:
        gated = self.gate_up_proj.gated(x, norm)
        if gated is not None:
            return self.down_proj(gated, add_to=x)
        gate_up = self.gate_up_proj(x, norm=norm)
        return self._parallel.sum(self.down_proj.after_silu(gate_up, add_to=x))


class PreNormLayer(Module):
    """Calls take and return the residual stream as stream + added. The norm that follows does the
    addition. With `wanted` [n] they return these rows only."""

    def __init__(
        self, spec: DecoderSpec, attention: Attention, feed_forward: FeedForward, factory: Factory
    ) -> None:
        self.input_layernorm = _norm(spec.dims.hidden_size, spec, factory)
        self.self_attn = attention
        self.post_attention_layernorm = _norm(spec.dims.hidden_size, spec, factory)
        self.mlp = feed_forward
        self._fuses_norms = factory.fuses_norms

    def __call__(
        self,
        added: torch.Tensor,
        stream: Stream,
        cos_sin: CosSin | None,
        attend: Attend,
        wanted: torch.Tensor | None = None,
    ) -> tuple[torch.Tensor, Stream]:
        if stream is None and self._fuses_norms(len(added)):
            x = self.self_attn.add_normed(added, self.input_layernorm, cos_sin, attend)
            x = x if wanted is None else x[wanted]
            return self.mlp.add_normed(x, self.post_attention_layernorm), None
        normed, stream = self.input_layernorm.add(added, stream)
        attended = self.self_attn(normed, cos_sin, attend)
        if wanted is not None:
            attended, stream = attended[..., wanted, :], stream[wanted]
        normed, stream = self.post_attention_layernorm.add(attended, stream)
        return self.mlp(normed), stream

    def store(
        self, added: torch.Tensor, stream: Stream, cos_sin: CosSin | None, attend: Attend
    ) -> None:
        """Only keep what later steps read of these rows."""
        self.self_attn(self.input_layernorm.add(added, stream)[0], cos_sin, attend)


class PostNormLayer(Module):
    """The same with norms after attention and feed-forward, as OLMo has them."""

    def __init__(
        self, spec: DecoderSpec, attention: Attention, feed_forward: FeedForward, factory: Factory
    ) -> None:
        self.self_attn = attention
        self.post_attention_layernorm = _norm(spec.dims.hidden_size, spec, factory)
        self.mlp = feed_forward
        self.post_feedforward_layernorm = _norm(spec.dims.hidden_size, spec, factory)

    def __call__(
        self,
        added: torch.Tensor,
        stream: Stream,
        cos_sin: CosSin | None,
        attend: Attend,
        wanted: torch.Tensor | None = None,
    ) -> tuple[torch.Tensor, Stream]:
        x = added if stream is None else stream + added
        attended = self.self_attn(x, cos_sin, attend)
        if wanted is not None:
            attended, x = attended[wanted], x[wanted]
        x = x + self.post_attention_layernorm(attended)
        return self.post_feedforward_layernorm(self.mlp(x)), x

    def store(
        self, added: torch.Tensor, stream: Stream, cos_sin: CosSin | None, attend: Attend
    ) -> None:
        """Only keep what later steps read of these rows."""
        self.self_attn(added if stream is None else stream + added, cos_sin, attend)


class Decoder(Module):
    """Embedding, layers and the last norm."""

    def __init__(
        self,
        spec: DecoderSpec,
        factory: Factory,
        attention: MakeAttention,
        feed_forward: MakeFeedForward,
    ) -> None:
        rows = spec.embedding_rows or spec.dims.vocab_size
        self.embed_tokens = Embedding(rows, spec.dims.hidden_size, factory)
        self._vocab_size = spec.dims.vocab_size
        self.lmk_embed: Parameter | None = None
        if spec.landmark_embedding:
            self.lmk_embed = Parameter((spec.dims.hidden_size,), factory)
        layer_class = PostNormLayer if spec.post_norm else PreNormLayer
        self.layers = [
            layer_class(spec, attention(spec, i, factory), feed_forward(spec, i, factory), factory)
            for i in range(len(spec.layers))
        ]
        self.norm = _norm(spec.dims.hidden_size, spec, factory)
        wanted = {layer.self_attn.rotation for layer in self.layers}
        self._rotaries = {
            rotation: Rotary(rotation, factory.dtype, factory.device, fused=factory.fused)
            for rotation in wanted
            if rotation is not None
        }
        self._replays: Replays | None = None
        # Layers whose kernels also add return no separate stream.
        if factory.cpu is not None and factory.fuses_norms(1) and not spec.post_norm:
            self._replays = Replays(factory.cpu)

    def excerpt(self, layers: list[PreNormLayer | PostNormLayer]) -> Decoder:
        """The same decoder with these layers of it."""
        short = copy(self)
        short.layers, short._replays = layers, None
        return short

    def __call__(
        self,
        token_ids: torch.Tensor,
        positions: torch.Tensor,
        lengths: torch.Tensor,
        attend: Attend,
        wanted: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Hidden states of all rows, or of the rows `wanted` [n]."""
        added = self._embed(token_ids)
        angles: dict[Rotation | None, CosSin] = {
            rotation: rotary(positions, lengths) for rotation, rotary in self._rotaries.items()
        }
        found = None
        if self._replays is not None and len(added) <= _REPLAYED_ROWS:
            found = attend.replayable()
        if found is None or self._replays is None:
            if wanted is None or len(added) < max(CUT_ROWS, 4 * len(wanted)):
                hidden = self.norm.add(*self._through_layers(added, angles, attend))[0]
                return hidden if wanted is None else hidden[wanted]
            added, stream = self._through_layers(added, angles, attend, wanted)
            return self.norm.add(added, stream)[0] if len(wanted) else added
        step, kernels_attend = found
        inputs = [added, *(part for own in angles.values() for part in own), *step.inputs]
        # No separate stream comes back, since kernels add to it.
        through = self._replays(
            lambda: self._through_layers(added, angles, kernels_attend)[0], inputs
        )
        step.finish()
        hidden = self.norm.add(through, None)[0]
        return hidden if wanted is None else hidden[wanted]

    def _through_layers(
        self,
        added: torch.Tensor,
        angles: Mapping[Rotation | None, CosSin],
        attend: Attend,
        wanted: torch.Tensor | None = None,
    ) -> tuple[torch.Tensor, Stream]:
        """With `wanted`, the last layer stores keys and values of all rows, but returns these."""
        stream = None
        *layers, last = ((layer, angles.get(layer.self_attn.rotation)) for layer in self.layers)
        for layer, cos_sin in layers:
            added, stream = layer(added, stream, cos_sin, attend)
        layer, cos_sin = last
        if wanted is None:
            return layer(added, stream, cos_sin, attend)
        wanted = wanted.long()
        attend = attend.only(wanted)
        if len(wanted):
            return layer(added, stream, cos_sin, attend, wanted)
        layer.store(added, stream, cos_sin, attend)
        return added[:0], None

    def _embed(self, token_ids: torch.Tensor) -> torch.Tensor:
        if self.lmk_embed is None:
            return self.embed_tokens(token_ids)
        landmark = token_ids == self._vocab_size
        x = self.embed_tokens(token_ids.masked_fill(landmark, 0))
        return torch.where(landmark[:, None], self.lmk_embed.weight, x)


class CausalLM(LanguageModel):
    """Decoder and output head."""

    gives_hidden = True

    def __init__(
        self,
        spec: DecoderSpec,
        factory: Factory,
        *,
        attention: MakeAttention = SelfAttention,
        feed_forward: MakeFeedForward = MLP,
    ) -> None:
        """`spec` describes the whole model, of which a rank makes its part."""
        spec = rank_spec(spec, factory.parallel.size)
        self.spec = spec.for_engine()
        self._layer_specs = spec.layers
        self._parallel = factory.parallel
        self.model = Decoder(spec, factory, attention, feed_forward)
        self.lm_head: Linear | None = None
        if spec.tie_embeddings:
            self.tied = {"lm_head.weight": self.model.embed_tokens}
        else:
            rows = spec.head_rows or spec.dims.vocab_size
            own = {"lm_head": -(-rows // factory.parallel.size)}
            self.lm_head = Linear(spec.dims.hidden_size, own, factory, split="out", total=rows)

    @property
    def cache_scales(self) -> dict[int, tuple[float, float]]:
        found = {}
        for i, layer in enumerate(self.model.layers):
            if given := layer.self_attn.cache_scales:
                found[i] = given.get("k", 0.0), given.get("v", 0.0)
        return found

    def excerpt(self, kind_of: Callable[[int], Hashable]) -> CausalLM:
        first: dict[Hashable, PreNormLayer | PostNormLayer] = {}
        for i, layer in enumerate(self.model.layers):
            forms = tuple(getattr(module, "form", None) for _, module in layer.named_modules())
            kind = self._layer_specs[i], type(layer.self_attn), type(layer.mlp), kind_of(i), forms
            first.setdefault(kind, layer)
        first[kind] = first.pop(kind)  # the last layer may compute fewer rows than the others
        short = copy(self)
        short.model = self.model.excerpt(list(first.values()))
        return short

    def __call__(
        self,
        token_ids: torch.Tensor,
        positions: torch.Tensor,
        lengths: torch.Tensor,
        attend: Attend,
        logit_rows: torch.Tensor | None,
    ) -> torch.Tensor:
        return self.head(self.model(token_ids, positions, lengths, attend, logit_rows))

    def hidden(
        self,
        token_ids: torch.Tensor,
        positions: torch.Tensor,
        lengths: torch.Tensor,
        attend: Attend,
    ) -> torch.Tensor:
        return self.model(token_ids, positions, lengths, attend)

    def head(self, hidden: torch.Tensor) -> torch.Tensor:
        head = self.model.embed_tokens.logits if self.lm_head is None else self.lm_head
        # Rows beyond the vocabulary, such as the landmark's, are no tokens.
        return self._parallel.concat(head(hidden))[:, : self.spec.vocab_size]

    def rehearse_head(self, row_counts: Iterable[int]) -> None:
        matrix = self.model.embed_tokens if self.lm_head is None else self.lm_head
        norm = self.model.norm.weight
        if matrix.form is not None:
            for rows in row_counts:
                self.head(norm.new_zeros(rows, len(norm)))
