"""Qwen2: Llama with biases on q, k, v, and sliding-window layers where the config asks for them."""

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
from cairn.models.spec import Dimensions


def build(config: ConfigReader, factory: Factory) -> CausalLM:
    # The head size is always hidden_size / heads, and o_proj never has a bias.
    dims = read_dimensions(config, own_head_dim=False)
    types, window = read_windows(config, dims)
    return CausalLM(read_decoder(config, dims, types, window=window, qkv_bias=True), factory)


def read_windows(config: ConfigReader, dims: Dimensions) -> tuple[list[str], int | None]:
    """The type of every layer, and the window of sliding ones."""
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
    return types, read_window(config, types)
