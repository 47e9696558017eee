"""DeepSeek-V2, V3 and V3.2, and GLM-MoE-DSA: latent attention, and experts of which every row also
passes shared ones. In V3.2 and GLM an index selects the rows that a query reads."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import replace
from functools import partial

from cairn.errors import ConfigError
from cairn.kernels.interface import Routing
from cairn.models.config_reader import ConfigReader
from cairn.models.decoder import MLP, CausalLM, FeedForward
from cairn.models.experts import ExpertFeedForward
from cairn.models.fields import (
    FULL,
    MOST_EXPERTS,
    MOST_HEAD_DIM,
    MOST_HEADS,
    MOST_WIDTH,
    read_decoder,
    read_dimensions,
    read_num_layers,
)
from cairn.models.indexer import IndexDims
from cairn.models.latent_attention import LatentAttention, LatentDims
from cairn.models.module import Factory
from cairn.models.spec import DecoderSpec


class DeepseekLM(CausalLM):
    def ignores(self, name: str) -> bool:
        # Layers behind the last one predict further tokens; they are not used. Layers that share
        # a selection may come with an index that nobody uses.
        layer = re.match(r"model\.layers\.(\d+)\.(self_attn\.indexer\.)?", name)
        if layer is None:
            return super().ignores(name)
        return int(layer[1]) >= len(self.spec.layers) or layer[2] is not None


def build_v2(config: ConfigReader, factory: Factory) -> CausalLM:
    config.require("scoring_func", ("softmax",), "softmax")
    config.require("norm_topk_prob", (False,), False)
    config.require("topk_method", ("greedy", "group_limited_greedy"), "greedy")
    grouped = config.peek("topk_method") == "group_limited_greedy"
    return _build(config, factory, _read_routing(config, grouped))


def build_v3(config: ConfigReader, factory: Factory) -> CausalLM:
    return _build(config, factory, _read_v3_routing(config))


def build_v32(config: ConfigReader, factory: Factory) -> CausalLM:
    return _build(config, factory, _read_v3_routing(config), _read_index(config))


def build_glm(config: ConfigReader, factory: Factory) -> CausalLM:
    full = _read_full_layers(config, read_num_layers(config))
    index = _read_index(config, full, interleaved=True)
    return _build(config, factory, _read_v3_routing(config), index)


def _read_v3_routing(config: ConfigReader) -> Routing:
    config.require("scoring_func", ("sigmoid",), "sigmoid")
    config.require("topk_method", ("noaux_tc",), "noaux_tc")
    return replace(
        _read_routing(config, grouped=True),
        scoring="sigmoid",
        normalize=config.take("norm_topk_prob", bool, True),
        has_bias=True,
    )


def _read_index(
    config: ConfigReader, full: Sequence[bool] | None = None, *, interleaved: bool = False
) -> IndexDims:
    """`interleaved` is what the architecture takes where the config says nothing."""
    config.require("rope_interleave", (True,), True)  # of the latent rows; the index has its own
    if config.peek("q_lora_rank") is None:
        raise ConfigError(f"{config.source}: q_lora_rank is missing, and the index needs it")
    rope, width = (
        config.take_positive(name, default, most=MOST_HEAD_DIM)
        for name, default in (("qk_rope_head_dim", 64), ("index_head_dim", 128))
    )
    if width < rope:
        raise ConfigError(
            f"{config.source}: index_head_dim is {width}; it must be at least qk_rope_head_dim, "
            f"which is {rope}"
        )
    return IndexDims(
        heads=config.take_positive("index_n_heads", most=MOST_HEADS),
        width=width,
        rope=rope,
        topk=config.take_positive("index_topk"),
        interleaved=config.take("indexer_rope_interleave", bool, interleaved),
        full=tuple(full or [True] * read_num_layers(config)),
    )


def _read_full_layers(config: ConfigReader, num_layers: int) -> list[bool]:
    """Whether each layer has an index of its own, or reads what the one before it selected."""
    offset = config.take("index_skip_topk_offset", int, 2)
    freq = config.take_positive("index_topk_freq", 1)
    types = config.take_optional("indexer_types", list)
    pattern = config.take_optional("index_topk_pattern", str)
    full = [max(layer - offset + 1, 0) % freq == 0 for layer in range(num_layers)]
    if types is not None:
        if len(types) != num_layers or any(kind not in ("full", "shared") for kind in types):
            raise config.unsupported(
                "indexer_types", types, f"it names full or shared for each of {num_layers} layers"
            )
        full = [kind == "full" for kind in types]
    elif pattern is not None:
        if not set(pattern) <= {"F", "S"}:
            raise config.unsupported("index_topk_pattern", pattern, "it has F or S for a layer")
        full = [kind == "F" for kind in pattern.ljust(num_layers, "F")[:num_layers]]
    if not full[0]:
        raise ConfigError(f"{config.source}: layer 0 shares a selection, and none is before it")
    return full


def _read_routing(config: ConfigReader, grouped: bool) -> Routing:
    groups, kept = (config.take(name, int, 1) for name in ("n_group", "topk_group"))
    routing = Routing(
        experts=config.take_positive("n_routed_experts", most=MOST_EXPERTS),
        per_token=config.take_positive("num_experts_per_tok"),
        groups=groups if grouped else 1,
        kept_groups=kept if grouped else 1,
        scale=config.take("routed_scaling_factor", float, 1.0),
    )
    if routing.groups < 1 or routing.experts % routing.groups:
        raise ConfigError(
            f"{config.source}: n_group is {routing.groups} and n_routed_experts {routing.experts}; "
            "groups are equal"
        )
    at_hand = min(routing.kept_groups, routing.groups) * (routing.experts // routing.groups)
    if routing.per_token > at_hand:
        raise ConfigError(
            f"{config.source}: num_experts_per_tok is {routing.per_token}, and topk_group "
            f"{routing.kept_groups} leaves {at_hand} experts to choose from"
        )
    return routing


def _build(
    config: ConfigReader, factory: Factory, routing: Routing, index: IndexDims | None = None
) -> CausalLM:
    latent = LatentDims.read(config)
    dims = read_dimensions(config, default_head_dim=latent.rope)
    for name in ("attention_bias", "mlp_bias"):
        config.require(name, (False,), False)
    config.require("moe_layer_freq", (1,), 1)
    config.take_optional("num_nextn_predict_layers", int)  # see DeepseekLM.ignores
    inter = config.take_positive("moe_intermediate_size", most=MOST_WIDTH)
    shared = 0
    if config.take_optional("n_shared_experts", int):
        shared = inter * config.take_positive("n_shared_experts", most=MOST_EXPERTS)
    sparse = _read_sparse_layers(config, dims.num_layers)
    spec = read_decoder(config, dims, [FULL] * dims.num_layers)

    def feed_forward(spec: DecoderSpec, layer: int, factory: Factory) -> FeedForward:
        if not sparse[layer]:
            return MLP(spec, layer, factory)
        return ExpertFeedForward(
            spec, layer, factory, routing, inter=inter, shared=shared, wide_router=True
        )

    attention = partial(LatentAttention, dims=latent, index=index)
    model = DeepseekLM(spec, factory, attention=attention, feed_forward=feed_forward)
    rope = spec.layers[0].rope
    assert rope is not None
    heads = model.spec.layers[0].num_heads
    full = [False] * dims.num_layers if index is None else index.full
    width = 0 if index is None else index.width
    layers = tuple(latent.attention(heads, rope, width if own else 0) for own in full)
    topk = None if index is None else index.topk
    model.spec = replace(model.spec, layers=layers, index_topk=topk)
    return model


def _read_sparse_layers(config: ConfigReader, num_layers: int) -> list[bool]:
    """Whether each layer has experts."""
    first = config.take("first_k_dense_replace", int, 0)
    types = config.take_optional("mlp_layer_types", list)
    if types is None:
        return [layer >= first for layer in range(num_layers)]
    if len(types) != num_layers or any(kind not in ("dense", "sparse") for kind in types):
        raise config.unsupported(
            "mlp_layer_types", types, f"it names dense or sparse for each of {num_layers} layers"
        )
    return [kind == "sparse" for kind in types]
