"""OLMo3: norms after attention and MLP, one norm over all heads, three window layers in four."""

from __future__ import annotations

from cairn.models.config_reader import ConfigReader
from cairn.models.decoder import CausalLM
from cairn.models.fields import (
    FULL,
    SLIDING,
    read_decoder,
    read_dimensions,
    read_layer_types,
    read_window,
)
from cairn.models.module import Factory


def build(config: ConfigReader, factory: Factory) -> CausalLM:
    dims = read_dimensions(config)
    types = read_layer_types(
        config, [FULL if (i + 1) % 4 == 0 else SLIDING for i in range(dims.num_layers)]
    )
    bias = config.take("attention_bias", bool, False)
    spec = read_decoder(
        config,
        dims,
        types,
        window=read_window(config, types),
        theta=500_000.0,
        eps=1e-5,
        # A transformers-4 rope_scaling is meant for the full layers; window layers never need it.
        scale_only=FULL,
        post_norm=True,
        qk_norm="layer",
        qkv_bias=bias,
        output_bias=bias,
    )
    return CausalLM(spec, factory)
