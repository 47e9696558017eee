"""HiLS: models trained with hierarchical sparse attention, in a Qwen3 and an OLMo3 variant.

The last row of every page is a landmark row, which is no token. HiLS layers select pages by their
landmarks; the others are ordinary layers with a sliding window.
"""

from __future__ import annotations

import math
from dataclasses import replace

from cairn.errors import ConfigError
from cairn.models.config_reader import ConfigReader
from cairn.models.decoder import Attention, CausalLM, SelfAttention
from cairn.models.fields import FULL, SLIDING, read_dimensions, read_epsilon
from cairn.models.hils_attention import HiLSAttention, ScoringSpec
from cairn.models.module import Factory
from cairn.models.rope import RopeParameters, read_rope
from cairn.models.spec import DecoderSpec, Dimensions, LayerSpec, NativeSparsity, QKNorm

_ROW_MULTIPLE = 32  # embedding tables that hold the landmark are padded to it


def build(config: ConfigReader, factory: Factory) -> CausalLM:
    decoder, scoring = _read_spec(config), _scoring(config)
    assert decoder.sparsity is not None
    sparse_layers = frozenset(decoder.sparsity.layers)

    def attention(spec: DecoderSpec, layer: int, factory: Factory) -> Attention:
        if layer in sparse_layers:
            return HiLSAttention(spec, layer, factory, scoring)
        return SelfAttention(spec, layer, factory)

    return CausalLM(decoder, factory, attention=attention)


