"""Multi-head latent attention (MLA): the cache has one latent row per token, for all heads."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial

import torch

from cairn.attention.attend import Attend
from cairn.attention.latent import LatentHeads
from cairn.kernels.interface import Normed
from cairn.memory.layout import INDEX, LATENT, CacheLayout
from cairn.models.config_reader import ConfigReader
from cairn.models.decoder import Attention
from cairn.models.fields import MOST_HEAD_DIM, MOST_WIDTH
from cairn.models.indexer import IndexDims, Indexer
from cairn.models.layers import Linear, RMSNorm
from cairn.models.module import Factory, Module, TensorSlot
from cairn.models.rope import (
    CosSin,
    RopeParameters,
    Rotation,
    rotate,
    rotation_order,
    yarn_magnitude,
)
from cairn.models.spec import AttentionSpec, DecoderSpec

_INDEX_KEY = "indexer.wk"  # projected together with latents


@dataclass(frozen=True, slots=True)
class LatentDims:
    nope: int  # of a query head, not rotated
    rope: int  # of a query head, rotated; shared by all heads in the cache
    value: int
    latent: int
    query_latent: int | None  # None: queries are projected directly
    interleaved: bool
    """Dimensions 2j and 2j + 1 form a pair of the rotation, not j and j + rope / 2."""

    @classmethod
    def read(cls, config: ConfigReader) -> LatentDims:
        for name in ("head_dim", "qk_head_dim"):
            config.take_optional(name, int)  # follow from the sizes below
        rope = config.take_positive("qk_rope_head_dim", 64, most=MOST_HEAD_DIM)
        if rope % 2:
            raise config.unsupported("qk_rope_head_dim", rope, "rotation needs an even number")
        query_latent = None
        if config.take_optional("q_lora_rank", int) is not None:
            query_latent = config.take_positive("q_lora_rank", most=MOST_WIDTH)
        return cls(
            nope=config.take_positive("qk_nope_head_dim", 128, most=MOST_HEAD_DIM),
            rope=rope,
            value=config.take_positive("v_head_dim", 128, most=MOST_HEAD_DIM),
            latent=config.take_positive("kv_lora_rank", 512, most=MOST_WIDTH),
            query_latent=query_latent,
            interleaved=config.take("rope_interleave", bool, True),
        )

    @property
    def query(self) -> int:
        return self.nope + self.rope

    @property
    def kept(self) -> int:
        """Size of a row in the cache."""
        return self.latent + self.rope

    def scale(self, rope: RopeParameters) -> float:
        scale: float = self.query**-0.5
        if rope.kind == "yarn" and rope.mscale_all_dim:
            scale *= yarn_magnitude(rope, rope.mscale_all_dim) ** 2
        return scale

    def attention(
        self, num_heads: int, rope: RopeParameters, index_width: int = 0
    ) -> AttentionSpec:
        """For the engine: one kv head as wide as a latent row, of which heads read a part."""
        return AttentionSpec(
            num_heads,
            num_kv_heads=1,
            head_dim=self.kept,
            scale=self.scale(rope),
            cache=CacheLayout.of_latents(self.kept, index_width),
            value_dim=self.latent,
        )

    def order(self, first: int, count: int) -> torch.Tensor:
        """The checkpoint's row for each row of a projection to `count` heads, in which `first`
        rows come before those that are rotated."""
        rotated = rotation_order(self.rope, interleaved=self.interleaved)
        head = torch.cat((torch.arange(first), first + rotated))
        return (torch.arange(count)[:, None] * len(head) + head).flatten()


class LatentProjection(Module):
    """Keys and values of this rank's heads from a latent row. Kept in float: it is multiplied with
    queries and with what heads read."""

    def __init__(self, heads: int, dims: LatentDims, factory: Factory) -> None:
        self._parallel = factory.parallel
        self.key = factory.empty(heads, dims.nope, dims.latent)
        self.value = factory.empty(heads, dims.latent, dims.value)
        self.heads = LatentHeads(self.key, self.value)

    def slots(self, name: str) -> Iterator[tuple[str, TensorSlot]]:
        heads, nope, latent = self.key.shape
        rows = heads * (nope + self.value.shape[2])
        slot = TensorSlot((rows, latent), self._write)
        yield f"{name}.weight", slot.share(0, self._parallel)

    def _write(self, matrix: torch.Tensor) -> None:
        by_head = matrix.view(len(self.key), -1, matrix.shape[1])
        nope = self.key.shape[1]
        self.key.copy_(by_head[:, :nope])
        self.value.copy_(by_head[:, nope:].transpose(1, 2))


class LatentAttention(Attention):
    def __init__(
        self,
        spec: DecoderSpec,
        layer: int,
        factory: Factory,
        dims: LatentDims,
        index: IndexDims | None = None,
    ) -> None:
        hidden, heads = spec.dims.hidden_size, spec.dims.num_heads
        self._layer, self._heads, self._dims = layer, heads, dims
        kept = {"kv_a_proj_with_mqa": dims.kept}
        orders = {"kv_a_proj_with_mqa": dims.order(dims.latent, 1)}
        query_order = dims.order(dims.nope, heads)
        if dims.query_latent is None:
            first = heads * dims.query
            parts = {"q_proj": first, **kept}
            orders["q_proj"] = query_order
            self.q_b_proj = None
        else:
            first = dims.query_latent
            parts = {"q_a_proj": first, **kept}
            self.q_a_layernorm = RMSNorm(dims.query_latent, spec.norm_eps, factory)
            self.q_b_proj = Linear(
                dims.query_latent,
                {"q_b_proj": heads * dims.query},
                factory,
                split="out",
                orders={"q_b_proj": query_order},
            )
        self._cuts = (first, first + dims.latent, first + dims.kept)
        self.indexer: Indexer | None = None
        if index is not None and index.full[layer]:
            assert dims.query_latent is not None
            self.indexer = Indexer(hidden, dims.query_latent, index, factory)
            parts[_INDEX_KEY], orders[_INDEX_KEY] = index.width, index.order(1)
        # Latents are the same on every rank.
        self.a_proj = Linear(
            hidden,
            parts,
            factory,
            split="out",
            whole={"q_a_proj", "kv_a_proj_with_mqa", _INDEX_KEY},
            orders=orders,
        )
        self.kv_a_layernorm = RMSNorm(dims.latent, spec.norm_eps, factory)
        self.kv_b_proj = LatentProjection(heads, dims, factory)
        self.o_proj = Linear(heads * dims.value, {"o_proj": hidden}, factory, split="in")
        self._parallel, self._fused = factory.parallel, factory.fused
        rope = spec.layers[layer].rope
        assert rope is not None
        self.rotation = Rotation(rope, dims.rope)

    def __call__(self, x: torch.Tensor, cos_sin: CosSin | None, attend: Attend) -> torch.Tensor:
        read = self._read(x, cos_sin, attend)
        return self._parallel.sum(self.o_proj(read))

    def add_normed(
        self, x: torch.Tensor, norm: RMSNorm, cos_sin: CosSin | None, attend: Attend
    ) -> torch.Tensor:
        read = self._read(norm(x), cos_sin, attend)
        return self._parallel.sum(self.o_proj(read, add_to=x))

    def _read(self, x: torch.Tensor, cos_sin: CosSin | None, attend: Attend) -> torch.Tensor:
        """What all heads read, [rows, heads * value]"""
        assert cos_sin is not None
        dims, layer = self._dims, self._layer
        fused = self._fused and attend.rotates(layer)
        query, latent, key, index_key = self.a_proj(x).tensor_split(self._cuts, -1)
        index = None
        if self.q_b_proj is not None:
            query_latent = self.q_a_layernorm(query)
            query = self.q_b_proj(query_latent)
            if self.indexer is not None and attend.reads_index:
                store = partial(attend.rotate_and_store, layer, INDEX, 0, cos_sin)
                given = x, query_latent, index_key, cos_sin
                index = self.indexer(*given, store if fused else None)
        query, row = query.reshape(len(x), self._heads, dims.query), None
        if fused:
            query = query.contiguous()  # without `q_b_proj` it is a part of the product above
            norm = self.kv_a_layernorm
            stored = Normed(latent, norm.weight, norm.eps, key)
            attend.rotate_and_store(layer, LATENT, dims.nope, cos_sin, query, stored)
        else:
            nope, rotated = query.tensor_split((dims.nope,), -1)
            query = torch.cat((nope, rotate(rotated, *cos_sin)), -1)
            key = rotate(key[:, None], *cos_sin)[:, 0]
            row = torch.cat((self.kv_a_layernorm(latent), key), -1)
        read = attend.latent(layer, query, row, self.kv_b_proj.heads, index)
        return read.reshape(len(x), -1)
