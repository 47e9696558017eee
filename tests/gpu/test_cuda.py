"""The same code on a CUDA device."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from cairn import LLM, SamplingParams
from cairn.engine.plan import StepPlan
from cairn.engine.step_result import InFlight
from cairn.models.layers import Linear
from cairn.models.module import Factory
from tests.helpers import GOLDENS, TINY_LLAMA, poison_free_memory, tokens_of, write_model

pytestmark = pytest.mark.gpu
CASES = sorted(path.name for path in GOLDENS.glob("hf_*"))
DENSE = "hf_llama_gqa"
ROUTED = [case for case in CASES if "moe" in case or "deepseek" in case]
INDEXED = [case for case in ROUTED if "v32" in case or "dsa" in case]
HILS = sorted(path.parent.name for path in GOLDENS.glob("[!h]*/layer_intermediates.safetensors"))


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


@pytest.mark.parametrize(
    ("backend", "name"),
    [
        ("torch", DENSE),
        ("triton", DENSE),
        *(("triton", name) for name in ROUTED if name not in INDEXED),
        *(("dsa", name) for name in INDEXED),
    ],
)
def test_graphs_and_overlap_change_nothing(backend: str, name: str) -> None:
    """Greedy and seeded requests of many lengths, with every switch on and off."""
    case = GOLDENS / name
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
            assert (llm.engine.runner.stepper.graphs is not None) == (
                backend != "torch" and "disable_cuda_graph" not in switches
            )
            answers.append([r.token_ids for r in llm.generate(prompts, params)])
            llm.engine.scheduler.check()
    assert answers[0] == answers[1] == answers[2]


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
# Rounding may send a row to other experts, whose output has nothing in common.
@pytest.mark.parametrize("case", [case for case in CASES if case not in ROUTED])
def test_half_precision_stays_close(case: str, dtype: str) -> None:
    golden = load_file(GOLDENS / case / "golden.safetensors")
    ids = golden["input_ids_b"].tolist()
    expected = golden["logits_b"].log_softmax(-1)
    with LLM(GOLDENS / case, dtype=dtype, device="cuda", kv_cache_gib=0.1) as llm:
        error = (llm.logprobs(ids) - expected).square().mean().sqrt()
        assert error / expected.std() < (0.05 if dtype == "bfloat16" else 0.01)


def test_memory_fraction_sizes_the_pool() -> None:
    case = GOLDENS / DENSE
    free, total = torch.cuda.mem_get_info()
    share = 1 - (free - 2**28) / total  # leaves about a quarter of a gigabyte
    with LLM(case, device="cuda", mem_fraction_static=share) as llm:
        nbytes = sum(tensor.nbytes for tensor in llm.engine.runner.stepper.pool.tensors())
        assert 2**26 < nbytes < 1.1 * 2**28


def test_batched_and_warm_equals_alone() -> None:
    case = GOLDENS / DENSE
    golden = load_file(case / "golden.safetensors")
    prompts = [golden["input_ids_b"].tolist()[:n] for n in (1, 63, 64, 65, 200, 500)]
    with LLM(case, dtype="float64", device="cuda", kv_cache_gib=0.1) as llm:
        alone = [llm.generate(p, max_tokens=40, ignore_eos=True).token_ids for p in prompts]
        together = llm.generate(prompts, max_tokens=40, ignore_eos=True)
        assert [result.token_ids for result in together] == alone
        assert together[-1].usage.cached_tokens > 0


VARIANTS: dict[str, dict[str, Any]] = {
    "qwen2": {"architectures": ["Qwen2ForCausalLM"]},
    "llama3-rope": {
        "rope_scaling": {
            "rope_type": "llama3",
            "factor": 4.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 64,
        }
    },
    "yarn": {
        "rope_scaling": {
            "rope_type": "yarn",
            "factor": 4.0,
            "original_max_position_embeddings": 128,
        }
    },
    "linear": {"rope_scaling": {"rope_type": "linear", "factor": 2.0}},
    "dynamic": {"rope_scaling": {"rope_type": "dynamic", "factor": 2.0}},
    "biases": {"attention_bias": True, "mlp_bias": True},
}


@pytest.mark.parametrize("variant", VARIANTS)
def test_variants_equal_the_cpu(variant: str, tmp_path: Path) -> None:
    folder = write_model(tmp_path, {**TINY_LLAMA, **VARIANTS[variant]})
    ids = tokens_of(200)
    found = []
    for device in ("cpu", "cuda"):
        with LLM(folder, device=device, dtype="float32", kv_cache_gib=0.05) as llm:
            tokens = llm.generate(ids, max_tokens=20, ignore_eos=True).token_ids
            found.append((llm.logprobs(ids), tokens))
    torch.testing.assert_close(found[0][0], found[1][0], rtol=0, atol=5e-4)
    assert found[0][1] == found[1][1]


@pytest.mark.parametrize("policy", ["quest", "mean"])
def test_training_free_sparse_attention_equals_the_cpu(policy: str, tmp_path: Path) -> None:
    folder = write_model(tmp_path, TINY_LLAMA)
    ids = tokens_of(300)
    found = []
    for device in ("cpu", "cuda"):
        with LLM(
            folder,
            device=device,
            dtype="float32",
            kv_cache_gib=0.05,
            page_size=16,
            attention_backend="hsa",
            hsa_policy=policy,
            hsa_topk=4,
            hsa_window=32,
            hsa_prefill="sparse",
            hsa_dense_below=0,
        ) as llm:
            poison_free_memory(llm.engine)
            tokens = llm.generate(ids, max_tokens=40, ignore_eos=True).token_ids
            found.append((llm.logprobs(ids), tokens))
    torch.testing.assert_close(found[0][0], found[1][0], rtol=0, atol=5e-4)
    assert found[0][1] == found[1][1]


def test_filters_that_leave_one_token_draw_the_greedy_one() -> None:
    case = GOLDENS / DENSE
    ids = load_file(case / "golden.safetensors")["input_ids_a"].tolist()
    with LLM(case, dtype="float32", device="cuda", kv_cache_gib=0.1) as llm:
        greedy = llm.generate(ids, max_tokens=20, ignore_eos=True).token_ids
        for narrow in ({"top_k": 1}, {"top_p": 1e-6}, {"min_p": 1.0}):
            params = SamplingParams(max_tokens=20, temperature=1.0, ignore_eos=True, **narrow)
            assert llm.generate(ids, params).token_ids == greedy, narrow
        banned = SamplingParams(max_tokens=1, logit_bias={greedy[0]: -100.0})
        assert llm.generate(ids, banned).token_ids != greedy[:1]


def test_retraction_changes_no_token() -> None:
    """A pool that holds half of what runs at once."""
    case = GOLDENS / DENSE
    golden = load_file(case / "golden.safetensors")
    prompts = [golden["input_ids_b"].tolist()[i : i + 100] for i in range(6)]
    params = SamplingParams(max_tokens=150, ignore_eos=True)
    answers, memory = [], 0.1
    for enough in (True, False):
        with LLM(case, dtype="float32", device="cuda", page_size=16, kv_cache_gib=memory) as llm:
            answers.append([r.token_ids for r in llm.generate(prompts, params)])
            assert (llm.engine.scheduler.stats.retractions == 0) == enough
            pages = llm.engine.scheduler.cache.allocators[0].num_pages
            memory *= 48 / pages
    assert answers[0] == answers[1]


@pytest.mark.parametrize("rows", [1, 2, 5, 8])
@pytest.mark.parametrize("before", ["nothing", "silu", "norm"])
@pytest.mark.parametrize(
    ("out", "width"), [(100, 1030), (1024, 3072), (4096, 1024), (64, 4100), (5130, 1536)]
)
def test_products_of_few_rows(rows: int, before: str, out: int, width: int) -> None:
    from cairn.kernels.gemv import gemv
    from cairn.kernels.references import gemv_reference

    torch.manual_seed(0)
    like: dict[str, Any] = {"device": "cuda", "dtype": torch.bfloat16}
    weight = torch.randn(out, width, **like) * width**-0.5
    x = torch.randn(rows, 2 * width if before == "silu" else width, **like)
    norm = (torch.rand(width, **like), 1e-6) if before == "norm" else None
    stream = torch.randn(rows, out, **like)
    found = gemv(x, weight, silu=before == "silu", norm=norm, add_to=stream.clone())
    wide = None if norm is None else (norm[0].double(), norm[1])
    expected = gemv_reference(
        x.double(), weight.double(), silu=before == "silu", norm=wide, add_to=stream.double()
    )
    error = (found.double() - expected).norm() / expected.norm()
    assert error < 1e-2


@pytest.mark.parametrize(("rows", "width"), [(1, 7168), (5, 1000), (16, 9000)])
def test_products_with_few_outputs(rows: int, width: int) -> None:
    from cairn.kernels.gemv import narrow_product

    torch.manual_seed(0)
    x = torch.randn(rows, width, device="cuda", dtype=torch.bfloat16)
    weight = torch.randn(16, width, device="cuda")
    expected = x.double() @ weight.double().t() * 0.5
    found = narrow_product(x, weight, 0.5).double()
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-3)


@pytest.mark.parametrize("rows", [9, 100, 129, 256])
def test_products_in_parts(rows: int) -> None:
    torch.manual_seed(0)
    factory = Factory(torch.bfloat16, torch.device("cuda"), fused=True)
    linear = Linear(3072, {"down_proj": 1024}, factory)
    linear.weight.normal_()
    x = torch.randn(rows, 3072, dtype=torch.bfloat16, device="cuda")
    parts = linear.in_parts(x)
    assert len(parts) == (4 if rows <= 128 else 2) and parts.dtype == torch.float32
    expected = x.double() @ linear.weight.double().T
    torch.testing.assert_close(parts.sum(0).double(), expected, rtol=1e-4, atol=1e-2)


@pytest.mark.parametrize("dim", [16, 80, 128, 256])
def test_prompts_of_heads_of_any_size(dim: int) -> None:
    from cairn.kernels.paged_extend import ExtendBlocks, paged_extend

    torch.manual_seed(0)
    rows, heads, size = 200, 2, 64
    pages = -(-rows // size)
    pool = torch.randn(pages + 1, 2, size, dim, device="cuda", dtype=torch.bfloat16)
    query = torch.randn(rows, heads, dim, device="cuda", dtype=torch.bfloat16)
    table = torch.arange(1, pages + 2, device="cuda", dtype=torch.int32)[None] % (pages + 1)
    out = torch.empty_like(query)
    blocks = ExtendBlocks.of(np.array([rows]), np.array([0]), query.device)
    bounds = torch.tensor([0, rows], device="cuda", dtype=torch.int32)
    paged_extend(query, pool, table, bounds[1:], bounds, blocks, out, scale=dim**-0.5)
    key, value = pool[1:].transpose(0, 1).reshape(2, -1, dim)[:, :rows].float()
    expected = torch.nn.functional.scaled_dot_product_attention(
        query.transpose(0, 1).float(), key[None], value[None], is_causal=True
    ).transpose(0, 1)
    assert (out.float() - expected).norm() / expected.norm() < 1e-2


@pytest.mark.parametrize("case", [DENSE, HILS[0]])
def test_steps_are_launched_without_waiting_for_the_device(
    case: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Chunks and decode steps, behind a device that sleeps until all of a step is launched."""
    options: dict[str, Any] = {"dtype": "float32", "device": "cuda", "kv_cache_gib": 0.1}
    with LLM(GOLDENS / case, chunked_prefill_size=128, **options) as llm:
        prompts = [tokens_of(300), tokens_of(300, seed=1)]
        llm.generate(prompts[0], max_tokens=4, ignore_eos=True)  # compiles and allocates
        launch, awake = llm.engine.runner.launch, []

        def behind_a_sleep(plan: StepPlan) -> InFlight:
            torch.cuda._sleep(1_000_000_000)  # type: ignore[no-untyped-call]  # half a second
            slept = torch.cuda.Event()  # type: ignore[no-untyped-call]
            slept.record()
            step = launch(plan)
            awake.append(slept.query())  # type: ignore[no-untyped-call]
            return step

        monkeypatch.setattr(llm.engine.runner, "launch", behind_a_sleep)
        llm.generate(prompts[1], max_tokens=4, ignore_eos=True)
    assert len(awake) > 3 and not any(awake)
