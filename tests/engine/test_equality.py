"""Same tokens, same output: alone or batched, cold or warm, whole or chunked, retracted or not.

Models are tiny and in float64, where the order of sums does not show in the tokens; free memory is
NaN, so reading it would.
"""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from cairn import LLM, SamplingParams
from cairn.errors import ConfigError
from tests.helpers import (
    TINY_HILS,
    TINY_LLAMA,
    TINY_OLMO3,
    poison_free_memory,
    tokens_of,
    write_model,
)

PAGE = 16
CHUNKS = [1, 7, PAGE - 1, PAGE, PAGE + 1, 100, 4096]
CONFIGS = {"llama": TINY_LLAMA, "olmo3": TINY_OLMO3, "hils": TINY_HILS, "quest": TINY_LLAMA}
CONFIGS["prompts"] = TINY_LLAMA
CONFIGS["fp8"] = TINY_LLAMA
CONFIGS["share"] = TINY_LLAMA
SPARSE = {"attention_backend": "hsa", "hsa_topk": 2, "hsa_window": 20, "hsa_sinks": 1}
OPTIONS: dict[str, dict[str, Any]] = {
    "quest": {**SPARSE, "hsa_policy": "quest", "hsa_prefill": "sparse"},
    "prompts": {**SPARSE, "hsa_unit_size": 4},  # read densely, answers sparsely
    # Layer 0 is dense.
    "fp8": {**SPARSE, "hsa_policy": "mean", "hsa_layers": "1", "kv_cache_dtype": "fp8"},
    "share": {**SPARSE, "hsa_topk": 4, "hsa_top_p": 0.6, "hsa_policy": "spread"},
}


def name_of(folder: Path) -> str:
    return next(name for name in CONFIGS if name in folder.name)


def per_page(folder: Path) -> int:
    """Tokens of a page; the last row of a HiLS page is a landmark row."""
    return PAGE - 1 if name_of(folder) == "hils" else PAGE


# `test_fp8_cache` has the quick tests of caches of 8 bits.
PARAMS = [pytest.param(name, marks=[pytest.mark.slow] * (name == "fp8")) for name in CONFIGS]


@pytest.fixture(scope="module", params=PARAMS)
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp(request.param), CONFIGS[request.param])


def load(folder: Path, **options: Any) -> LLM:
    own = OPTIONS.get(name_of(folder), {})
    options = {"page_size": PAGE, "max_running_requests": 8, **own, **options}
    llm = LLM(folder, dtype="float64", device="cpu", **options)
    poison_free_memory(llm.engine)
    return llm


@cache
def reference(folder: Path, prompt: tuple[int, ...], params: SamplingParams) -> list[int]:
    """The request by itself, its prompt in one piece, nothing cached."""
    with load(folder, disable_radix_cache=True, chunked_prefill_size=4096) as llm:
        return llm.generate(list(prompt), params).token_ids


def kv_gib(folder: Path, pages: int) -> float:
    """A budget of `pages` pages of every layer, in float64."""
    config = CONFIGS[name_of(folder)]
    head_dim = config["hidden_size"] // config["num_attention_heads"]
    row = head_dim + 4 if name_of(folder) == "fp8" else head_dim * 8
    per_layer = 2 * PAGE * config["num_key_value_heads"] * row
    if name_of(folder) not in ("llama", "olmo3"):  # landmarks cost something too
        per_layer += config["num_attention_heads"] * (head_dim + 1) * 8
    return float(pages * (per_layer * config["num_hidden_layers"] + 4) / 2**30)


def test_chunked_prefill_equals_whole(folder: Path) -> None:
    found = {}
    for chunk in CHUNKS:
        with load(folder, chunked_prefill_size=chunk, disable_radix_cache=True) as llm:
            found[chunk] = llm.logprobs(tokens_of(110))
    whole = found.pop(4096)
    assert torch.isfinite(whole).all()
    torch.testing.assert_close(found, dict.fromkeys(found, whole), rtol=0, atol=1e-6)


