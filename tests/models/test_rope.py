"""Rotary embeddings against transformers, in both forms of config."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

from cairn.errors import ConfigError
from cairn.models.config_reader import ConfigReader
from cairn.models.rope import RopeParameters, Rotary, Rotation, read_rope

SCALINGS: dict[str, dict[str, Any]] = {
    "default": {"rope_type": "default"},
    "linear": {"rope_type": "linear", "factor": 4.0},
    "old-name": {"type": "linear", "factor": 2.0},
    "dynamic": {"rope_type": "dynamic", "factor": 3.0},
    "llama3": {
        "rope_type": "llama3",
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 64,
    },
    "yarn": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64},
    "yarn-no-original": {"rope_type": "yarn", "factor": 2.0},
    "yarn-factor": {"rope_type": "yarn", "factor": 4.0, "attention_factor": 0.7},
    "yarn-mscale": {"rope_type": "yarn", "factor": 4.0, "mscale": 0.8, "mscale_all_dim": 0.5},
    "yarn-betas": {"rope_type": "yarn", "factor": 4.0, "beta_fast": 16, "beta_slow": 2},
    "yarn-untruncated": {"rope_type": "yarn", "factor": 4.0, "truncate": False},
}


def reader(**values: Any) -> ConfigReader:
    return ConfigReader({"max_position_embeddings": 256, **values}, "test")


def rope_of(config: ConfigReader) -> RopeParameters:
    return read_rope(config, ["full_attention"], 10_000.0).by_layer_type["full_attention"]


@pytest.mark.parametrize("length", [200, 700])
@pytest.mark.parametrize("name", SCALINGS)
def test_cos_and_sin_equal_transformers(name: str, length: int) -> None:
    scaling = SCALINGS[name]
    head_dim, theta = 64, 5000.0
    hf = LlamaConfig(
        hidden_size=256,
        num_attention_heads=4,
        max_position_embeddings=256,
        rope_parameters={**scaling, "rope_theta": theta},
    )
    positions = torch.arange(length)
    cos, sin = LlamaRotaryEmbedding(hf)(torch.zeros(1), positions[None])
    for config in (
        reader(rope_theta=theta, rope_scaling=scaling),
        reader(rope_parameters={**scaling, "rope_theta": theta}),
    ):
        rotary = Rotary(Rotation(rope_of(config), head_dim), torch.float32, torch.device("cpu"))
        own_cos, own_sin = rotary(positions, torch.full_like(positions, length))
        torch.testing.assert_close(own_cos[:, 0], cos[0], rtol=0, atol=1e-4)
        half = head_dim // 2
        signed = torch.cat((-sin[0, :, :half], sin[0, :, half:]), dim=-1)
        torch.testing.assert_close(own_sin[:, 0], signed, rtol=0, atol=1e-4)


@pytest.mark.parametrize(
    ("scaling", "context"),
    [("default", 256), ("linear", 1024), ("dynamic", 768), ("llama3", 256), ("yarn", 256)],
)
def test_context_length_follows_from_scaling(scaling: str, context: int) -> None:
    config = reader(rope_scaling=SCALINGS[scaling])
    assert read_rope(config, ["full_attention"], 1e4).context_length == context


def test_yarn_without_original_length_stretches_the_stated_one() -> None:
    config = reader(rope_scaling=SCALINGS["yarn-no-original"])
    assert read_rope(config, ["full_attention"], 1e4).context_length == 512


def test_each_layer_type_has_its_own_rope() -> None:
    config = reader(
        rope_parameters={
            "full_attention": {"rope_type": "linear", "factor": 2.0, "rope_theta": 7.0},
            "sliding_attention": {"rope_type": "default", "rope_theta": 9.0},
        }
    )
    ropes = read_rope(config, ["full_attention", "sliding_attention"], 1e4).by_layer_type
    assert ropes["full_attention"].kind == "linear"
    assert ropes["full_attention"].theta == 7.0
    assert ropes["sliding_attention"].kind == "default"
    assert ropes["sliding_attention"].theta == 9.0


@pytest.mark.parametrize(
    ("values", "named"),
    [
        ({"rope_scaling": {"rope_type": "longrope", "factor": 2.0}}, "rope_scaling.rope_type"),
        ({"rope_scaling": {"rope_type": "linear"}}, "rope_scaling.factor"),
        ({"rope_scaling": {"rope_type": "linear", "factor": 0.5}}, "rope_scaling.factor"),
        ({"rope_scaling": {"rope_type": "linear", "factor": "2"}}, "rope_scaling.factor"),
        ({"rope_scaling": {"rope_type": "linear", "factor": 2, "wobble": 1}}, "wobble"),
        ({"rope_scaling": {"rope_type": "llama3", "factor": 8.0}}, "high_freq_factor"),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor"),
        ({"rope_parameters": {"rope_type": "proportional"}}, "rope_parameters.rope_type"),
        ({"rope_scaling": {}, "rope_parameters": {}}, "both"),
    ],
)
def test_unsupported_rope_is_refused_by_name(values: dict[str, Any], named: str) -> None:
    with pytest.raises(ConfigError, match=named):
        rope_of(reader(**values))
