"""Tiny random models of every architecture against transformers on the same weights."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from transformers import (
    AutoModelForCausalLM,
    LlamaConfig,
    Olmo3Config,
    Qwen2Config,
    Qwen3Config,
)

from cairn import LLM
from tests.helpers import GOLDENS, tokens_of

TINY: dict[str, Any] = {
    "vocab_size": 67,
    "hidden_size": 32,
    "intermediate_size": 40,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "eos_token_id": None,
    "bos_token_id": None,
    "pad_token_id": None,
}
LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 5e4,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}
YARN = {
    "rope_type": "yarn",
    "rope_theta": 1e4,
    "factor": 4.0,
    "original_max_position_embeddings": 64,
}
MIXED = ["sliding_attention", "full_attention", "sliding_attention", "full_attention"]

CASES: dict[str, Any] = {
    "llama": LlamaConfig(**TINY),
    "llama-biased-tied": LlamaConfig(
        **TINY, attention_bias=True, mlp_bias=True, tie_word_embeddings=True
    ),
    "llama-head-dim": LlamaConfig(**TINY, head_dim=12),
    "llama-llama3": LlamaConfig(**TINY, rope_parameters=LLAMA3),
    "llama-dynamic": LlamaConfig(
        **{**TINY, "max_position_embeddings": 64},
        rope_parameters={"rope_type": "dynamic", "factor": 4.0, "rope_theta": 1e4},
    ),
    "qwen2": Qwen2Config(**TINY),
    "qwen2-window": Qwen2Config(
        **TINY, use_sliding_window=True, sliding_window=17, max_window_layers=2
    ),
    "qwen3": Qwen3Config(**TINY, head_dim=16),
    "qwen3-yarn": Qwen3Config(**TINY, head_dim=16, rope_parameters=YARN),
    "qwen3-layer-types": Qwen3Config(
        **TINY, head_dim=16, use_sliding_window=True, sliding_window=9, layer_types=MIXED
    ),
    "olmo3": Olmo3Config(**TINY, sliding_window=21),
    "olmo3-yarn": Olmo3Config(
        **TINY,
        sliding_window=10,
        layer_types=MIXED,
        rope_parameters={
            "full_attention": YARN,
            "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
        },
    ),
}


@pytest.fixture(scope="module", params=CASES)
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory):  # type: ignore[no-untyped-def]
    torch.manual_seed(len(request.param))
    hf = AutoModelForCausalLM.from_config(CASES[request.param], attn_implementation="eager").eval()
    for name, parameter in hf.named_parameters():
        noise = torch.randn_like(parameter)
        if "norm" in name:
            parameter.data = 1 + 0.25 * noise
        else:
            parameter.data = noise / parameter.shape[-1] ** 0.5
    folder = tmp_path_factory.mktemp("models") / request.param
    hf.save_pretrained(folder)
    return hf, folder


@torch.no_grad()
def test_logprobs_and_greedy_tokens_equal_transformers(model: tuple[Any, Path]) -> None:
    hf, folder = model
    ids = tokens_of(150, vocab=67)
    expected = hf(torch.tensor([ids])).logits[0].log_softmax(-1)
    generated = hf.generate(torch.tensor([ids]), max_new_tokens=24, do_sample=False, pad_token_id=0)
    with LLM(folder, dtype="float32", device="cpu", page_size=16, chunked_prefill_size=64) as llm:
        torch.testing.assert_close(llm.logprobs(ids), expected, rtol=0, atol=2e-4)
        result = llm.generate(ids, max_tokens=24)
        assert result.token_ids == generated[0, len(ids) :].tolist()


@pytest.mark.parametrize("case", sorted(p.name for p in GOLDENS.glob("hf_*")))
@pytest.mark.parametrize(
    "page_size", [16, *(pytest.param(own, marks=pytest.mark.slow) for own in (64, 512))]
)
def test_golden_logits(case: str, page_size: int) -> None:
    golden = load_file(GOLDENS / case / "golden.safetensors")
    with LLM(GOLDENS / case, dtype="float32", device="cpu", page_size=page_size) as llm:
        for name in "ab":
            ids = golden[f"input_ids_{name}"].tolist()
            expected = golden[f"logits_{name}"].log_softmax(-1)
            torch.testing.assert_close(llm.logprobs(ids), expected, rtol=0, atol=2e-4)
            result = llm.generate(ids, max_tokens=32, ignore_eos=True)
            assert result.token_ids == golden[f"greedy_ids_{name}"].tolist()