@settings(max_examples=min(25, settings().max_examples // 20))
@given(data=st.data())
def test_output_does_not_depend_on_company(folder: Path, data: st.DataObject) -> None:
    """Random batches over a small shared pool, with prefixes in common, run twice."""
    lengths = st.sampled_from([1, 2, PAGE - 1, PAGE, PAGE + 1, 40, 70])
    family = st.integers(0, 1)
    requests = data.draw(
        st.lists(st.tuples(lengths, family, st.integers(1, 20)), min_size=1, max_size=6)
    )
    sampled = data.draw(st.booleans())
    prompts = [tokens_of(70, seed=seed)[:length] for length, seed, _ in requests]
    params = [
        SamplingParams(
            max_tokens=most,
            ignore_eos=True,
            temperature=0.8 if sampled else 0.0,
            seed=i,
        )
        for i, (_, _, most) in enumerate(requests)
    ]
    cached: list[dict[str, Any]] = [{"eviction": "lru"}, {"eviction": "lfu"}]
    options: dict[str, Any] = {
        "chunked_prefill_size": data.draw(st.sampled_from(CHUNKS)),
        "max_running_requests": data.draw(st.integers(1, 6)),
        **data.draw(st.sampled_from([*cached, {"disable_radix_cache": True}])),
        # From hardly more than one request needs, which forces retraction, to plenty.
        "kv_cache_gib": kv_gib(folder, data.draw(st.sampled_from([8, 12, 40]))),
    }
    with load(folder, **options) as llm:
        llm.engine.overlap = data.draw(st.booleans())
        for _ in range(2):
            results = llm.generate(prompts, params)
            llm.engine.scheduler.check()
            for prompt, each, result in zip(prompts, params, results, strict=True):
                assert result.token_ids == reference(folder, tuple(prompt), each)


def test_retracted_requests_resume_where_they_were(folder: Path) -> None:
    prompts = [tokens_of(20 + i, seed=i) for i in range(4)]
    params = SamplingParams(max_tokens=40, ignore_eos=True)
    with load(folder, kv_cache_gib=kv_gib(folder, 10), max_running_requests=4) as llm:
        results = llm.generate(prompts, params)
        assert llm.engine.scheduler.stats.retractions > 0
        llm.engine.scheduler.check()
    for prompt, result in zip(prompts, results, strict=True):
        assert result.token_ids == reference(folder, tuple(prompt), params)


def test_an_answer_is_the_same_beside_a_prompt_that_is_being_read(folder: Path) -> None:
    prompts = [tokens_of(150), tokens_of(200, seed=3)]
    params = SamplingParams(max_tokens=24, ignore_eos=True)
    with load(folder, chunked_prefill_size=20) as llm:
        for prompt, result in zip(prompts, llm.generate(prompts, params), strict=True):
            assert result.token_ids == reference(folder, tuple(prompt), params)


def test_a_warm_prefix_gives_the_same_tokens_and_is_counted(folder: Path) -> None:
    prompt = tokens_of(100)
    params = SamplingParams(max_tokens=20, ignore_eos=True)
    with load(folder) as llm:
        cold = llm.generate(prompt, params)
        warm = llm.generate(prompt, params)
        assert cold.usage.cached_tokens == 0
        step = per_page(folder)
        assert warm.usage.cached_tokens == 99 // step * step
        assert cold.token_ids == warm.token_ids == reference(folder, tuple(prompt), params)
        # The answer is cached too: the next turn of a chat finds it.
        following = llm.generate([*prompt, *cold.token_ids, 5, 6], params)
        assert following.usage.cached_tokens == 119 // step * step
        salted = llm.generate(prompt, params, cache_salt="tenant")
        assert salted.usage.cached_tokens == 0
        assert salted.token_ids == cold.token_ids


def test_a_shared_prefix_is_computed_once(folder: Path) -> None:
    shared = tokens_of(90)
    with load(folder, chunked_prefill_size=96) as llm:
        llm.generate([[*shared, i] for i in range(6)], max_tokens=1, ignore_eos=True)
        # 91 tokens once, then what follows the shared pages.
        shared_tokens = 90 // per_page(folder) * per_page(folder)
        assert llm.engine.stats.computed_tokens == 91 + 5 * (91 - shared_tokens)


def test_window_layers_hold_a_window_of_memory(tmp_path: Path) -> None:
    """An OLMo3-shaped model at 8K tokens: full layers keep everything, window layers a window."""
    config = {**TINY_OLMO3, "max_position_embeddings": 8192, "sliding_window": 64}
    folder = write_model(tmp_path / "olmo3-long", config)
    prompt = tokens_of(8000)
    options: dict[str, Any] = {"chunked_prefill_size": 64, "max_running_requests": 1}
    with load(folder, **options) as llm:
        stream = llm.stream(prompt, max_tokens=60, ignore_eos=True)
        most = 0
        for _ in stream:
            full, window = llm.engine.usage()
            most = max(most, window.owned)
        assert full.total >= 8060 // PAGE
        # A window of 64 rows straddles five pages of 16.
        assert most <= 5
        pool = llm.engine.runner.stepper.pool
        assert window.total < full.total / 10
        full_bytes = sum(pool.part(layer).nbytes for layer in (1,))
        window_bytes = sum(pool.part(layer).nbytes for layer in (0, 2))
        assert window_bytes < full_bytes / 4
        llm.engine.scheduler.cache.tree.clear()
        llm.engine.scheduler.check()
        assert all(usage.free == usage.total for usage in llm.engine.usage())


def test_a_model_of_window_layers_alone_needs_room_for_a_window(tmp_path: Path) -> None:
    """Its longest request is as long as the context, however few pages there are."""
    config = {**TINY_OLMO3, "layer_types": ["sliding_attention"] * 3, "sliding_window": 64}
    folder = write_model(tmp_path / "olmo3-windows", config)
    # 64 rows straddle five pages. One more is begun before the first is left, and one is spare.
    with pytest.raises(ConfigError, match="group window-64 6 pages, its window needs 7; raise"):
        load(folder, kv_cache_gib=kv_gib(folder, 6))
    prompt, params = tokens_of(200), SamplingParams(max_tokens=30, ignore_eos=True)
    with load(folder, kv_cache_gib=kv_gib(folder, 7)) as llm:
        assert llm.generate(prompt, params).token_ids == reference(folder, tuple(prompt), params)
