"""Rows of 8 bits: kernels against their references, and a whole model."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from cairn import LLM
from cairn.attention.dsa_backend import DSABackend
from cairn.kernels.fp8_rows import FP8, widen
from cairn.kernels.references import rope_kv_reference
from cairn.kernels.rope_kv import rope_kv
from tests.helpers import TINY_LATENT, tokens_of, write_model
from tests.kernels import latent_case, row_case
from tests.kernels.rope_case import weighed_errors

pytestmark = pytest.mark.gpu
CUDA = torch.device("cuda")
NARROW = pytest.mark.parametrize("narrow", [FP8, torch.int8], ids=["fp8", "int8"])
TYPES = pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
TOLERANCE = {torch.bfloat16: 1e-2, torch.float16: 1e-2, torch.float32: 1e-5}


@NARROW
@pytest.mark.parametrize("width", [576, 48])
def test_rows_are_stored_as_in_torch(width: int, narrow: torch.dtype) -> None:
    row_case.check_store(width, CUDA, narrow)


@pytest.mark.parametrize("hadamard", [True, False])
@pytest.mark.parametrize("dim", [32, 64, 128, 256])
@pytest.mark.parametrize(("rows", "heads", "kv_heads"), [(1, 16, 8), (70, 9, 3), (2000, 16, 2)])
def test_keys_and_values_are_stored_as_in_torch(
    rows: int, heads: int, kv_heads: int, dim: int, hadamard: bool
) -> None:
    """With a Hadamard matrix or norms. In float32, so that rope rounds alike. Where two scales are
    about as good, either is chosen."""
    torch.manual_seed(0)
    qkv = torch.randn(rows, (heads + 2 * kv_heads) * dim, device=CUDA)
    cos, sin = torch.randn(2, rows, dim, device=CUDA)
    weights = (None, None) if hadamard else torch.randn(2, dim, device=CUDA).unbind()
    place = torch.randperm(rows, device=CUDA)
    places = (place // 64).int(), (place % 64).int()
    more = -(-4 * 64 // dim)
    exact = torch.zeros(-(-rows // 64), 2 * kv_heads, 64, dim, device=CUDA)
    narrow = [torch.nn.functional.pad(exact, (0, 0, 0, more)).to(FP8) for _ in range(2)]
    queries = []
    stores = rope_kv, rope_kv_reference, rope_kv_reference
    for store, pages in zip(stores, (*narrow, exact), strict=True):
        arguments = qkv, cos, sin, *weights, 1e-6, pages, *places, heads
        queries.append(store(*arguments, hadamard=hadamard)[0])
    torch.testing.assert_close(queries[0], queries[1], rtol=1e-5, atol=1e-4)
    kept, expected = (widen(pages, torch.float32) for pages in narrow)
    equal = ((kept - expected).abs() <= 1e-5 * expected.abs()).all(-1)
    assert equal.float().mean() > 0.98
    errors, best = (weighed_errors(pages, exact, places, queries[1]) for pages in narrow)
    assert (errors <= 1.001 * best).double().mean() > 0.99
    torch.testing.assert_close(errors.sum(), best.sum(), rtol=1e-3, atol=0)


@NARROW
@TYPES
@pytest.mark.parametrize("page_size", [16, 64])
def test_index_scan(page_size: int, dtype: torch.dtype, narrow: torch.dtype) -> None:
    sizes, tolerance = row_case.Sizes(64, 128, page_size), 1e-5 if dtype == torch.float32 else 1e-3
    for new, lengths in (([1] * 5, [1, 63, 64, 65, 9000]), ([5, 130, 1], [64, 2000, 5000])):
        row_case.check_scan(lengths, new, sizes, CUDA, dtype, tolerance=tolerance, narrow=narrow)


@NARROW
@TYPES
@pytest.mark.parametrize("heads", [128, 20])
def test_row_attention(heads: int, dtype: torch.dtype, narrow: torch.dtype) -> None:
    sizes = latent_case.Sizes(heads, 512, 64, 64)
    for counts in ([2048], [1, 2048, 700, 0, 1999], [2048] * 12):
        row_case.check_attention(
            counts, 2048, sizes, CUDA, dtype, tolerance=TOLERANCE[dtype], narrow=narrow
        )


@NARROW
@TYPES
@pytest.mark.parametrize("sizes", [(128, 512, 64, 64), (16, 512, 64, 16), (5, 40, 24, 16)])
def test_latent_attention(
    sizes: tuple[int, int, int, int], dtype: torch.dtype, narrow: torch.dtype
) -> None:
    own, options = latent_case.Sizes(*sizes), {"tolerance": TOLERANCE[dtype], "narrow": narrow}
    for lengths, new in (([1, 64, 65, 700, 3000], [1] * 5), ([700, 33, 5], [70, 1, 5])):
        latent_case.check(lengths, new, own, CUDA, dtype, **options)  # type: ignore[arg-type]


def test_forms_of_latent_attention() -> None:
    latent_case.check_forms(CUDA, torch.float32, tolerance=1e-5, narrow=FP8)
    latent_case.check_forms(CUDA, torch.bfloat16, tolerance=2e-2, narrow=FP8)


@pytest.mark.parametrize("tier", [False, True])
@pytest.mark.parametrize("name", ["fp8", "int8"])
def test_an_indexed_model_by_kernels_and_in_torch(name: str, tier: bool, tmp_path: Path) -> None:
    """In float32, on a GPU and in plain torch on a CPU; with a host tier or without. A number that
    is rounded otherwise may change a selection, and with it some tokens."""
    config = {**TINY_LATENT, "architectures": ["GlmMoeDsaForCausalLM"], "hidden_size": 64}
    config |= {"indexer_types": ["full", "shared"], "index_n_heads": 4, "index_head_dim": 32}
    folder = write_model(tmp_path, {**config, "index_topk": 100, "max_position_embeddings": 2000})
    options: dict[str, Any] = {"dtype": "float32", "page_size": 16, "kv_cache_dtype": name}
    options |= {"chunked_prefill_size": 256, "kv_cache_gib": 0.05, "max_running_requests": 4}
    prompts = [tokens_of(n, seed=n) for n in (900, 350, 40)]
    more = {"enable_hisparse": True, "hisparse_config": '{"host_gib": 0.1}'} if tier else {}
    scores, answers = [], []
    for device, own in (("cpu", {}), ("cuda", more)):
        with LLM(folder, device=device, **options, **own) as llm:
            backend = llm.engine.runner.stepper.backend
            assert isinstance(backend, DSABackend)
            assert (backend._kernels is not None) == (device == "cuda")
            scores.append(llm.logprobs(prompts[0]).cpu())
            results = llm.generate(prompts, max_tokens=24, ignore_eos=True)
            answers.append([result.token_ids for result in results])
    errors = (scores[0] - scores[1]).square().mean(-1).sqrt() / scores[0].std(-1).mean()
    assert errors.median() < 1e-3, f"median error {errors.median():.1e}"
    equal = [one == other for one, other in zip(*answers, strict=True)]
    assert sum(equal) >= 2, answers
