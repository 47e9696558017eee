"""Llama: pre-norm, no norm on queries and keys, every layer sees everything."""

from __future__ import annotations

from cairn.models.config_reader import ConfigReader
from cairn.models.decoder import CausalLM
from cairn.models.fields import FULL, read_decoder, read_dimensions
from cairn.models.module import Factory


def build(config: ConfigReader, factory: Factory) -> CausalLM:
    dims = read_dimensions(config)
    bias = config.take("attention_bias", bool, False)
    mlp_bias = config.take("mlp_bias", bool, False)
    types = [FULL] * dims.num_layers
    spec = read_decoder(config, dims, types, mlp_bias=mlp_bias, qkv_bias=bias, output_bias=bias)
    return CausalLM(spec, factory)
