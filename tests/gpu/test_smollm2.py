"""Real weights on a CUDA device, against the CPU."""

from __future__ import annotations

import pytest

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
