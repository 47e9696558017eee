"""Qwen3: Qwen2 with its own head size, a norm on each query and key head, and optional biases."""

from __future__ import annotations

from cairn.models.config_reader import ConfigReader
from cairn.models.fields import read_dimensions
from cairn.models.qwen2 import read_qwen
from cairn.models.spec import DecoderSpec


def read_spec(config: ConfigReader) -> DecoderSpec:
    dims = read_dimensions(config, default_head_dim=128)
    bias = config.take("attention_bias", bool, False)
    return read_qwen(config, dims, qk_norm="head", qkv_bias=bias, output_bias=bias)
