"""Well-known shapes without weights, for benchmarks and tests: `--load-format dummy`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

_QWEN3_06B: dict[str, Any] = {
    "architectures": ["Qwen3ForCausalLM"],
    "hidden_size": 1024,
    "num_hidden_layers": 28,
    "num_attention_heads": 16,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "intermediate_size": 3072,
    "vocab_size": 151936,
    "tie_word_embeddings": True,
    "max_position_embeddings": 40960,
    "rope_theta": 1e6,
    "rms_norm_eps": 1e-6,
}

_345M: dict[str, Any] = {
    "hidden_size": 1024,
    "num_hidden_layers": 16,
    "num_attention_heads": 16,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "intermediate_size": 4096,
    "vocab_size": 100278,
    "tie_word_embeddings": True,
    "max_position_embeddings": 1048576,
    "rope_theta": 1e4,
    "rms_norm_eps": 1e-6,
}

_DENSE = {**_345M, "architectures": ["Qwen3ForCausalLM"]}

_HILS = {
    **_345M,
    "architectures": ["HiLSForCausalLM"],
    "model_type": "qwen_hils",
    "use_sliding_window": True,
    "sliding_window": 512,
    "hils_sliding_window": 512,
    "chunk_size": 64,
    "hils_topk": 32,
    "full_attn_interleave": 1,
    "enable_softmax1": True,
    "enable_prior_query": True,
    "enable_lmk_q_proj": True,
    "lmk_q_lora_dim": 64,
    "apply_hils_rope": True,
    "enable_inrange_rope": True,
    "rope_context_length": 8192,
    "rope_period_multiplier": 2.0,
}

_7B: dict[str, Any] = {
    "hidden_size": 4096,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 32,
    "intermediate_size": 11008,
    "vocab_size": 100278,
    "tie_word_embeddings": False,
    "max_position_embeddings": 1048576,
    "rope_theta": 5e5,
    "rms_norm_eps": 1e-6,
    "sliding_window": 512,
}

PRESETS: Mapping[str, Mapping[str, Any]] = {
    "qwen3-0.6b": _QWEN3_06B,
    "qwen3-0.6b-long": {**_QWEN3_06B, "max_position_embeddings": 1048576},
    "dense-345m": _DENSE,
    "dense-345m-hd128": {**_DENSE, "head_dim": 128},
    "hils-345m": _HILS,
    "hils-345m-hd128": {**_HILS, "head_dim": 128},
    "dense-7b": {
        **_7B,
        "architectures": ["Olmo3ForCausalLM"],
        "layer_types": (["sliding_attention"] * 3 + ["full_attention"]) * 8,
    },
    "hils-7b": {
        **_7B,
        "architectures": ["HiLSForCausalLM"],
        "model_type": "olmo_hils",
        "use_sliding_window": True,
        "hils_sliding_window": 512,
        "chunk_size": 64,
        "hils_topk": 32,
        "full_attn_interleave": 4,
        "enable_softmax1": False,
        "enable_prior_query": True,
        "enable_lmk_q_proj": True,
        "lmk_q_lora_dim": 256,
        "layerwise_qk_norm": True,
        "layerwise_lmkq_norm": True,
        "apply_hils_rope": True,
        "enable_inrange_rope": True,
        "rope_context_length": 8192,
        "rope_period_multiplier": 2.0,
        "use_hope": True,
        "mask_lmk_token": True,
        "enable_external_lmk_embed": True,
    },
}
"""config.json of each preset."""
