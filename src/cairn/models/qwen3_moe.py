"""Qwen3-MoE: Qwen3 with a mixture of experts in some or all layers."""

from __future__ import annotations

from cairn.errors import ConfigError
from cairn.kernels.interface import Routing
from cairn.models.config_reader import ConfigReader
from cairn.models.decoder import MLP, CausalLM, FeedForward
from cairn.models.experts import ExpertFeedForward
from cairn.models.fields import FULL, MOST_EXPERTS, MOST_WIDTH, read_decoder, read_dimensions
from cairn.models.module import Factory
from cairn.models.spec import DecoderSpec


def build(config: ConfigReader, factory: Factory) -> CausalLM:
    dims = read_dimensions(config, default_head_dim=128)
    config.require("use_sliding_window", (False,), False)
    for name in ("sliding_window", "max_window_layers"):
        config.take_optional(name, int)  # without effect, since no layer has a window
    bias = config.take("attention_bias", bool, False)
    spec = read_decoder(
        config,
        dims,
        [FULL] * dims.num_layers,
        qk_norm="head",
        qkv_bias=bias,
        output_bias=bias,
    )
    count = config.take_optional("num_local_experts", int)
    count = config.take("num_experts", int, 128 if count is None else count)
    if not 0 <= count <= MOST_EXPERTS:
        raise config.out_of_range("num_experts", count, 0, MOST_EXPERTS)
    routing = Routing(
        experts=count,
        per_token=config.take_positive("num_experts_per_tok", 8),
        normalize=config.take("norm_topk_prob", bool, False),
    )
    if 0 < count < routing.per_token:
        raise ConfigError(
            f"{config.source}: num_experts_per_tok is {routing.per_token} and num_experts {count}"
        )
    inter = config.take_positive("moe_intermediate_size", 768, most=MOST_WIDTH)
    step = config.take_positive("decoder_sparse_step", 1)
    dense = config.take("mlp_only_layers", list, [])

    def feed_forward(spec: DecoderSpec, layer: int, factory: Factory) -> FeedForward:
        if count == 0 or layer in dense or (layer + 1) % step:
            return MLP(spec, layer, factory)
        return ExpertFeedForward(spec, layer, factory, routing, inter=inter)

    return CausalLM(spec, factory, feed_forward=feed_forward)
