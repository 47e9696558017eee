"""Shapes of a model, and the config.json that describes it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

Architecture = Literal["hils", "full"]

_ROW_MULTIPLE = 32  # the embedding table, with the landmark's row, is padded to a multiple of this


@dataclass(frozen=True, slots=True)
class ModelConfig:
    architecture: Architecture = "hils"
    vocab_size: int = 4095
    width: int = 256
    layers: int = 6
    heads: int = 4
    kv_heads: int = 2
    ffn: int = 768
    chunk: int = 64
    window: int = 128
    top_k: int = 16
    calibration: int = 32
    """Rank of the matrix that the page-scoring query adds to the ordinary query's."""
    rope_theta: float = 10_000.0
    rope_context: int = 512
    """Rope does not rotate pairs of dimensions whose period is longer than half of this. They carry
    content over any distance. The other pairs see every angle within a short training sample."""
    rope_multiplier: float = 2.0
    norm_eps: float = 1e-6
    context: int = 1 << 21

    @property
    def head_dim(self) -> int:
        return self.width // self.heads

    @property
    def landmark_id(self) -> int:
        return self.vocab_size

    @property
    def rows(self) -> int:
        """Of the embedding table."""
        if self.architecture == "full":
            return self.vocab_size
        return -(-(self.vocab_size + 1) // _ROW_MULTIPLE) * _ROW_MULTIPLE

    def to_json(self, eos_token_id: int) -> dict[str, Any]:
        common = {
            "vocab_size": self.vocab_size,
            "hidden_size": self.width,
            "intermediate_size": self.ffn,
            "num_hidden_layers": self.layers,
            "num_attention_heads": self.heads,
            "num_key_value_heads": self.kv_heads,
            "head_dim": self.head_dim,
            "hidden_act": "silu",
            "rms_norm_eps": self.norm_eps,
            "rope_theta": self.rope_theta,
            "max_position_embeddings": self.context,
            "tie_word_embeddings": True,
            "attention_bias": False,
            "attention_dropout": 0.0,
            "bos_token_id": None,
            "eos_token_id": eos_token_id,
            "torch_dtype": "bfloat16",
            "use_cache": True,
        }
        if self.architecture == "full":
            return {"architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3", **common}
        return {
            "architectures": ["HiLSForCausalLM"],
            "model_type": "qwen_hils",
            **common,
            "use_sliding_window": True,
            "sliding_window": self.window,
            "hils_sliding_window": self.window,
            "full_attn_interleave": 1,
            "chunk_size": self.chunk,
            "hils_topk": self.top_k,
            "adjust_lmk_pos": True,
            "enable_softmax1": True,
            "enable_prior_query": True,
            "enable_lmk_q_proj": True,
            "lmk_q_lora_dim": self.calibration,
            "apply_hils_rope": True,
            "enable_inrange_rope": True,
            "rope_context_length": self.rope_context,
            "rope_period_multiplier": self.rope_multiplier,
        }
