"""Architectures Cairn does not have, run through transformers' own code on paged attention."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import (
    AutoModelForCausalLM,
    Gemma2Config,
    Gemma3TextConfig,
    GemmaConfig,
    LlamaConfig,
    Phi3Config,
)

from cairn import LLM
from cairn.errors import ConfigError
from tests.helpers import poison_free_memory, tokens_of

TINY: dict[str, Any] = {
    "vocab_size": 67,
    "hidden_size": 32,
    "intermediate_size": 40,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "eos_token_id": None,
    "bos_token_id": None,
    "pad_token_id": 0,
}
CASES: dict[str, Any] = {
    "gemma": GemmaConfig(**TINY, head_dim=16),
    "phi3": Phi3Config(**TINY, sliding_window=25),
    "gemma3": Gemma3TextConfig(
        **TINY,
        head_dim=16,
        query_pre_attn_scalar=24,
        sliding_window=19,
        layer_types=["sliding_attention", "full_attention", "sliding_attention"],
    ),
}


def save(config: Any, folder: Path) -> Any:
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config, attn_implementation="eager").eval()
    for name, parameter in model.named_parameters():
        if "norm" not in name:
            parameter.data = torch.randn_like(parameter) / parameter.shape[-1] ** 0.5
    model.save_pretrained(folder)
    return model


@pytest.mark.parametrize("case", CASES)
@torch.no_grad()
def test_parity_with_transformers(case: str, tmp_path: Path) -> None:
    model = save(CASES[case], tmp_path)
    prompts = [tokens_of(length, seed=length, vocab=67) for length in (1, 40, 150)]
    options: dict[str, Any] = {"page_size": 16, "chunked_prefill_size": 33}
    with LLM(tmp_path, model_impl="transformers", device="cpu", dtype="float32", **options) as llm:
        poison_free_memory(llm.engine)
        results = llm.generate(prompts, max_tokens=20)
        for prompt, result in zip(prompts, results, strict=True):
            ids = torch.tensor([prompt])
            expected = model(ids).logits[0].log_softmax(-1)
            torch.testing.assert_close(llm.logprobs(prompt), expected, rtol=0, atol=2e-4)
            generated = model.generate(ids, max_new_tokens=20, do_sample=False)
            assert result.token_ids == generated[0, len(prompt) :].tolist()
        # Window layers are a group of their own here too.
        if case != "gemma":
            assert any(group.window for group in llm.engine.scheduler.cache.groups)


@pytest.mark.parametrize(
    ("config", "named"),
    [
        (Gemma2Config(**TINY, head_dim=16, query_pre_attn_scalar=16), "softcap"),
        (
            LlamaConfig(
                **TINY, rope_parameters={"rope_type": "dynamic", "factor": 2.0, "rope_theta": 1e4}
            ),
            "rope type 'dynamic'",
        ),
    ],
)
def test_what_paged_attention_cannot_do_is_refused_by_name(
    config: Any, named: str, tmp_path: Path
) -> None:
    save(config, tmp_path)
    with pytest.raises(ConfigError, match=named):
        LLM(tmp_path, model_impl="transformers", device="cpu")


def test_it_needs_a_folder_with_weights() -> None:
    with pytest.raises(ConfigError, match="needs a model folder"):
        LLM("qwen3-0.6b", model_impl="transformers", load_format="dummy")


def test_sparse_attention_works_on_transformers_code_too(tmp_path: Path) -> None:
    save(LlamaConfig(**TINY), tmp_path)
    ids = tokens_of(200, vocab=67)
    options: dict[str, Any] = {
        "dtype": "float32",
        "device": "cpu",
        "page_size": 16,
        "kv_cache_gib": 0.01,
        "attention_backend": "hsa",
        "hsa_topk": 3,
        "hsa_window": 20,
        "hsa_prefill": "sparse",
    }
    scores = []
    for implementation in ("cairn", "transformers"):
        with LLM(tmp_path, model_impl=implementation, **options) as llm:
            poison_free_memory(llm.engine)
            scores.append(llm.logprobs(ids))
    torch.testing.assert_close(scores[0], scores[1], rtol=0, atol=1e-5)
