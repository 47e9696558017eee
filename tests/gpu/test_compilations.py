"""Nothing is compiled, or loaded from disk, once an engine is ready: whatever is asked of it."""

from __future__ import annotations

import importlib
import pkgutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import cairn.kernels
from cairn import LLM, SamplingParams
from cairn.engine.plan import Allowed
from tests.engine.tiered import tiered
from tests.helpers import (
    TINY_EXPERTS,
    TINY_HILS,
    TINY_LATENT,
    TINY_LLAMA,
    TINY_OLMO3,
    tokens_of,
    write_model,
)

pytestmark = pytest.mark.gpu

LARGE = {"hidden_size": 64, "max_position_embeddings": 40_000}  # heads of 16
INDEX = {
    "architectures": ["GlmMoeDsaForCausalLM"],
    "indexer_types": ["full", "shared"],
    "index_n_heads": 4,
    "index_head_dim": 32,
    "index_topk": 100,
}
SPARSE = {"attention_backend": "hsa", "page_size": 16, "hsa_topk": 3, "hsa_window": 32}
SPREAD = {"attention_backend": "hsa", "hsa_policy": "spread", "hsa_dense_below": 0}
MODELS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "dense": ({**TINY_LLAMA, **LARGE}, {}),
    "windows": ({**TINY_OLMO3, **LARGE}, {}),
    "experts": ({**TINY_EXPERTS, **LARGE}, {}),
    "fp8": ({**TINY_LLAMA, **LARGE}, {"quantization": "fp8"}),
    "fp8-experts": ({**TINY_EXPERTS, **LARGE}, {"quantization": "fp8"}),
    "int4": ({**TINY_LLAMA, **LARGE, "tie_word_embeddings": True}, {"quantization": "int4"}),
    "codes": (
        {**TINY_LLAMA, **LARGE, "hidden_size": 256, "intermediate_size": 1024},
        {"quantization": "int4"},
    ),
    "latents": ({**TINY_LATENT, **LARGE}, {}),
    "index": ({**TINY_LATENT, **LARGE, **INDEX}, {}),
    "index-8-bits": ({**TINY_LATENT, **LARGE, **INDEX}, {"kv_cache_dtype": "int8"}),
    "hils": ({**TINY_HILS, **LARGE, "full_attn_interleave": 2}, {}),
    "quest": ({**TINY_LLAMA, **LARGE}, {**SPARSE, "hsa_policy": "quest", "hsa_sinks": 1}),
    "spread": ({**TINY_LLAMA, **LARGE}, SPREAD),
    "spread-prompts": ({**TINY_LLAMA, **LARGE}, {**SPREAD, "hsa_prefill": "sparse"}),
    "mean": ({**TINY_LLAMA, **LARGE}, {**SPARSE, "hsa_policy": "mean", "hsa_layers": "1"}),
}
OPTIONS: dict[str, Any] = {"device": "cuda", "dtype": "bfloat16", "max_running_requests": 80}
GREEDY = SamplingParams(max_tokens=20, ignore_eos=True)
WAYS = {
    "greedy": GREEDY,
    "drawn": SamplingParams(max_tokens=20, temperature=0.8, seed=3, ignore_eos=True),
    "filtered": SamplingParams(max_tokens=20, temperature=1, top_k=7, top_p=0.9, ignore_eos=True),
    "penalized": SamplingParams(max_tokens=20, repetition_penalty=1.2, ignore_eos=True),
    "biased": SamplingParams(max_tokens=20, logit_bias={5: 2.0}, ignore_eos=True),
    "scored": SamplingParams(max_tokens=20, logprobs=3, prompt_logprobs=2, ignore_eos=True),
}


@pytest.fixture(autouse=True)
def forgotten_kernels() -> Iterator[None]:
    """No kernel is in memory: not even those of engines that were here before."""
    from cairn.kernels.launch import DirectKernel

    for module in pkgutil.iter_modules(cairn.kernels.__path__, "cairn.kernels."):
        if module.name != "cairn.kernels.compile_worker":
            for kernel in vars(importlib.import_module(module.name)).values():
                if isinstance(kernel, DirectKernel):
                    kernel._compiled.clear()
                    kernel.jit.device_caches.clear()
    yield


