"""Config fields that Llama-like architectures read the same way."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from cairn.errors import ConfigError
from cairn.models.config_reader import ConfigReader
from cairn.models.rope import read_rope
from cairn.models.spec import DecoderSpec, Dimensions, LayerSpec

FULL, SLIDING = "full_attention", "sliding_attention"

# What no model has, and what can still be computed with: a config may be hostile.
_MOST_LAYERS = 1024
MOST_HEADS = 2**12
MOST_HEAD_DIM = 2**12
MOST_EXPERTS = 1024
MOST_WIDTH = 2**24


def read_num_layers(config: ConfigReader) -> int:
    return config.take_positive("num_hidden_layers", most=_MOST_LAYERS)


def read_dimensions(
    config: ConfigReader, *, default_head_dim: int | None = None, own_head_dim: bool = True
) -> Dimensions:
    """The head size is hidden_size / heads unless the config or `default_head_dim` says otherwise;
    without `own_head_dim` the architecture honours no other."""
    config.require("hidden_act", ("silu", "swish"), "silu")
    hidden = config.take_positive("hidden_size", most=MOST_WIDTH)
    heads = config.take_positive("num_attention_heads", most=MOST_HEADS)
    kv_heads = config.take_positive("num_key_value_heads", heads)
    if heads % kv_heads:
        raise ConfigError(
            f"{config.source}: num_attention_heads {heads} is not a multiple of "
            f"num_key_value_heads {kv_heads}"
        )
    head_dim = config.take_optional("head_dim", int) or default_head_dim
    if head_dim is None or not own_head_dim:
        if hidden % heads:
            raise ConfigError(
                f"{config.source}: hidden_size {hidden} is not a multiple of "
                f"num_attention_heads {heads}, and there is no head_dim"
            )
        if head_dim not in (None, hidden // heads):
            raise config.unsupported("head_dim", head_dim, f"it must be {hidden // heads}")
        head_dim = hidden // heads
    if not 2 <= head_dim <= MOST_HEAD_DIM or head_dim % 2:
        raise config.unsupported(
            "head_dim", head_dim, f"it must be even, and from 2 to {MOST_HEAD_DIM}"
        )
    return Dimensions(
        vocab_size=config.take_positive("vocab_size", most=MOST_WIDTH),
        hidden_size=hidden,
        intermediate_size=config.take_positive("intermediate_size", most=MOST_WIDTH),
        num_layers=read_num_layers(config),
        num_heads=heads,
        num_kv_heads=kv_heads,
        head_dim=head_dim,
    )


def read_layer_types(config: ConfigReader, default: list[str]) -> list[str]:
    """`layer_types`, one of full_attention and sliding_attention per layer."""
    types = config.take("layer_types", list, default)
    if len(types) != len(default):
        raise ConfigError(
            f"{config.source}: layer_types names {len(types)} layers, num_hidden_layers is "
            f"{len(default)}"
        )
    for layer_type in types:
        if layer_type not in (FULL, SLIDING):
            raise config.unsupported("layer_types", layer_type, f"supported: {FULL}, {SLIDING}")
    return types


def read_window(config: ConfigReader, layer_types: list[str]) -> int | None:
    """`sliding_window`, which sliding layers cannot do without."""
    window = config.take_optional("sliding_window", int)
    if SLIDING in layer_types and (window is None or window < 1):
        raise ConfigError(
            f"{config.source}: sliding_window is {window} but layer_types has {SLIDING} layers; "
            "it must be at least 1"
        )
    return window


def read_epsilon(config: ConfigReader, default: float) -> float:
    eps = config.take("rms_norm_eps", float, default)
    if not 0 <= eps <= 1:
        raise config.out_of_range("rms_norm_eps", eps, 0, 1)
    return eps


def read_decoder(
    config: ConfigReader,
    dims: Dimensions,
    layer_types: Sequence[str],
    *,
    window: int | None = None,
    theta: float = 10_000.0,
    eps: float = 1e-6,
    scale_only: str | None = None,
    mlp_bias: bool = False,
    post_norm: bool = False,
    **layer: Any,
) -> DecoderSpec:
    """A decoder whose layers differ at most in window and rope, by their type.

    `theta` and `eps` are what the architecture takes where the config says nothing; `layer` are the
    fields that all its LayerSpecs share. See `read_rope` for `scale_only`.
    """
    rope = read_rope(config, layer_types, theta, scale_only=scale_only)
    of_type = {
        kind: LayerSpec(window=window if kind == SLIDING else None, rope=own, **layer)
        for kind, own in rope.by_layer_type.items()
    }
    return DecoderSpec(
        architecture=config.architecture,
        dims=dims,
        norm_eps=read_epsilon(config, eps),
        context_length=rope.context_length,
        tie_embeddings=config.take("tie_word_embeddings", bool, False),
        layers=tuple(of_type[kind] for kind in layer_types),
        mlp_bias=mlp_bias,
        post_norm=post_norm,
    )
