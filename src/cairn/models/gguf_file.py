"""GGUF files: config, weights and tokenizer in one."""

from __future__ import annotations

from collections.abc import Iterator
from math import prod
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from cairn.errors import ConfigError, LoadError
from cairn.models.gguf_header import GGUFHeader, GGUFTensor, read_header

if TYPE_CHECKING:
    import torch

    from cairn.models.blocks import Codes

_FLOAT_TYPES = ("F32", "F16", "BF16")

_ARCHITECTURES = {
    "llama": "LlamaForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
}

_ROPE_FREQS = "rope_freqs.weight"
_MOST_ROPE_FREQS = 2**12

# GGUF name -> checkpoint name, for the model and for each layer
_NAMES = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}
_LAYER_NAMES = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}


class GGUFFile:
    """One file, or the first of several that a model was split into."""

    def __init__(self, path: Path) -> None:
        self.path = path
        first = read_header(path)
        self.metadata = first.metadata
        self._tensors: dict[str, GGUFTensor] = {}
        for header in (first, *self._other_parts()):
            for tensor in header.tensors:
                name = _checkpoint_name(tensor.name)
                if name in self._tensors:
                    raise LoadError(f"{path}: tensor {tensor.name} is there twice")
                self._tensors[name] = tensor
        self._rope_freqs = self._tensors.pop(_ROPE_FREQS, None)
        self.shapes = {name: tensor.shape for name, tensor in self._tensors.items()}

    def _other_parts(self) -> Iterator[GGUFHeader]:
        """The files name-00002-of-0000N.gguf and so on, if this is name-00001-of-0000N.gguf."""
        count, number = (self.metadata.get(f"split.{key}", 0) for key in ("count", "no"))
        if count in (0, 1):
            return
        end = f"-00001-of-{count:05d}.gguf" if isinstance(count, int) else ""
        if number != 0 or not end or not self.path.name.endswith(end):
            raise LoadError(
                f"{self.path} is part {number!r:.20} (from 0) of {count!r:.20}; give the first, "
                "whose name ends with -00001-of-N.gguf, and keep the names of all"
            )
        stem = self.path.name.removesuffix(end)
        for part in range(2, count + 1):
            path = self.path.with_name(f"{stem}-{part:05d}-of-{count:05d}.gguf")
            if not path.exists():
                raise LoadError(f"{path} is missing; {self.path.name} says there are {count} parts")
            header = read_header(path)
            found = header.metadata.get("split.no")
            if found != part - 1:
                raise LoadError(f"{path}: split.no is {found!r:.20}; its name says {part - 1}")
            yield header

    # -- config -------------------------------------------------------------------------------

    def config(self) -> dict[str, Any]:
        """The file's metadata as a config.json."""
        name = self.metadata.get("general.architecture")
        if not isinstance(name, str) or name not in _ARCHITECTURES:
            raise ConfigError(
                f"{self.path}: general.architecture is {name!r:.100}; supported in GGUF: "
                f"{', '.join(_ARCHITECTURES)}"
            )
        shapes = self.shapes
        if "model.embed_tokens.weight" not in shapes:
            raise LoadError(f"{self.path}: tensor token_embd.weight is missing")
        heads = self._number(name, "attention.head_count")
        width = self._number(name, "embedding_length")
        head_dim = self._get(name, "attention.key_length", width // heads)
        if self._get(name, "rope.dimension_count", head_dim) != head_dim:
            raise ConfigError(f"{self.path}: {name}.rope.dimension_count must be {head_dim}")
        config = {
            "architectures": [_ARCHITECTURES[name]],
            "vocab_size": shapes["model.embed_tokens.weight"][0],
            "hidden_size": width,
            "intermediate_size": self._number(name, "feed_forward_length"),
            "num_hidden_layers": self._number(name, "block_count"),
            "num_attention_heads": heads,
            "num_key_value_heads": self._get(name, "attention.head_count_kv", heads),
            "max_position_embeddings": self._number(name, "context_length"),
            "rope_theta": self._get(name, "rope.freq_base", 10_000.0),
            "rope_scaling": self._rope_scaling(name),
            "rms_norm_eps": self._number(name, "attention.layer_norm_rms_epsilon"),
            "tie_word_embeddings": "lm_head.weight" not in shapes,
            "eos_token_id": [
                token
                for key in ("eos_token_id", "eot_token_id")
                if (token := self.metadata.get(f"tokenizer.ggml.{key}")) is not None
            ],
        }
        if name != "qwen2":  # whose head size is always hidden_size / heads
            config["head_dim"] = head_dim
        return config

    def _rope_scaling(self, name: str) -> dict[str, Any] | None:
        kind = self._get(name, "rope.scaling.type", "none")
        if self._rope_freqs is not None:
            type_name, shape = self._rope_freqs.kind.name, self._rope_freqs.shape
            if kind != "none" or type_name != "F32" or prod(shape) > _MOST_ROPE_FREQS:
                raise ConfigError(
                    f"{self.path}: tensor {_ROPE_FREQS} has type {type_name} and shape "
                    f"{list(shape)}, and rope.scaling.type is {kind!r:.100}; supported: F32, one "
                    "for each pair of dimensions, without scaling"
                )
            divisors = self._rope_freqs.data.reshape(-1).view(np.float32)
            return {"rope_type": "divided", "divisors": divisors.tolist()}
        if kind == "none":
            return None
        scaling = {"rope_type": kind, "factor": self._get(name, "rope.scaling.factor", 1.0)}
        original = self._get(name, "rope.scaling.original_context_length")
        if original is not None:
            scaling["original_max_position_embeddings"] = original
        return scaling

    def _get(self, architecture: str, key: str, default: Any = None) -> Any:
        return self.metadata.get(f"{architecture}.{key}", default)

    def _number(self, architecture: str, key: str) -> Any:
        value = self._get(architecture, key)
        if not isinstance(value, int | float) or not value > 0:
            raise ConfigError(
                f"{self.path}: {architecture}.{key} is {value!r:.100}; a positive number is needed"
            )
        return value

    # -- weights ------------------------------------------------------------------------------

    @property
    def types(self) -> tuple[str, ...]:
        types = {tensor.kind.name for tensor in self._tensors.values() if len(tensor.shape) == 2}
        return tuple(sorted(types))

    def tensors(self) -> Iterator[tuple[Path, str, torch.Tensor | Codes]]:
        """All tensors, one at a time, under their checkpoint names."""
        for name, tensor in self._tensors.items():
            yield self.path, name, self._read(tensor)

    def _read(self, tensor: GGUFTensor) -> torch.Tensor | Codes:
        import torch  # here, so that reading the tokenizer alone does not wait for it
        from gguf import GGML_QUANT_SIZES

        from cairn.models.gguf_blocks import BLOCK_TYPES, read_blocks

        kind, shape = tensor.kind.name, tensor.shape
        order = self._row_order(tensor.name, shape[0])
        if kind in _FLOAT_TYPES:
            dtype = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}[kind]
            values = torch.from_numpy(np.array(tensor.data)).view(dtype)
            return values if order is None else values[torch.from_numpy(order)]
        if kind not in BLOCK_TYPES or len(shape) != 2:
            raise LoadError(
                f"{self.path}: tensor {tensor.name} of shape {list(shape)} has type {kind}; "
                f"supported: {', '.join(_FLOAT_TYPES)}, and for matrices {', '.join(BLOCK_TYPES)}"
            )
        data = torch.from_numpy(np.array(tensor.data))
        codes = read_blocks(kind, data, GGML_QUANT_SIZES[tensor.kind][1])
        return codes if order is None else codes.with_rows(torch.from_numpy(order))

    def _row_order(self, name: str, rows: int) -> np.ndarray | None:
        """Llama files interleave the two halves of every query and key head; this undoes it."""
        kind = name.split(".")[-2]
        if self.metadata["general.architecture"] != "llama" or kind not in ("attn_q", "attn_k"):
            return None
        key = "attention.head_count" if kind == "attn_q" else "attention.head_count_kv"
        heads = self._get("llama", key, self._get("llama", "attention.head_count", 1))
        return np.arange(rows).reshape(heads, -1, 2).swapaxes(1, 2).flatten()


def _checkpoint_name(name: str) -> str:
    """blk.3.attn_q.weight -> model.layers.3.self_attn.q_proj.weight; unknown names stay."""
    parts = name.split(".")
    if parts[0] == "blk" and len(parts) == 4 and parts[2] in _LAYER_NAMES:
        return f"model.layers.{parts[1]}.{_LAYER_NAMES[parts[2]]}.{parts[3]}"
    if parts[0] in _NAMES and len(parts) == 2:
        return f"{_NAMES[parts[0]]}.{parts[1]}"
    return name
