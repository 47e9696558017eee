"""The same code on a CUDA device."""

from __future__ import annotations

import pytest
import torch
from safetensors.torch import load_file

from cairn import LLM, SamplingParams
from tests.helpers import GOLDENS, poison_free_memory

pytestmark = pytest.mark.gpu
CASES = sorted(path.name for path in GOLDENS.glob("hf_*"))
HILS = sorted(path.parent.name for path in GOLDENS.glob("*/layer_intermediates.safetensors"))


@pytest.mark.parametrize("case", CASES)
def test_golden_logits_in_float32(case: str) -> None:
    golden = load_file(GOLDENS / case / "golden.safetensors")
    with LLM(GOLDENS / case, dtype="float32", device="cuda", kv_cache_gib=0.1) as llm:
        poison_free_memory(llm.engine)
        for name in "ab":
            ids = golden[f"input_ids_{name}"].tolist()
            expected = golden[f"logits_{name}"].log_softmax(-1)
            torch.testing.assert_close(llm.logprobs(ids), expected, rtol=0, atol=5e-4)
            result = llm.generate(ids, max_tokens=32, ignore_eos=True)
            assert result.token_ids == golden[f"greedy_ids_{name}"].tolist()


@pytest.mark.parametrize("case", HILS)
def test_golden_hils_logits_in_float32(case: str) -> None:
    golden = load_file(GOLDENS / case / "golden.safetensors")
    with LLM(GOLDENS / case, dtype="float32", device="cuda", kv_cache_gib=0.1) as llm:
        poison_free_memory(llm.engine)
        vocab = llm.engine.spec.vocab_size
        for name in ("a", "b", "short", "edge"):
            ids = golden[f"input_ids_{name}"].tolist()
            expected = golden[f"logits_{name}"][:, :vocab].log_softmax(-1)
            torch.testing.assert_close(llm.logprobs(ids), expected, rtol=0, atol=5e-4)


@pytest.mark.parametrize("backend", ["torch", "triton"])
def test_graphs_and_overlap_change_nothing(backend: str) -> None:
    """Greedy and seeded requests of many lengths, with every switch on and off."""
    case = GOLDENS / CASES[0]
    golden = load_file(case / "golden.safetensors")
    prompts = [golden["input_ids_b"].tolist()[:n] for n in (1, 15, 16, 17, 63, 64, 65, 200, 500)]
    params = [
        SamplingParams(max_tokens=30 + i, temperature=0.7 * (i % 2), seed=i, ignore_eos=i % 3 > 0)
        for i in range(len(prompts))
    ]
    answers = []
    for switches in ({}, {"disable_cuda_graph": True}, {"disable_overlap_schedule": True}):
        with LLM(
            case,
            dtype="float32",
            device="cuda",
            kv_cache_gib=0.1,
            attention_backend=backend,
            page_size=16,
            max_running_requests=8,
            **switches,
        ) as llm:
            assert (llm.engine._runner.graph_sizes > 0) == (
                backend == "triton" and "disable_cuda_graph" not in switches
            )
            answers.append([r.token_ids for r in llm.generate(prompts, params)])
            llm.engine.scheduler.check()
    assert answers[0] == answers[1] == answers[2]


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("case", CASES)
def test_half_precision_stays_close(case: str, dtype: str) -> None:
    golden = load_file(GOLDENS / case / "golden.safetensors")
    ids = golden["input_ids_b"].tolist()
    expected = golden["logits_b"].log_softmax(-1)
    with LLM(GOLDENS / case, dtype=dtype, device="cuda", kv_cache_gib=0.1) as llm:
        error = (llm.logprobs(ids) - expected).square().mean().sqrt()
        assert error / expected.std() < (0.05 if dtype == "bfloat16" else 0.01)


def test_memory_fraction_sizes_the_pool() -> None:
    case = GOLDENS / CASES[0]
    free, total = torch.cuda.mem_get_info()
    share = 1 - (free - 2**28) / total  # leaves about a quarter of a gigabyte
    with LLM(case, device="cuda", mem_fraction_static=share) as llm:
        assert 2**26 < llm.engine._runner._pool.nbytes < 1.1 * 2**28


def test_batched_and_warm_equals_alone() -> None:
    case = GOLDENS / CASES[0]
    golden = load_file(case / "golden.safetensors")
    prompts = [golden["input_ids_b"].tolist()[:n] for n in (1, 63, 64, 65, 200, 500)]
    with LLM(case, dtype="float64", device="cuda", kv_cache_gib=0.1) as llm:
        alone = [llm.generate(p, max_tokens=40, ignore_eos=True).token_ids for p in prompts]
        together = llm.generate(prompts, max_tokens=40, ignore_eos=True)
        assert [result.token_ids for result in together] == alone
        assert together[-1].usage.cached_tokens > 0
