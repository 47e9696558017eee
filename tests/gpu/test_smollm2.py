"""Real weights on a CUDA device, against the CPU."""

from __future__ import annotations

import pytest
import torch

from cairn import LLM
from cairn.models.pull import pulled_path
from tests.test_smollm2 import PROMPTS

pytestmark = pytest.mark.gpu


def test_greedy_text_in_float32_equals_the_cpu() -> None:
    if not pulled_path("smollm2").exists():
        pytest.skip("the model is not here; cairn pull smollm2 fetches it")
    answers = []
    for device in ("cpu", "cuda"):
        with LLM(
            "smollm2", device=device, quantization="none", dtype="float32", kv_cache_gib=1
        ) as llm:
            answers.append([r.token_ids for r in llm.generate(PROMPTS, max_tokens=64)])
    assert answers[0] == answers[1]


def test_cuts_of_a_prompt_change_scores_no_more_than_other_roundings_would() -> None:
    """By backends that widen pages, in recorded and other steps, and by plain torch. Products of
    other shapes change numbers by a rounding of bfloat16. Where that changes a number of 8 bits,
    the change grows from layer to layer, at most to that of another draw of all roundings: the root
    of two times what one draw changes."""
    if not pulled_path("smollm2").exists():
        pytest.skip("the model is not here; cairn pull smollm2 fetches it")
    prompt = " ".join(PROMPTS * 20)
    options = {"device": "cuda", "dtype": "bfloat16", "kv_cache_gib": 1}
    found = []
    for more in (
        {"kv_cache_dtype": "auto"},
        {},
        {"chunked_prefill_size": 300},
        {"disable_cuda_graph": True, "chunked_prefill_size": 100},
        {"attention_backend": "triton"},
        {"attention_backend": "torch"},
    ):
        own = {**options, "kv_cache_dtype": "fp8", **more}
        with LLM("smollm2", quantization="none", **own) as llm:
            assert llm.tokenizer is not None
            ids = llm.tokenizer.encode(prompt)[:1000]
            found.append(llm.logprobs(ids).float().cpu())
    rounding, *cuts = (
        ((other - found[1]).square().mean().sqrt() / found[1].std()).item()
        for other in (found[0], *found[2:])
    )
    assert rounding < 0.2 and max(cuts) < 1.5 * rounding, f"rounding {rounding:.3f}, cuts {cuts}"


@pytest.mark.parametrize("quantization", ["fp8", "int4", "int8", "keep"])
def test_steps_with_quantised_weights_choose_what_prompts_score_best(quantization: str) -> None:
    """One row at a time in recorded steps, against all rows at once, whose products are others."""
    if not pulled_path("smollm2").exists():
        pytest.skip("the model is not here; cairn pull smollm2 fetches it")
    with LLM(
        "smollm2", device="cuda", dtype="bfloat16", kv_cache_gib=1, quantization=quantization
    ) as llm:
        assert llm.tokenizer is not None
        prompt = llm.tokenizer.encode(PROMPTS[0])
        answer = llm.generate(prompt, max_tokens=48, ignore_eos=True).token_ids
        scores = llm.logprobs([*prompt, *answer]).float().cpu()[len(prompt) - 1 : -1]
    behind = scores.max(-1).values - scores.gather(1, torch.tensor(answer)[:, None])[:, 0]
    assert behind.max() < 0.5, f"a chosen token is {behind.max():.2f} behind the best"
