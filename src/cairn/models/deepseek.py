"""DeepSeek-V2 and V3: latent attention, and experts of which every row also passes shared ones."""

from __future__ import annotations

import re
from dataclasses import replace
from functools import partial

from cairn.errors import ConfigError
from cairn.kernels.interface import Routing
from cairn.models.config_reader import ConfigReader
from cairn.models.decoder import MLP, CausalLM, FeedForward
from cairn.models.experts import ExpertFeedForward
from cairn.models.fields import FULL, MOST_EXPERTS, MOST_WIDTH, read_decoder, read_dimensions
from cairn.models.latent_attention import LatentAttention, LatentDims
from cairn.models.layers import Factory
from cairn.models.spec import DecoderSpec


class DeepseekLM(CausalLM):
    def ignores(self, name: str) -> bool:
        # Layers behind the last one predict further tokens; they are not used.
        layer = re.match(r"model\.layers\.(\d+)\.", name)
        return super().ignores(name) or bool(layer and int(layer[1]) >= len(self.spec.layers))


def build_v2(config: ConfigReader, factory: Factory) -> CausalLM:
    config.require("scoring_func", ("softmax",), "softmax")
    config.require("norm_topk_prob", (False,), False)
    config.require("topk_method", ("greedy", "group_limited_greedy"), "greedy")
    grouped = config.peek("topk_method") == "group_limited_greedy"
    return _build(config, factory, _read_routing(config, grouped))


def build_v3(config: ConfigReader, factory: Factory) -> CausalLM:
    config.require("scoring_func", ("sigmoid",), "sigmoid")
    config.require("topk_method", ("noaux_tc",), "noaux_tc")
    routing = replace(
        _read_routing(config, grouped=True),
        scoring="sigmoid",
        normalize=config.take("norm_topk_prob", bool, True),
        has_bias=True,
    )
    return _build(config, factory, routing)


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


def _build(config: ConfigReader, factory: Factory, routing: Routing) -> CausalLM:
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

    attention = partial(LatentAttention, dims=latent)
    model = DeepseekLM(spec, factory, attention=attention, feed_forward=feed_forward)
    rope = spec.layers[0].rope
    assert rope is not None
    own = latent.attention(model.spec.layers[0].num_heads, rope)
    model.spec = replace(model.spec, layers=(own,) * dims.num_layers)
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
