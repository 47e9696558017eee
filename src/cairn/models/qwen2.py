"""Qwen2: Llama with biases on q, k, v, and sliding-window layers where the config asks for them."""

from __future__ import annotations

from cairn.models.config_reader import ConfigReader
from cairn.models.fields import (
    FULL,
    SLIDING,
    read_dimensions,
    read_layer_types,
    read_window,
)
from cairn.models.rope import read_rope
from cairn.models.spec import DecoderSpec, Dimensions, LayerSpec, QKNorm


def read_spec(config: ConfigReader) -> DecoderSpec:
    # The head size is always hidden_size / heads, and o_proj never has a bias.
    dims = read_dimensions(config, own_head_dim=False)
    return read_qwen(config, dims, qk_norm="none", qkv_bias=True, output_bias=False)


def read_qwen(
    config: ConfigReader, dims: Dimensions, *, qk_norm: QKNorm, qkv_bias: bool, output_bias: bool
) -> DecoderSpec:
    use_window = config.take("use_sliding_window", bool, False)
    full_layers = config.take("max_window_layers", int, 28)
    has_window = use_window and config.peek("sliding_window") is not None
    types = read_layer_types(
        config,
        [SLIDING if has_window and i >= full_layers else FULL for i in range(dims.num_layers)],
    )
    if SLIDING in types and not use_window:
        raise config.unsupported(
            "layer_types", SLIDING, "use_sliding_window must be true for such layers"
        )
    window = read_window(config, types)
    rope = read_rope(config, types, default_theta=10_000.0)
    return DecoderSpec(
        architecture=config.architecture,
        dims=dims,
        norm_eps=config.take("rms_norm_eps", float, 1e-6),
        context_length=rope.context_length,
        tie_embeddings=config.take("tie_word_embeddings", bool, False),
        layers=tuple(
            LayerSpec(
                window=window if t == SLIDING else None,
                rope=rope.by_layer_type[t],
                qk_norm=qk_norm,
                qkv_bias=qkv_bias,
                output_bias=output_bias,
            )
            for t in types
        ),
    )
