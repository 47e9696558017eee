"""Pages of the cache that are cut into units: what is computed is that of pages as small as a unit.

Models are tiny and in float64, and free memory is NaN.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from cairn import LLM, SamplingParams
from cairn.engine.plan import TableEdit
from cairn.engine.slot_tables import SlotTables
from cairn.kernels.fp8_rows import FP8, widen
from cairn.memory.geometry import PageGeometry
from cairn.memory.groups import LayerGroup
from cairn.memory.kv_pool import KVPool
from cairn.memory.layout import CacheLayout
from cairn.trace import Trace
from tests.helpers import TINY_LLAMA, poison_free_memory, tokens_of, write_model

UNIT, PAGE = 4, 16
SPARSE: dict[str, Any] = {
    "device": "cpu",
    "dtype": "float64",
    "attention_backend": "hsa",
    "hsa_unit_size": UNIT,
    "hsa_topk": 5,
    "hsa_window": 11,
    "hsa_dense_below": 0,
    "chunked_prefill_size": 37,
}
CASES: dict[str, dict[str, Any]] = {
    "spread": {"hsa_policy": "spread"},
    "sparse-prompts": {"hsa_policy": "spread", "hsa_prefill": "sparse"},
    "quest-in-whole-chunks": {"hsa_prefill": "sparse", "chunked_prefill_size": 4096},
    "mean-and-a-dense-layer": {"hsa_policy": "mean", "hsa_dense_layers": 1, "hsa_sinks": 3},
    "snapkv": {"hsa_policy": "snapkv"},
    "streaming": {"hsa_policy": "streaming", "hsa_topk": None, "hsa_sinks": 2},
    "landmark-weights": {"hsa_fusion": "landmark", "hsa_selection_strategy": "group"},
    "top-p": {"hsa_top_p": 0.4, "hsa_topk": 20, "hsa_prefill": "sparse"},
    "budgets": {"hsa_budget": "3,7", "hsa_topk": None},
    "window-of-one": {"hsa_window": 1, "hsa_prefill": "sparse"},
    "fp8": {"kv_cache_dtype": "fp8", "hsa_prefill": "sparse"},
    "int8": {"kv_cache_dtype": "int8"},
}
ANSWER = SamplingParams(max_tokens=14, ignore_eos=True)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("llama"), TINY_LLAMA)


def load(folder: Path, page_size: int, **options: Any) -> LLM:
    given = {**SPARSE, "page_size": page_size, **options}
    llm = LLM(folder, **{name: own for name, own in given.items() if own is not None})
    poison_free_memory(llm.engine)
    return llm


def check_reads(found: Trace | None, expected: Trace | None) -> None:
    """The same units with the same shares."""
    assert found is not None and expected is not None
    assert (found.page_size, found.pages) == (expected.page_size, expected.pages)
    for own, other in zip(found.tokens, expected.tokens, strict=True):
        for read, known in zip(own.layers, other.layers, strict=True):
            assert (read.layer, read.pages) == (known.layer, known.pages)
            shares = [share for _, share in read.shares()]
            assert shares == pytest.approx([share for _, share in known.shares()], abs=1e-9)


@pytest.mark.parametrize("case", CASES)
def test_units_are_read_as_small_pages_are(folder: Path, case: str) -> None:
    """In company, with a prefix in common, and once more when everything is cached."""
    prompts = [tokens_of(90), [*tokens_of(50), *tokens_of(33, seed=2)], tokens_of(7, seed=3)]
    results, scored = [], []
    for page_size in (PAGE, UNIT):
        with load(folder, page_size, **CASES[case]) as llm:
            cold = llm.generate(prompts, ANSWER, trace=True)
            warm = llm.generate(prompts, ANSWER, trace=True)
            assert warm[0].usage.cached_tokens == 89 // page_size * page_size
            results.append([*cold, *warm])
            scored.append(llm.logprobs(tokens_of(120, seed=5)))
            llm.engine.scheduler.check()
    for found, expected in zip(*results, strict=True):
        assert found.token_ids == expected.token_ids
        check_reads(found.trace, expected.trace)
    assert torch.isfinite(scored[0]).all()
    torch.testing.assert_close(*scored, rtol=0, atol=1e-9)


def test_a_landmark_is_made_once_when_its_unit_is_complete(folder: Path) -> None:
    with load(folder, PAGE) as llm:
        landmarks = llm.engine.runner.stepper.backend._landmarks  # type: ignore[attr-defined]
        prompt = tokens_of(90)
        llm.generate(prompt, max_tokens=6, ignore_eos=True)
        assert landmarks.num_sealed == 95 // UNIT  # the last token is not computed
        result = llm.generate([*prompt, *tokens_of(9, seed=1)], max_tokens=1)
        cached = result.usage.cached_tokens
        assert cached == 80
        assert landmarks.num_sealed == 95 // UNIT + 99 // UNIT - cached // UNIT


def test_the_default_reads_the_same_whatever_the_page_size(folder: Path) -> None:
    prompt = tokens_of(400)
    options: dict[str, Any] = {"device": "cpu", "dtype": "float64", "attention_backend": "hsa"}
    options |= {"hsa_topk": 9, "hsa_window": 20}
    results = []
    for page_size in (None, 8, 32):
        with LLM(folder, page_size=page_size, **options) as llm:
            assert llm.engine.selected.page_size == 8
            results.append(llm.generate(prompt, ANSWER, trace=True))
    for result in results[1:]:
        assert result.token_ids == results[0].token_ids
        check_reads(result.trace, results[0].trace)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, FP8, torch.int8])
@pytest.mark.parametrize("units", [1, 2, 8])
def test_slices_of_units_are_rows_of_pages(dtype: torch.dtype, units: int) -> None:
    kv_heads, dim, pages = 2, 16, 5
    group = LayerGroup("full", (0,), layout=CacheLayout.of_heads(kv_heads, dim, dtype))
    pool = KVPool((group,), [pages - 1], PAGE, torch.device("cpu"))
    rows = torch.randn(pages * PAGE, 2 * kv_heads, dim)
    places = torch.arange(pages * PAGE)
    pool.write(0, places // PAGE, places % PAGE, rows)
    whole = widen(pool.part(0), torch.float32)  # [pages, 2 * kv_heads, PAGE, dim]
    assert not torch.equal(whole[0], whole[1])
    cut = torch.unflatten(whole, 2, (units, -1))
    expected = cut.transpose(1, 2).flatten(0, 1)
    ids, every = torch.randperm(pages * units), torch.arange(2 * kv_heads)
    slices = pool.slices(0, ids[:, None], every, units)
    assert torch.equal(pool.read_slices(0, slices, torch.float32, units), expected[ids])
    keys = expected[ids, :kv_heads].transpose(1, 2)
    assert torch.equal(pool.read_keys(0, ids, torch.float32, units), keys)


def test_units_that_drafts_complete_are_listed() -> None:
    tables = SlotTables(2, 3, 4, PageGeometry(PAGE, PAGE))
    for group, first in ((0, 10), (1, 20)):
        tables.edit(TableEdit(group, 1, 0, (first, first + 1, first + 2), (1, 1, 1)))
    slots, starts, reached = np.array([[1, 1, 1], [13, 20, 47], [15, 33, 48]])
    found = tables.completed(slots, starts, reached, PAGE // UNIT)
    places = [5, 6, 7, 11]
    for group, first in ((0, 10), (1, 20)):
        assert found[group].tolist() == [first * PAGE // UNIT + place for place in places]
