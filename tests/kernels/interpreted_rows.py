"""Kernels of an index and of attention over single rows in the interpreter. Run by
test_kernels.py."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from cairn import LLM
from cairn.attention import dsa_kernels
from cairn.attention.backend import Graph
from cairn.attention.dsa_backend import DSABackend
from cairn.attention.dsa_kernels import RowKernels
from cairn.attention.triton_backend import TritonBackend
from cairn.engine import graphs
from cairn.kernels import index_scan as scan_module
from cairn.kernels import top_rows as top_module
from tests.helpers import TINY_LATENT, poison_free_memory, tokens_of, write_model
from tests.kernels import latent_case, rope_latent_case, row_case
from tests.kernels.kernel_engines import rerun_steps, use_kernels
from tests.kernels.row_case import Sizes

CPU = torch.device("cpu")

SCANS = [
    ([1, 31, 32, 33, 300], [1, 1, 1, 1, 1], Sizes(3, 24, 16)),
    ([400], [1], Sizes(16, 64, 64)),
    ([70, 130], [1, 1], Sizes(5, 128, 128)),
    ([90, 70, 5, 1], [9, 1, 5, 1], Sizes(2, 16, 16)),
]


@pytest.mark.parametrize("per_item", [1, 4])
@pytest.mark.parametrize("case", row_case.LISTS, ids=str)
def test_list_of_rows(case: tuple[list[int], list[int], int], per_item: int) -> None:
    row_case.check_list(*case, CPU, per_item=per_item)


@pytest.mark.parametrize("described", [False, True])
@pytest.mark.parametrize("case", SCANS, ids=str)
def test_index_scan(
    case: tuple[list[int], list[int], Sizes], described: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Shares end within items, at their ends, and span several. Pages are smaller and larger than
    a tile of keys; those that are whole tiles are loaded through descriptors."""
    monkeypatch.setattr(scan_module, "_LEAST", 1)
    monkeypatch.setattr(scan_module, "can_describe", lambda *_: described)
    row_case.check_scan(*case, CPU, torch.float32, tolerance=1e-6, per_item=4)


@pytest.mark.parametrize("keys", [False, True])
@pytest.mark.parametrize("sizes", [(3, 5, 6, 8, 24), (2, 17, 4, 4, 33)])
def test_rotated_and_stored_rows(sizes: tuple[int, int, int, int, int], keys: bool) -> None:
    rope_latent_case.check(*sizes, CPU, torch.float32, keys=keys)


@pytest.mark.parametrize("kind", row_case.KINDS)
def test_top_rows(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """With a sample, lists and blocks so small that every path is taken."""
    for name, size in (("_SAMPLE", 128), ("_BLOCK", 64), ("_FEW", 64), ("_MANY", 256)):
        monkeypatch.setattr(top_module, name, size)
    monkeypatch.setattr(top_module, "_PROGRAMS", 30)
    for k in (1, 17) if kind == "random" else (17,):
        row_case.check_top(kind, [1, k, k + 1, 130, 700], k, CPU)


def test_top_rows_of_one_long_row() -> None:
    row_case.check_top("random", [30_000], 300, CPU)


@pytest.mark.parametrize("sizes", [(4, 32, 16, 16), (20, 24, 8, 64)])
@pytest.mark.parametrize(
    ("counts", "k"), [([40], 40), ([1, 0, 17, 50], 50), ([5, 33, 70, 64, 2, 1, 70], 70)]
)
def test_row_attention(counts: list[int], k: int, sizes: tuple[int, int, int, int]) -> None:
    """In one part and in several; lists that are empty, short and full."""
    own = latent_case.Sizes(*sizes)
    row_case.check_attention(counts, k, own, CPU, torch.float32, tolerance=1e-5)


def indexed_model(folder: Path) -> Path:
    """Two layers that share a selection of 12 rows."""
    config = {**TINY_LATENT, "architectures": ["GlmMoeDsaForCausalLM"], "vocab_size": 64}
    config |= {"indexer_types": ["full", "shared"], "index_n_heads": 3, "index_head_dim": 24}
    return write_model(folder, {**config, "index_topk": 12})


@pytest.mark.parametrize("few", [True, False], ids=["few rows", "many rows"])
def test_a_whole_engine(tmp_path: Path, few: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Chunks of prompts in several tiles, mixed steps and decode over shared selections: every row
    reads what it reads in torch, and says the same."""
    if not few:
        monkeypatch.setattr(RowKernels, "take", staticmethod(lambda batch: batch.decodes))
    monkeypatch.setattr(dsa_kernels, "_SCORES", 1)
    monkeypatch.setattr(TritonBackend, "unavailable_reason", staticmethod(lambda _: None))
    folder = indexed_model(tmp_path)
    prompts = [tokens_of(n, seed=n, vocab=64) for n in (36, 11)]
    answers, traces = [], []
    options: dict[str, Any] = {"device": "cpu", "dtype": "float32", "kv_cache_gib": 0.02}
    options |= {"page_size": 16, "chunked_prefill_size": 36, "max_running_requests": 2}
    for kernels in (False, True):
        if kernels:
            monkeypatch.setattr(RowKernels, "refusal", staticmethod(lambda *_: None))
        with LLM(folder, **options) as llm:
            poison_free_memory(llm.engine)
            results = llm.generate(prompts, max_tokens=2, ignore_eos=True, trace=True)
            assert isinstance(llm.engine.runner.stepper.backend, DSABackend)
            assert (llm.engine.runner.stepper.backend._kernels is not None) == kernels
        answers.append([result.token_ids for result in results])
        read = [result.trace.tokens for result in results if result.trace is not None]
        traces.append([[[own.pages for own in t.layers] for t in tokens] for tokens in read])
    assert answers[0] == answers[1]
    assert traces[0] == traces[1]


def test_a_whole_engine_on_recorded_steps(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Steps that are dense and steps that select, padded to recorded sizes, against the same steps
    as they are. Requests go from one kind to the other: while they decode, and within a prompt,
    whose scan has several tiles."""
    use_kernels(monkeypatch)
    monkeypatch.setattr(graphs, "_MIXED_TOKENS", (12, 24))
    monkeypatch.setattr(dsa_kernels, "_SCORES", 1)
    rerun_steps(monkeypatch)
    folder = indexed_model(tmp_path)
    prompts = [tokens_of(n, seed=n, vocab=64) for n in (9, 37, 2)]
    options: dict[str, Any] = {"device": "cpu", "dtype": "float32", "kv_cache_gib": 0.02}
    options |= {"page_size": 16, "chunked_prefill_size": 20, "max_running_requests": 3}
    answers, used = [], set()
    for records in (False, True):
        with LLM(folder, **options) as llm:
            runner = llm.engine.runner
            if records:
                runner.stepper.record_graphs(24)
            poison_free_memory(llm.engine)
            results = llm.generate(prompts, max_tokens=5, ignore_eos=True)
            answers.append([result.token_ids for result in results])
            if records:
                assert runner.stepper.graphs is not None
                steps: Any = runner.stepper.graphs._graphs
                used = {key for (key, _), step in steps.items() if step.graph.replays}
    assert answers[0] == answers[1]
    assert used == {Graph(*own) for own in (("dense", True), ("sparse", True), ("sparse", False))}
