"""Two ranks give what one gives: every family, in float32 log-probs and in float64 tokens."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from cairn import LLM, SamplingParams
from tests.engine.tiered import tiered
from tests.helpers import (
    GOLDENS,
    TINY,
    TINY_DSA,
    TINY_HILS,
    TINY_LLAMA,
    tokens_of,
    write_model,
)
from tests.parallel.ranks import SPARSE, in_step, load

GOLDEN = sorted(p.parent.name for p in GOLDENS.glob("*/config.json"))
ONE_KV_HEAD = ("qwen_swamix_chunk64", "hf_qwen3_moe_mixed_tied")
QWEN2 = {**TINY, "architectures": ["Qwen2ForCausalLM"]}
BIASED = {**TINY_LLAMA, "attention_bias": True, "mlp_bias": True, "tie_word_embeddings": True}
SCARCE = {"frames": 16, "pages": 60, "hot": 8}
"""A host tier, and so little on the device that pages leave it as soon as they can."""
ASYNC = {**SCARCE, "hisparse_config": '{"host_gib": 0.1, "async_backup": true}'}
LAYER_NORMS = {"layerwise_qk_norm": True, "layerwise_lmkq_norm": True, "shared_q_c": True}
MADE: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "qwen2": (QWEN2, {}),
    "llama-biased-tied": (BIASED, {}),
    "quest": (TINY_LLAMA, SPARSE),
    "mean": (TINY_LLAMA, {**SPARSE, "hsa_policy": "mean", "hsa_dense_below": 50}),
    "dense-prompt": (TINY_LLAMA, {**SPARSE, "hsa_prefill": "dense"}),
    "quest-tier": (TINY_LLAMA, SCARCE),
    "quest-tier-async": (TINY_LLAMA, ASYNC),
    "dense-prompt-tier": (TINY_LLAMA, SCARCE),
    "hils-tier": (TINY_HILS, SCARCE),
    "rows-tier": (TINY_DSA, SCARCE),
    "full-calibration": ({**TINY_HILS, "lmk_q_lora_dim": -1}, {}),
    "layer-norms": ({**TINY_HILS, **LAYER_NORMS}, {}),
}
PROMPTS = [tokens_of(length, length) for length in (1, 37, 150)]


@pytest.fixture
def case(request: pytest.FixtureRequest, tmp_path: Path) -> tuple[Path, dict[str, Any]]:
    name = request.param
    if name in MADE:
        config, options = MADE[name]
        return write_model(tmp_path / name, config), options
    # Page size follows the model where it was trained with one.
    return GOLDENS / name, {} if name.startswith("hf") else {"page_size": None}


def start(case: tuple[Path, dict[str, Any]], tp: int, dtype: str, **more: Any) -> LLM:
    folder, options = case
    how = tiered if "frames" in options else load
    return how(folder, tp=tp, dtype=dtype, **options, **more)


def check(llm: LLM) -> None:
    in_step(llm.engine)
    report = llm.engine.tier()
    if report is not None:
        assert report.totals.bytes_out > 0
        # How soon pages leave the device, where they are copied beside it, is a matter of time.
        assert report.totals.bytes_in > 0 or "async" in str(llm.config.hisparse_config)


def scores(llm: LLM) -> list[torch.Tensor]:
    return [llm.logprobs(prompt) for prompt in PROMPTS]


def generated(llm: LLM) -> list[list[int]]:
    """Greedy and random, batched, then again from the cache."""
    prompts = [*PROMPTS, PROMPTS[-1][:100] + tokens_of(30, 9)]
    params = [
        SamplingParams(max_tokens=24, ignore_eos=True),
        SamplingParams(max_tokens=20, ignore_eos=True, temperature=0.8, seed=5, top_p=0.9),
        SamplingParams(max_tokens=30, ignore_eos=True, repetition_penalty=1.2),
        SamplingParams(max_tokens=10, ignore_eos=True, temperature=1.0, seed=7),
    ]
    return [each.token_ids for _ in range(2) for each in llm.generate(prompts, params)]


FAMILIES = [name for name in GOLDEN if name not in ONE_KV_HEAD] + list(MADE)
QUICK = ("hf_olmo3_mha_swa", "quest-tier")
"""Tokens of the others take as long again, and differ only where log-probs do."""


LATER = {"hf_deepseek_v2_groups", "hf_deepseek_v3_no_q_lora", "hf_glm_moe_dsa_full"}
LATER |= {"rows-tier"}
LATER |= {name for name in FAMILIES if name.startswith("hf_deepseek_v32")}
"""Like others of their family."""


@pytest.mark.parametrize(
    "case",
    [pytest.param(x, marks=pytest.mark.slow if x in LATER else ()) for x in FAMILIES],
    indirect=True,
)
def test_log_probs_of_two_ranks_are_those_of_one(case: tuple[Path, dict[str, Any]]) -> None:
    with start(case, 1, "float32") as llm:
        expected = scores(llm)
    with start(case, 2, "float32", chunked_prefill_size=40) as llm:
        for ours, whole in zip(scores(llm), expected, strict=True):
            torch.testing.assert_close(ours, whole, rtol=0, atol=1e-4)
        check(llm)


@pytest.mark.parametrize(
    "case",
    [pytest.param(x, marks=() if x in QUICK else pytest.mark.slow) for x in FAMILIES],
    indirect=True,
)
def test_tokens_of_two_ranks_are_those_of_one(case: tuple[Path, dict[str, Any]]) -> None:
    with start(case, 1, "float64") as llm:
        expected = generated(llm)
    with start(case, 2, "float64", chunked_prefill_size=40) as llm:
        assert generated(llm) == expected
        check(llm)
        assert llm.engine.scheduler.cache.stats.hit_tokens > 0
