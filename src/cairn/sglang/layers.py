"""Describes SGLang's own models by their attention layers."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from cairn.errors import ConfigError
from cairn.models.spec import AttentionSpec, ModelSpec


def describe(
    layers: list[Any], architecture: str, vocab_size: int, context_length: int
) -> ModelSpec:
    """`layers` are the RadixAttention modules of a model, in any order."""
    ids = sorted(layer.layer_id for layer in layers)
    if not ids or ids != list(range(len(ids))):
        raise ConfigError(
            f"{architecture} has attention layers {ids}; hsa needs each layer once, from 0 on"
        )
    refused: tuple[tuple[str, Callable[[Any], bool]], ...] = (
        ("a cap on its scores (logit_cap)", lambda layer: layer.logit_cap > 0),
        ("a sliding window", lambda layer: layer.sliding_window_size > -1),
        ("cross attention", lambda layer: layer.is_cross_attention),
        ("attention that is not causal", lambda layer: layer.attn_type.value != "decoder"),
        ("values of another size", lambda layer: layer.v_head_dim != layer.head_dim),
        ("temperatures by length", lambda layer: layer.xai_temperature_len > 0),
    )
    for layer in layers:
        for what, has in refused:
            if has(layer):
                raise ConfigError(
                    f"layer {layer.layer_id} of {architecture} has {what}, which hsa does not "
                    "support; use another --attention-backend"
                )
    shapes = {
        (layer.tp_q_head_num, layer.tp_k_head_num, layer.head_dim, layer.scaling)
        for layer in layers
    }
    if len(shapes) > 1:
        raise ConfigError(f"the layers of {architecture} differ in heads or scale: {shapes}")
    heads, kv_heads, head_dim, scale = shapes.pop()
    return ModelSpec(
        architecture=architecture,
        vocab_size=vocab_size,
        layers=(AttentionSpec(heads, kv_heads, head_dim, float(scale)),) * len(layers),
        context_length=context_length,
    )
