"""The examples of docs/extending.md run as they stand, each from a file of its own."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch

from cairn import LLM
from tests.helpers import TINY_LLAMA, TINY_OLMO3, poison_free_memory, tokens_of, write_model

PAGE = (Path(__file__).parents[1] / "docs" / "extending.md").read_text()
FILES = dict(re.findall(r"```python\n# (\w+)\.py\n(.*?)```", PAGE, re.DOTALL))
PROMPTS = [tokens_of(25) + tokens_of(n, seed=n) for n in (1, 6, 13)]


@pytest.fixture(autouse=True)
def _files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, text in FILES.items():
        (tmp_path / f"{name}.py").write_text(text)
    monkeypatch.syspath_prepend(tmp_path)


def outcome(folder: Path, **options: Any) -> tuple[torch.Tensor, list[list[int]]]:
    """Log-probabilities of a prompt, and the answers to a batch that finds its prefix cached."""
    options = {"page_size": 4, "dtype": "float64", "device": "cpu", **options}
    with LLM(folder, **options) as llm:
        poison_free_memory(llm.engine)
        scores = llm.logprobs(PROMPTS[2])
        for _ in range(2):
            results = llm.generate(PROMPTS, max_tokens=12, ignore_eos=True)
        assert all(result.usage.cached_tokens >= 24 for result in results)
        llm.engine.scheduler.check()
        return scores, [result.token_ids for result in results]


def same(left: tuple[torch.Tensor, list[list[int]]], right: Any) -> bool:
    return torch.allclose(left[0], right[0], rtol=0, atol=1e-5) and left[1] == right[1]


def test_there_is_an_example_of_each() -> None:
    examples = {"my_model", "my_policy", "my_dense", "my_sparse", "my_drafter", "my_latent"}
    assert set(FILES) == examples


def test_model(tmp_path: Path) -> None:
    folder = write_model(tmp_path / "model", TINY_LLAMA, impl="my_model:build")
    whole = outcome(folder, model_impl="my_model:build")
    assert same(whole, outcome(folder, model_impl="my_model:build", chunked_prefill_size=5))


def test_policy(tmp_path: Path) -> None:
    folder = write_model(tmp_path / "model", TINY_LLAMA)
    dense = outcome(folder)
    options = {"attention_backend": "hsa", "hsa_policy": "my_policy:FirstKey", "hsa_window": 4}
    options |= {"hsa_prefill": "sparse", "hsa_dense_below": 0}
    assert same(dense, outcome(folder, **options, hsa_topk=100))
    assert not same(dense, outcome(folder, **options, hsa_topk=1))


def test_dense_backend(tmp_path: Path) -> None:
    folder = write_model(tmp_path / "model", TINY_LLAMA)
    assert same(outcome(folder), outcome(folder, attention_backend="my_dense:OneByOne"))
    assert same(outcome(folder), outcome(folder, attention_backend="torch,my_dense:OneByOne"))


def test_sparse_backend(tmp_path: Path) -> None:
    """A window of rows in full layers is what sliding-window layers have."""
    full = {**TINY_OLMO3, "layer_types": ["full_attention"] * 3}
    folder = write_model(tmp_path / "full", full)
    sparse = outcome(folder, attention_backend="my_sparse:Recent", hsa_window=11)
    windows = {**TINY_OLMO3, "layer_types": ["sliding_attention"] * 3}
    assert same(sparse, outcome(write_model(tmp_path / "windows", windows)))
    assert not same(sparse, outcome(folder))


def test_drafter(tmp_path: Path) -> None:
    folder = write_model(tmp_path / "model", TINY_LLAMA)
    assert same(outcome(folder), outcome(folder, speculative="my_drafter:Repeat"))


def test_cache_layout(tmp_path: Path) -> None:
    config = {**TINY_LLAMA, "latent_size": 6}
    folder = write_model(tmp_path / "model", config, impl="my_latent:build")
    options = {"model_impl": "my_latent:build", "attention_backend": "my_latent:LatentBackend"}
    whole = outcome(folder, **options)
    assert same(whole, outcome(folder, **options, chunked_prefill_size=5))
