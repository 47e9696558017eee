"""OLMo3: norms after attention and MLP, one norm over all heads, three window layers in four."""

from __future__ import annotations

from cairn.models.config_reader import ConfigReader
from cairn.models.fields import FULL, SLIDING, read_dimensions, read_layer_types, read_window
from cairn.models.rope import read_rope
from cairn.models.spec import DecoderSpec, LayerSpec


def read_spec(config: ConfigReader) -> DecoderSpec:
    dims = read_dimensions(config)
    types = read_layer_types(
        config, [FULL if (i + 1) % 4 == 0 else SLIDING for i in range(dims.num_layers)]
    )
    window = read_window(config, types)
    # A transformers-4 rope_scaling is meant for the full layers; window layers never need it.
    rope = read_rope(config, types, default_theta=500_000.0, scale_only=FULL)
    bias = config.take("attention_bias", bool, False)
    return DecoderSpec(
        architecture=config.architecture,
        dims=dims,
        norm_eps=config.take("rms_norm_eps", float, 1e-5),
        context_length=rope.context_length,
        tie_embeddings=config.take("tie_word_embeddings", bool, False),
        layers=tuple(
            LayerSpec(
                window=window if t == SLIDING else None,
                rope=rope.by_layer_type[t],
                qk_norm="layer",
                qkv_bias=bias,
                output_bias=bias,
            )
            for t in types
        ),
        post_norm=True,
    )
