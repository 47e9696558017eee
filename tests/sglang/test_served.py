"""Stock SGLang's own models with the plug-in: log-probabilities against Cairn's own engine."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import pytest

from cairn import LLM
from tests.helpers import tokens_of
from tests.sglang.served import NEEDS_SGLANG, TOLERANCE, Served, assert_same, serve, write_plain

pytestmark = [pytest.mark.slow, NEEDS_SGLANG]

VOCAB = 61
PAGE = 16
SPARSE = {"topk": 3, "window": 40, "sinks": 1, "dense_below": 0, "prefill": "sparse"}


def cairn(folder: Path, policy: str) -> LLM:
    options = {f"hsa_{name}": value for name, value in SPARSE.items()}
    return LLM(
        folder,
        device="cpu",
        dtype="float32",
        kv_cache_gib=0.05,
        attention_backend="hsa",
        hsa_policy=policy,
        page_size=PAGE,
        **options,
    )


class Plain(NamedTuple):
    served: Served
    llm: LLM
    folder: Path


@pytest.fixture(scope="module", params=["quest-llama", "mean-qwen3"])
def plain(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Plain]:
    policy, model_type = request.param.split("-")
    folder = write_plain(tmp_path_factory.mktemp(model_type), model_type)
    options = {"policy": policy, **SPARSE}
    flags = ("--page-size", f"{PAGE}", "--chunked-prefill-size", "128", "--enable-mixed-chunk")
    # 60 pages: a few requests fill them, and the first that come are soon evicted.
    pool = ("--max-total-tokens", str(60 * PAGE), "--max-running-requests", "8")
    with (
        serve(folder, VOCAB, folder / "log", options, *flags, *pool) as served,
        cairn(folder, policy) as llm,
    ):
        yield Plain(served, llm, folder)


def test_log_probabilities_of_prompt_and_answer(plain: Plain) -> None:
    served, llm, _ = plain
    for length in (5, PAGE, 130, 300):
        prompt = tokens_of(length, seed=length)
        answer = served.generate(prompt, 40)
        assert len(answer.logprobs) == length + 39
        assert_same(answer, prompt, llm)


def test_the_comparison_would_see_dense_attention(plain: Plain) -> None:
    prompt = tokens_of(300, seed=300)
    found = plain.served.generate(prompt, 1).logprobs
    with LLM(plain.folder, device="cpu", dtype="float32", kv_cache_gib=0.05) as dense:
        assert (found - dense.logprobs(prompt)).abs().max() > 100 * TOLERANCE


def test_a_shared_prefix_is_reused(plain: Plain) -> None:
    served, llm, _ = plain
    prefix = tokens_of(200, seed=1)
    served.generate(prefix + tokens_of(20, seed=2), 4)
    prompt = prefix + tokens_of(50, seed=3)
    answer = served.generate(prompt, 30, first=len(prompt) - 1)
    assert answer.cached_tokens == 200 // PAGE * PAGE
    assert_same(answer, prompt, llm)


def test_the_text_of_an_answer_is_reused(plain: Plain) -> None:
    served, llm, _ = plain
    prompt = tokens_of(150, seed=4)
    first = served.generate(prompt, 40)
    longer = prompt + first.token_ids + tokens_of(10, seed=5)
    answer = served.generate(longer, 20, first=len(longer) - 1)
    assert answer.cached_tokens > len(prompt) + PAGE
    assert_same(answer, longer, llm)


def test_requests_in_one_batch(plain: Plain) -> None:
    served, llm, _ = plain
    prompts = [tokens_of(n, seed=n) for n in (3, 31, 90, 143, 200)]
    for prompt, answer in zip(prompts, served.batch(prompts, 25), strict=True):
        assert_same(answer, prompt, llm)


def test_recycled_pages(plain: Plain) -> None:
    """Several times as many pages as there are, then the first requests once more."""
    served, llm, _ = plain
    prompts = [tokens_of(330, seed=100 + n) for n in range(8)]
    first = [served.generate(prompt, 24) for prompt in prompts]
    again = served.batch(prompts, 24)  # more than fit at once: some are retracted or wait
    for prompt, cold, warm in zip(prompts, first, again, strict=True):
        assert cold.token_ids == warm.token_ids
        assert_same(cold, prompt, llm)
        assert_same(warm, prompt, llm)
