"""Llama: pre-norm, no norm on queries and keys, every layer sees everything."""

from __future__ import annotations

from cairn.models.config_reader import ConfigReader
from cairn.models.fields import FULL, read_dimensions
from cairn.models.rope import read_rope
from cairn.models.spec import DecoderSpec, LayerSpec


def read_spec(config: ConfigReader) -> DecoderSpec:
    dims = read_dimensions(config)
    bias = config.take("attention_bias", bool, False)
    rope = read_rope(config, [FULL], default_theta=10_000.0)
    layer = LayerSpec(window=None, rope=rope.by_layer_type[FULL], qkv_bias=bias, output_bias=bias)
    return DecoderSpec(
        architecture=config.architecture,
        dims=dims,
        norm_eps=config.take("rms_norm_eps", float, 1e-6),
        context_length=rope.context_length,
        tie_embeddings=config.take("tie_word_embeddings", bool, False),
        layers=(layer,) * dims.num_layers,
        mlp_bias=config.take("mlp_bias", bool, False),
    )