def _read_spec(config: ConfigReader) -> DecoderSpec:
    config.require("model_type", ("qwen_hils", "olmo_hils"), None)
    olmo = config.peek("model_type") == "olmo_hils"
    # Presets alone may have heads of another size: no checkpoint has them.
    dims = read_dimensions(config, own_head_dim=config.is_preset)
    _refuse_ablations(config)
    sparse_layers = _sparse_layers(config, olmo, dims.num_layers)
    window, hils_window = _windows(config)
    hides_rows = config.take("mask_lmk_token", bool, False)
    if hides_rows and window == 1:
        raise config.unsupported(
            "sliding_window", 1, "with mask_lmk_token a landmark row would see nothing"
        )
    plain_rope, hils_rope, context = _ropes(config, olmo)
    bias = config.take("attention_bias", bool, False)
    hils_layer = LayerSpec(
        window=None,
        rope=hils_rope if config.take("apply_hils_rope", bool, False) else None,
        qk_norm=_norm_kind(config, "layerwise_qk_norm"),
    )
    plain_layer = LayerSpec(
        window=window,
        rope=plain_rope,
        qk_norm="layer" if olmo else "head",
        qkv_bias=bias,
        output_bias=bias,
    )
    external = config.take("enable_external_lmk_embed", bool, False)
    padded = -(-(dims.vocab_size + 1) // _ROW_MULTIPLE) * _ROW_MULTIPLE
    return DecoderSpec(
        architecture=config.architecture,
        dims=dims,
        norm_eps=read_epsilon(config, 1e-6),
        context_length=context,
        tie_embeddings=config.take("tie_word_embeddings", bool, False),
        layers=tuple(
            hils_layer if i in sparse_layers else plain_layer for i in range(dims.num_layers)
        ),
        post_norm=olmo,
        sparsity=_sparsity(config, dims, sparse_layers, hils_window, hides_rows),
        embedding_rows=dims.vocab_size if external and olmo else padded,
        head_rows=dims.vocab_size if external else padded,
        landmark_embedding=external,
    )


def _refuse_ablations(config: ConfigReader) -> None:
    config.require("insert_landmarks", (True,), True)
    config.require("replace_full_attention_with_hils", (True,), True)
    config.require("enable_chunk_pooling", (False,), False)
    config.require("use_naive_bsa", (False,), False)
    # How the reference code lays out its input, in training or in a plain forward. A server always
    # inserts landmark rows and gives them the position of the next token.
    for name in ("adjust_lmk_pos", "auto_insert_lmk"):
        config.take_optional(name, bool)
    config.take_optional("max_window_layers", int)


def _sparse_layers(config: ConfigReader, olmo: bool, num_layers: int) -> frozenset[int]:
    every = config.take_positive("full_attn_interleave", 4)
    first = config.take("num_swa_layers", int, 0)
    layers = frozenset(i for i in range(first, num_layers) if (i - first) % every == every - 1)
    if first < 0:
        raise ConfigError(f"{config.source}: num_swa_layers is {first}; it must be at least 0")
    if not layers:
        raise ConfigError(
            f"{config.source}: full_attn_interleave {every} and num_swa_layers {first} leave no "
            f"HiLS layer among {num_layers}; lower one of them"
        )
    types = config.take_optional("layer_types", list)
    derived = [FULL if i in layers else SLIDING for i in range(num_layers)]
    # The Qwen variant does not read it.
    if olmo and types is not None and types != derived:
        raise config.unsupported(
            "layer_types", types, "it must follow from full_attn_interleave and num_swa_layers"
        )
    return layers


def _windows(config: ConfigReader) -> tuple[int | None, int]:
    """Window of the plain layers, None if they see everything, and window of the HiLS layers."""
    uses_window = config.take("use_sliding_window", bool, False)
    given = config.has("sliding_window")
    window = config.take_positive("sliding_window", 4096)
    if given and config.peek("sliding_window") is None and uses_window:
        raise config.unsupported("sliding_window", None, "give a number, or no use_sliding_window")
    own = config.take_optional("hils_sliding_window", int)
    if own is None and not uses_window:
        raise ConfigError(
            f"{config.source}: hils_sliding_window is missing; without use_sliding_window there is "
            "no other window to take its place"
        )
    hils_window = config.take_positive("hils_sliding_window", window)
    return (window if uses_window else None), hils_window


def _ropes(config: ConfigReader, olmo: bool) -> tuple[RopeParameters, RopeParameters, int]:
    """Rope of plain layers, rope of HiLS layers, and the context length."""
    nested = config.peek("rope_parameters")
    if isinstance(nested, dict) and (FULL in nested or SLIDING in nested):
        raise config.unsupported(
            "rope_parameters", "one per layer type", "HiLS models have one for all layers"
        )
    read = read_rope(config, [FULL], default_theta=10_000.0, default_context=32768)
    plain = read.by_layer_type[FULL]
    positions = config.take_positive("max_position_embeddings", 32768)
    if config.take("use_olmo3_rotary_embedding", bool, False) and plain.kind != "default":
        raise config.unsupported(
            "use_olmo3_rotary_embedding", True, "with rope_scaling it must be false"
        )
    in_range = config.take("enable_inrange_rope", bool, False)
    context = config.take_positive("rope_context_length", positions)
    multiplier = config.take("rope_period_multiplier", float, 1.0)
    uses_hope = config.take("use_hope", bool, False)
    share = config.take("hope_partial_ratio", float, 0.5)
    hope_context = config.take_positive("hope_context_length", positions)
    theta = config.take_optional("hope_theta", float) or 0.0
    if (in_range or uses_hope) and plain.kind == "dynamic":
        raise config.unsupported(
            "rope_scaling.rope_type", "dynamic", "not with enable_inrange_rope or use_hope"
        )
    for name, value, least, most in (
        ("rope_period_multiplier", multiplier, 0.0, math.inf),
        ("hope_partial_ratio", share, 0.0, 1.0),
        ("hope_theta", theta or 1.0, 0.0, math.inf),
    ):
        if not least < value <= most:
            raise config.unsupported(name, value, f"it must be above {least:g}, at most {most:g}")
    special = plain
    if in_range:
        special = replace(plain, least_frequency=2 * math.pi * multiplier / context)
    elif uses_hope:
        special = RopeParameters(
            theta=theta, kind="hope", original_context=hope_context, rotated_share=share
        )
    if not olmo:
        return special, special, read.context_length
    # OLMo's plain layers keep plain rope, and its HiLS layers too unless use_hope is set.
    return plain, special if uses_hope else plain, read.context_length


def _norm_kind(config: ConfigReader, name: str) -> QKNorm:
    return "layer" if config.take(name, bool, False) else "head"


def _scoring(config: ConfigReader) -> ScoringSpec:
    calibrated = config.take("enable_lmk_q_proj", bool, False)
    rank = config.take("lmk_q_lora_dim", int, -1)
    shared = config.take("shared_q_c", bool, False)
    if shared and not config.take("enable_prior_query", bool, True):
        raise config.unsupported("shared_q_c", True, "without enable_prior_query it has no use")
    return ScoringSpec(
        calibration=max(rank, 0) if calibrated else None,
        norm=_norm_kind(config, "layerwise_lmkq_norm"),
        shared_prior=shared,
    )


def _sparsity(
    config: ConfigReader, dims: Dimensions, layers: frozenset[int], window: int, hides_rows: bool
) -> NativeSparsity:
    chunk_size = config.take_positive("chunk_size", 64)
    if chunk_size < 2:
        raise config.unsupported("chunk_size", chunk_size, "a page holds a token and a landmark")
    prior = config.take("enable_prior_query", bool, True)
    return NativeSparsity(
        policy="hils" if prior else "landmark-key",
        layers=tuple(sorted(layers)),
        chunk_size=chunk_size,
        topk=config.take_positive("hils_topk", 16),
        window=window,
        null_split=config.take("enable_softmax1", bool, True),
        landmark_id=dims.vocab_size,
        hides_landmark_rows=hides_rows,
    )
