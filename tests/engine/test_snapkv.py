"""`--hsa-policy snapkv`: the end of the prompt chooses the pages of the answer."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from cairn import LLM
from cairn.errors import ConfigError
from cairn.outputs import Generation
from cairn.sparsity.snapkv import SnapKVPolicy
from tests.helpers import TINY_LLAMA, tokens_of, write_model

PAGE, TOPK = 8, 4
PROMPT = tokens_of(203, vocab=TINY_LLAMA["vocab_size"])
OPTIONS: dict[str, Any] = {"attention_backend": "hsa", "hsa_policy": "snapkv", "hsa_topk": TOPK}
OPTIONS |= {"hsa_window": 16, "page_size": PAGE, "device": "cpu", "dtype": "float64"}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("snapkv")
    return write_model(path, {**TINY_LLAMA, "model_type": "llama"})


def answer(llm: LLM, prompt: list[int] = PROMPT) -> Generation:
    return llm.generate(prompt, max_tokens=12, ignore_eos=True, trace=True)


def reads(result: Generation) -> list[dict[int, list[list[int]]]]:
    """Pages of each kv head, by token and layer, without the token that the prompt gives."""
    assert result.trace is not None
    tokens = result.trace.tokens[1:]
    return [{read.layer: read.pages for read in token.layers} for token in tokens]


def test_pages_are_those_with_the_most_attention_of_the_last_rows(folder: Path) -> None:
    model = transformers.AutoModelForCausalLM.from_pretrained(
        folder, attn_implementation="eager", dtype=torch.float64
    )
    with torch.inference_mode():
        layers = model(torch.tensor([PROMPT]), output_attentions=True).attentions
    with LLM(folder, **OPTIONS) as llm:
        found = reads(answer(llm))
    candidates = (len(PROMPT) - OPTIONS["hsa_window"] + 1) // PAGE
    for layer, attention in enumerate(layers):
        votes = attention[0, :, -SnapKVPolicy.observed :].sum(1)  # [heads, rows]
        votes = votes.view(TINY_LLAMA["num_key_value_heads"], -1, len(PROMPT)).sum(1)
        pages = votes[:, : candidates * PAGE].unflatten(1, (-1, PAGE)).sum(-1)
        pages[:, 0] = 1e9  # the sink
        best = [sorted(row.topk(TOPK).indices.tolist()) for row in pages]
        assert found[0][layer] == best
    assert all(token == found[0] for token in found)  # chosen once


def test_chunks_other_requests_and_the_cache_change_nothing(folder: Path) -> None:
    """Also if the queries of the last rows are in the cache and are not computed again."""
    with LLM(folder, **OPTIONS) as llm:
        alone = answer(llm)
    with LLM(folder, **OPTIONS, chunked_prefill_size=23) as llm:
        longer = [*PROMPT, *tokens_of(40, vocab=TINY_LLAMA["vocab_size"], seed=3)]
        other = answer(llm, longer)
        again = answer(llm)
        assert again.usage.cached_tokens >= len(PROMPT) - PAGE
        results = llm.generate([PROMPT, PROMPT[:90], longer], max_tokens=12, ignore_eos=True)
    assert reads(other) != reads(alone)
    assert reads(again) == reads(alone)
    assert [again.token_ids, results[0].token_ids] == [alone.token_ids] * 2
    assert results[2].token_ids == other.token_ids


def test_a_prompt_shorter_than_the_rows_that_vote(folder: Path) -> None:
    prompt = PROMPT[: SnapKVPolicy.observed - 5]
    with LLM(folder, **{**OPTIONS, "hsa_window": 1, "hsa_topk": 2}, hsa_dense_below=0) as llm:
        pages = reads(answer(llm, prompt))
    assert all(len(head) == 2 for token in pages for heads in token.values() for head in heads)


@pytest.mark.parametrize(
    ("option", "value"),
    [
        ("hsa_prefill", "sparse"),
        ("hsa_top_p", 0.5),
        ("hsa_selection_strategy", "head"),
        ("enable_hisparse", True),
    ],
)
def test_what_does_not_go_with_it_is_refused(folder: Path, option: str, value: object) -> None:
    with pytest.raises(ConfigError, match=f"{option} is {value!r}, and hsa_policy 'snapkv'"):
        LLM(folder, **OPTIONS, **{option: value})


def test_drafts_are_refused(folder: Path) -> None:
    own = {**OPTIONS, "attention_backend": "torch", "speculative": "sparse"}
    with pytest.raises(ConfigError, match=r"hsa_policy is 'snapkv'.*use quest"):
        LLM(folder, **own)
