"""Pages by layer: how they are shared out, chosen for a model, and read."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file

from cairn import LLM
from cairn.engine.budgets import share_out
from cairn.errors import ConfigError
from tests.helpers import TINY_LATENT, TINY_LLAMA, byte_tokenizer, tokens_of, write_model

SPARSE: dict[str, Any] = {"attention_backend": "hsa", "hsa_window": 16, "hsa_dense_below": 0}
GAINS = st.lists(
    st.lists(st.integers(0, 20), min_size=4, max_size=4).map(lambda own: sorted(own)[::-1]),
    min_size=1,
    max_size=3,
)


@given(gains=GAINS, total=st.integers(1, 12), least=st.integers(1, 2))
def test_no_other_shares_gain_more(gains: list[list[int]], total: int, least: int) -> None:
    counts = share_out(gains, total, least)
    assert all(least <= count <= 4 for count in counts)
    assert sum(counts) == max(least * len(gains), min(total, 4 * len(gains)))
    gained = sum(sum(own[:count]) for own, count in zip(gains, counts, strict=True))
    for other in itertools.product(range(least, 5), repeat=len(gains)):
        if sum(other) <= sum(counts):
            assert gained >= sum(sum(own[:n]) for own, n in zip(gains, other, strict=True))


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    config = {**TINY_LLAMA, "vocab_size": 256, "max_position_embeddings": 8192}
    folder = write_model(tmp_path_factory.mktemp("budgets"), config)
    byte_tokenizer().save(str(folder / "tokenizer.json"))
    weights = load_file(folder / "model.safetensors")
    weights["model.layers.0.self_attn.q_proj.weight"] *= 30  # so that layer 0 looks at few pages
    save_file(weights, folder / "model.safetensors")
    return folder


def read_by_layer(folder: Path, **options: Any) -> dict[int, set[int]]:
    """Numbers of pages that generated tokens read, by layer."""
    with LLM(folder, device="cpu", page_size=16, **SPARSE, **options) as llm:
        trace = llm.generate(tokens_of(200), max_tokens=4, ignore_eos=True, trace=True).trace
    assert trace is not None
    found: dict[int, set[int]] = {}
    for token in trace.tokens[1:]:  # the first comes from the prompt, which is read densely
        for read in token.layers:
            found.setdefault(read.layer, set()).update(map(len, read.pages))
    return found


def test_each_layer_reads_its_own_number_of_pages(folder: Path) -> None:
    assert read_by_layer(folder, hsa_budget="2,5") == {0: {2}, 1: {5}}


def test_auto_shares_out_as_many_pages_as_top_k(folder: Path) -> None:
    with LLM(
        folder,
        device="cpu",
        page_size=16,
        hsa_unit_size=16,
        hsa_budget="auto",
        hsa_topk=4,
        **SPARSE,
    ) as llm:
        sparse = llm.engine.sparse
        assert sparse is not None and sparse.budgets is not None
        assert sum(sparse.budgets) == 2 * 4 and max(sparse.budgets) == sparse.topk
        listed = ",".join(map(str, sparse.budgets))
        assert any(f"pages by layer {listed}" in note for note in llm.engine.notes)
        assert llm.config.hsa_budget == "auto"


@pytest.mark.parametrize(("policy", "topk"), [(None, 111), ("quest", 32)])
def test_auto_shares_out_the_pages_of_default_options(
    folder: Path, policy: str | None, topk: int
) -> None:
    """Rows are dense below some position, which does not matter for what is chosen."""
    options: dict[str, Any] = {"attention_backend": "hsa", "hsa_policy": policy}
    with LLM(folder, device="cpu", hsa_budget="auto", **options) as llm:
        sparse = llm.engine.sparse
        assert sparse is not None and sparse.budgets is not None
        assert sum(sparse.budgets) == 2 * topk and sparse.budgets[0] < topk


def test_auto_needs_more_pages_than_top_k(folder: Path) -> None:
    options: dict[str, Any] = {"hsa_policy": "quest", "context_length": 3000}
    with pytest.raises(ConfigError, match=r"hsa_topk 32; .* 2998 can be read: lower hsa_topk"):
        LLM(folder, device="cpu", attention_backend="hsa", hsa_budget="auto", **options)


def test_auto_is_refused_with_a_host_tier_before_the_model_is_read(tmp_path: Path) -> None:
    folder = write_model(tmp_path, TINY_LLAMA)
    byte_tokenizer().save(str(folder / "tokenizer.json"))
    for weights in folder.glob("*.safetensors"):
        weights.write_bytes(b"no weights")
    with pytest.raises(ConfigError, match=r"hsa_budget is 'auto'.* list the pages of each layer"):
        LLM(folder, device="cpu", hsa_budget="auto", enable_hisparse=True, **SPARSE)


def test_auto_is_refused_for_models_with_an_index(tmp_path: Path) -> None:
    index = {"index_n_heads": 4, "index_head_dim": 32, "index_topk": 24}
    own = {**TINY_LATENT, **index, "vocab_size": 256, "architectures": ["DeepseekV32ForCausalLM"]}
    folder = write_model(tmp_path, own)
    byte_tokenizer().save(str(folder / "tokenizer.json"))
    with pytest.raises(ConfigError, match=r"hsa_budget is given; .* has its own index"):
        LLM(folder, device="cpu", hsa_budget="auto")


@pytest.mark.parametrize(
    ("options", "named"),
    [
        ({"hsa_budget": "2"}, "hsa_budget is '2'; give pages for each of the 2 sparse layers"),
        ({"hsa_budget": "2,0"}, "hsa_budget is '2,0'"),
        ({"hsa_budget": "2,5", "hsa_topk": 3}, "hsa_topk is 3; give one"),
        ({"hsa_budget": "2,5", "hsa_sinks": 3}, "hsa_sinks is 3 and the least hsa_budget 2"),
        ({"hsa_budget": "1,1", "hsa_policy": "streaming"}, "hsa_budget is given, and hsa_policy"),
    ],
)
def test_bad_budgets_are_refused_by_name(folder: Path, options: Any, named: str) -> None:
    with pytest.raises(ConfigError, match=named):
        LLM(folder, device="cpu", page_size=16, **SPARSE, **options)


@pytest.mark.parametrize("budget", ["auto", "2,5"])
def test_budgets_are_refused_without_sparse_attention(folder: Path, budget: str) -> None:
    with pytest.raises(ConfigError, match="hsa_budget is given but attention_backend is 'torch'"):
        LLM(folder, device="cpu", attention_backend="torch", hsa_budget=budget)
