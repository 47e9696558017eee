"""Qwen3: Qwen2 with its own head size, a norm on each query and key head, and optional biases."""

from __future__ import annotations

from cairn.models.config_reader import ConfigReader
from cairn.models.decoder import CausalLM
from cairn.models.fields import read_decoder, read_dimensions
from cairn.models.module import Factory
from cairn.models.qwen2 import read_windows


def build(config: ConfigReader, factory: Factory) -> CausalLM:
    dims = read_dimensions(config, default_head_dim=128)
    types, window = read_windows(config, dims)
    bias = config.take("attention_bias", bool, False)
    spec = read_decoder(
        config, dims, types, window=window, qk_norm="head", qkv_bias=bias, output_bias=bias
    )
    return CausalLM(spec, factory)