def use(llm: LLM) -> None:
    """Alone and together, short and long, in chunks and beside each other, in all ways."""
    longest = llm.engine.max_tokens - 30
    for length in (1, 2, 7, 15, 16, 17, 63, 64, 65, 130, 500, 1100, 2100, 9000, 30_000):
        if length < longest:
            llm.generate(tokens_of(length, seed=length), GREEDY)
    for way in WAYS.values():
        llm.generate([tokens_of(n, seed=n) for n in (1, 40, 333, 90)], way)
    bound_by_grammar(llm)
    for count in (2, 3, 5, 8, 9, 17, 33, 64, 77):
        prompts = [tokens_of(3 + 11 * n % 200, seed=count + n) for n in range(count)]
        llm.generate(prompts, GREEDY)
    llm.generate(tokens_of(200), GREEDY)  # from the prefix cache
    llm.generate(tokens_of(200), GREEDY)
    for more in (1, 2, 15, 70, 300, 520):
        llm.generate(tokens_of(200) + tokens_of(more, seed=more), GREEDY)
    if llm.engine.can_trace:
        for length in (5, 200, min(3000, longest)):
            llm.generate(tokens_of(length, seed=4), GREEDY, trace=True)


def bound_by_grammar(llm: LLM) -> None:
    """Beside a request that is free, as the server does it for grammars."""
    frontend = llm.frontend
    for params in (GREEDY, WAYS["drawn"]):
        free, bound = (frontend.prepare(tokens_of(30, seed=n), params)[0] for n in (1, 2))
        bound.allowed_tokens = lambda _: Allowed((bytes([0xFF] * 8),))
        bound.host_tokens = True
        for request in (free, bound):
            frontend.submit([request])
        while llm.engine.has_work:
            frontend.step()
        assert all(token < 64 for token in bound.output_ids)


@pytest.mark.parametrize("chunk", [64, 2048])
@pytest.mark.parametrize("name", MODELS)
def test_serving_compiles_nothing(name: str, chunk: int, tmp_path: Path) -> None:
    config, options = MODELS[name]
    folder = write_model(tmp_path, config)
    sizes = {"kv_cache_gib": 0.5, "chunked_prefill_size": chunk}
    with LLM(folder, **{**OPTIONS, **options, **sizes}) as llm:
        assert llm.engine.compilations.start > 0
        use(llm)
        assert llm.engine.compilations.serving == 0


def test_long_chunks_of_prompts_compile_nothing(tmp_path: Path) -> None:
    """Chunks so long that small pages are gathered into larger ones for FlashAttention-3."""
    folder = write_model(tmp_path, {**TINY_LLAMA, **LARGE, "hidden_size": 256})
    sizes = {"kv_cache_gib": 2, "chunked_prefill_size": 8192, "page_size": 64}
    with LLM(folder, **{**OPTIONS, **SPARSE, **sizes}) as llm:
        use(llm)
        assert llm.engine.compilations.serving == 0


@pytest.mark.parametrize("frames", [60, 2000], ids=["on the host", "resident"])
@pytest.mark.parametrize("name", ["hils", "quest", "index"])
def test_serving_from_a_host_tier_compiles_nothing(name: str, frames: int, tmp_path: Path) -> None:
    config, _ = MODELS[name]
    folder = write_model(tmp_path / name, {**config, "max_position_embeddings": 4000})
    options = {**OPTIONS, "chunked_prefill_size": 512, "max_running_requests": 4}
    with tiered(folder, frames=frames, pages=2000, hot=48, overlap=True, **options) as llm:
        assert llm.engine.compilations.start > 0
        use(llm)
        assert llm.engine.compilations.serving == 0


def test_float32_and_steps_without_graphs(tmp_path: Path) -> None:
    folder = write_model(tmp_path, MODELS["hils"][0])
    options = {**OPTIONS, "dtype": "float32", "disable_cuda_graph": True, "kv_cache_gib": 0.5}
    with LLM(folder, **options) as llm:
        use(llm)
        assert llm.engine.compilations.serving == 0
