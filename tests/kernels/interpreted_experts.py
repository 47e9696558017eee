"""Kernels of routers, experts and latent attention in the interpreter. Run by test_kernels.py."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from cairn import LLM
from cairn.attention import triton_backend
from cairn.attention.triton_backend import TritonBackend
from cairn.kernels import experts as experts_module
from cairn.kernels import latent as latent_module
from cairn.kernels.route import route
from cairn.models import layers, loader
from cairn.models.module import Factory
from tests.helpers import GOLDENS, poison_free_memory, tokens_of
from tests.kernels import expert_case, latent_case
from tests.kernels.expert_case import Sizes

CPU = torch.device("cpu")


@pytest.mark.parametrize("name", expert_case.ROUTERS)
def test_routers(name: str) -> None:
    expert_case.check_router(name, CPU, torch.float32, rows=5)


def test_a_router_chooses_experts_even_among_nan() -> None:
    options = expert_case.ROUTERS["sigmoid-groups"]
    logits = torch.full((1, options.experts), float("nan"))
    bias = torch.zeros(options.experts)
    weights, ids = route(logits, bias, options, torch.float32)
    assert ((ids >= 0) & (ids < options.experts)).all() and weights.isnan().all()


@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("rows", [1, 3, 5, 40])
@pytest.mark.parametrize("sizes", [Sizes(8, 2, 64, 128), Sizes(5, 3, 40, 24)], ids=str)
def test_experts(sizes: Sizes, rows: int, fused: bool) -> None:
    expert_case.check_experts(sizes, rows, CPU, torch.float32, fused=fused)


def test_blocks_of_pairs_when_one_expert_has_most(monkeypatch: pytest.MonkeyPatch) -> None:
    """And pairs are sorted in several goes."""
    small = experts_module._FLOAT32._replace(pairs=16, sorted_at_once=32)
    monkeypatch.setattr(experts_module, "_FLOAT32", small)
    sizes = Sizes(experts=7, per_token=2, hidden=32, inter=32)
    expert_case.check_experts(sizes, 60, CPU, torch.float32, skewed=True)


def test_weight_tiles_by_descriptor(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(experts_module, "can_describe", lambda *_: True)
    sizes = Sizes(experts=4, per_token=2, hidden=72, inter=40)
    expert_case.check_experts(sizes, 20, CPU, torch.float32)


LATENT_CASES = [
    ([1, 15, 16, 17, 300], [1, 1, 1, 1, 1], latent_case.Sizes(4, 32, 16, 16)),
    ([400], [1], latent_case.Sizes(20, 24, 8, 64)),
    ([70, 64, 130], [1, 1, 1], latent_case.Sizes(2, 64, 16, 64)),
    ([70, 33, 5, 100, 1], [70, 1, 5, 3, 1], latent_case.Sizes(3, 24, 8, 16)),
    ([90, 70], [4, 2], latent_case.Sizes(20, 64, 16, 64)),
]


@pytest.mark.parametrize("case", LATENT_CASES, ids=str)
def test_latent_attention(
    case: tuple[list[int], list[int], latent_case.Sizes], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Shares end within sequences, at their ends, and span several. Rows of 64 + 16 columns are
    loaded through descriptors."""
    monkeypatch.setattr(latent_module, "_LEAST_ROWS", 1)
    monkeypatch.setattr(latent_module, "can_describe", lambda *_: True)
    latent_case.check(*case, CPU, torch.float32, tolerance=1e-5)


def test_tiles_of_several_pages(monkeypatch: pytest.MonkeyPatch) -> None:
    """Shares end within a tile and before the end of their sequence."""
    monkeypatch.setattr(latent_module, "_LEAST_ROWS", 1)
    monkeypatch.setattr(latent_module, "_TILE_FLOAT32", (64, 1))
    sizes = latent_case.Sizes(4, 32, 16, 16)
    latent_case.check([1, 40, 300, 700], [1, 1, 1, 1], sizes, CPU, torch.float32, tolerance=1e-5)


@pytest.mark.parametrize(
    "case",
    ["hf_qwen3_moe_norm", pytest.param("hf_deepseek_v3_yarn_groups", marks=pytest.mark.slow)],
)
def test_a_whole_engine(case: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Chunked prefill, a mixed step and decode, against torch."""
    options: dict[str, Any] = {"device": "cpu", "dtype": "float32", "kv_cache_gib": 0.02}
    options |= {"page_size": 16, "chunked_prefill_size": 16, "max_running_requests": 2}
    prompts = [tokens_of(17), tokens_of(2, seed=1)]
    answers = []
    for kernels in (False, True):
        if kernels:
            monkeypatch.setattr(TritonBackend, "unavailable_reason", staticmethod(lambda _: None))
            monkeypatch.setattr(
                loader, "Factory", lambda dtype, device, *_: Factory(dtype, device, True)
            )
            monkeypatch.setattr(layers, "_column_blocks", lambda _: 0)  # weights lie as on a GPU
        backend = "triton" if kernels else "torch"
        with LLM(GOLDENS / case, attention_backend=backend, **options) as llm:
            poison_free_memory(llm.engine)
            results = llm.generate(prompts, max_tokens=2, ignore_eos=True)
            answers.append([result.token_ids for result in results])
    assert answers[0] == answers[1]


@pytest.mark.parametrize("at_once", [1, 10**6])
def test_both_forms_of_latent_attention(at_once: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """However many heads are expanded at once."""
    monkeypatch.setattr(triton_backend, "_EXPANDED", at_once)
    latent_case.check_forms(CPU, torch.float32, tolerance=1e-5)
