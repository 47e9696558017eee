"""Two kinds of files: a model folder that Cairn serves, and a state that training resumes from."""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer

from training.model import Decoder
from training.model_config import ModelConfig
from training.text import EOS

_CHAT_TEMPLATE = """\
{%- for message in messages -%}
{%- if message.role == 'user' -%}
{{ '\\nQuestion: ' + message.content + '\\nAnswer:' }}
{%- elif message.role == 'assistant' -%}
{{ ' ' + message.content }}
{%- else -%}
{{ message.content }}
{%- endif -%}
{%- endfor -%}
"""


def export_model(
    model: Decoder, tokenizer: Tokenizer, folder: Path, dtype: torch.dtype = torch.bfloat16
) -> Path:
    """A folder in the format of the released HiLS models, or of Qwen3 for full attention."""
    folder.mkdir(parents=True, exist_ok=True)
    end = tokenizer.token_to_id(EOS)
    assert end is not None
    config = model.config.to_json(end) | {"torch_dtype": str(dtype).removeprefix("torch.")}
    (folder / "config.json").write_text(json.dumps(config, indent=2) + "\n")
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": end}) + "\n")
    (folder / "tokenizer_config.json").write_text(
        json.dumps({"eos_token": EOS, "tokenizer_class": "PreTrainedTokenizerFast"}) + "\n"
    )
    (folder / "chat_template.jinja").write_text(_CHAT_TEMPLATE)
    tokenizer.save(str(folder / "tokenizer.json"))
    tensors = {name: t.detach().to("cpu", dtype) for name, t in model.state_dict().items()}
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


def import_model(folder: Path, device: torch.device) -> Decoder:
    """The model of an exported folder, in fp32."""
    read = json.loads((folder / "config.json").read_text())
    sparse = read["model_type"] == "qwen_hils"
    names = {
        "vocab_size": "vocab_size",
        "width": "hidden_size",
        "layers": "num_hidden_layers",
        "heads": "num_attention_heads",
        "kv_heads": "num_key_value_heads",
        "ffn": "intermediate_size",
        "rope_theta": "rope_theta",
        "norm_eps": "rms_norm_eps",
        "context": "max_position_embeddings",
    }
    if sparse:
        names |= {
            "chunk": "chunk_size",
            "window": "hils_sliding_window",
            "top_k": "hils_topk",
            "calibration": "lmk_q_lora_dim",
            "rope_context": "rope_context_length",
            "rope_multiplier": "rope_period_multiplier",
        }
    fields: dict[str, Any] = {ours: read[theirs] for ours, theirs in names.items()}
    model = Decoder(ModelConfig(architecture="hils" if sparse else "full", **fields))
    model.load_state_dict(load_file(folder / "model.safetensors"))
    return model.to(device)


def save_state(
    path: Path, model: Decoder, optimizers: Sequence[torch.optim.Optimizer], **more: Any
) -> None:
    """Write to another file first and rename it, so that a kill leaves the old or the new state."""
    path.parent.mkdir(parents=True, exist_ok=True)
    state = {
        "config": asdict(model.config),
        "model": model.state_dict(),
        "optimizers": [optimizer.state_dict() for optimizer in optimizers],
        **more,
    }
    aside = path.with_suffix(".partial")
    torch.save(state, aside)
    os.replace(aside, path)


def load_state(path: Path, device: torch.device) -> dict[str, Any]:
    state: dict[str, Any] = torch.load(path, map_location=device, weights_only=True)
    return state
