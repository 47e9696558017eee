"""Kernels of sparse attention in Triton's interpreter. Run by test_kernels.py."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import triton
import triton.language as tl

from cairn import LLM
from cairn.attention.hsa.backend import HSABackend
from cairn.attention.hsa.kernel_sparse import KernelSparse
from cairn.bench.hsa import _watched
from cairn.kernels import sparse_decode, sparse_extend, sparse_scratch, sparse_select
from cairn.kernels.top_pages import keep_best, threshold_in_memory, threshold_of_rows
from cairn.sparsity.selection import top_positions
from tests.helpers import (
    TINY_HILS,
    TINY_LLAMA,
    poison_free_memory,
    tokens_of,
    write_model,
)
from tests.kernels.fused_sums import fuse_sums
from tests.kernels.kernel_engines import use_few_programs
from tests.kernels.sparse_case import CASES, run

CPU = torch.device("cpu")


_PROMPTS = [name for name, case in CASES.items() if max(case.new) > 1]


@pytest.mark.parametrize(
    ("name", "few"),
    [
        *((name, 0) for name in CASES),
        *(
            pytest.param(name, 128, marks=[pytest.mark.slow] * (name not in ("chunks", "fp8")))
            for name in _PROMPTS
        ),
    ],
)
def test_sparse_attention(name: str, few: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows of prompts select in one launch where they have few candidates, and in five."""
    for module in (sparse_decode, sparse_scratch):
        monkeypatch.setattr(module, "CHUNK", 16)  # several chunks, on few pages
    use_few_programs(monkeypatch)
    monkeypatch.setattr(sparse_select, "_GROUPS", 4)
    monkeypatch.setattr(sparse_select, "_FEW", few)
    described = list(CASES).index(name) % 2 == 0  # half of the cases load tiles by descriptor
    monkeypatch.setattr(sparse_select, "can_describe", lambda *_: described)
    whole = described and CASES[name].cache is None
    monkeypatch.setattr(sparse_extend, "_worth_describing", lambda *_: whole)
    found, expected = (run(CASES[name], CPU, kernels=kernels) for kernels in (True, False))
    error = 1e-5 if CASES[name].dtype == torch.float32 else 3e-3
    torch.testing.assert_close(found.out, expected.out, rtol=0, atol=error)
    torch.testing.assert_close(found.vectors, expected.vectors, rtol=0, atol=error, equal_nan=True)
    assert torch.equal(found.sealed, expected.sealed)
    for row, selection in expected.selections.items():
        k = selection.page_index.shape[-1]
        assert torch.equal(found.selections[row].page_index[..., :k], selection.page_index)
        torch.testing.assert_close(
            found.selections[row].weights[..., :k], selection.weights, rtol=0, atol=1e-5
        )


def test_small_pages_with_fused_sums(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows that read none of the pages of a tile have nothing to subtract."""
    use_few_programs(monkeypatch)
    case = CASES["own-spread"]
    expected = run(case, CPU, kernels=False)
    fuse_sums(monkeypatch)
    torch.testing.assert_close(run(case, CPU, kernels=True).out, expected.out, rtol=0, atol=1e-5)


@pytest.mark.parametrize(
    ("n", "block", "slack"), [(1, 64, 0), (5, 1024, 0), (64, 64, 2), (64, 1024, 2)]
)
def test_best_ranks_are_those_of_the_reference(n: int, block: int, slack: int) -> None:
    """However counts are packed, for few or for many; with slack, a lower threshold will do."""
    torch.manual_seed(n)
    rank = torch.randint(-3, 4, (16, n)).float()  # many ties
    rank[torch.rand(16, n) < 0.2] = float("-inf")
    rank[0] = float("-inf")
    rank[1, : n // 2] = float("inf")
    keep = torch.zeros(16, n, dtype=torch.int32)
    _keep_each[(16,)](rank, keep, n, block, 4)
    # What the kernels that choose for many rows search in: a rank's bits above its place.
    bits = rank.view(torch.int32)
    keys = bits ^ ((bits >> 31) & 0x7FFFFFFF)
    entries = torch.zeros(16, n, dtype=torch.int64)
    counts = (rank > float("-inf")).sum(1).int()
    for row in range(16):
        places = (rank[row] > float("-inf")).nonzero().flatten()
        entries[row, : len(places)] = (bits[row, places].long() << 32) | places
    threshold, key = torch.zeros(16), torch.zeros(16, dtype=torch.int32)
    few = block == 64
    _thresholds[(1,)](rank, entries, counts, threshold, key, n, 16, block, 16, 4, slack, few)
    for row in range(16):
        places = top_positions(rank[row], 4)
        expected = places[places >= 0].tolist()
        assert keep[row].nonzero().flatten().tolist() == expected
        for reached, exceeded, most in (
            (rank[row] >= threshold[row], rank[row] > threshold[row], 4 + slack),
            (keys[row] >= key[row], keys[row] > key[row], 4),
        ):
            assert reached[expected].all() and exceeded.sum() <= most
        assert (threshold[row] > float("-inf")) == (len(expected) == 4)


@triton.jit
def _thresholds(
    rank,
    entries,
    counts,
    threshold,
    key,
    n,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
    SMALL: tl.constexpr,
    K: tl.constexpr,
    SLACK: tl.constexpr,
    FEW: tl.constexpr,
):
    row = tl.arange(0, ROWS)
    column = tl.arange(0, BLOCK)[None, :]
    value = tl.load(rank + row[:, None] * n + column, mask=column < n, other=float("-inf"))
    tl.store(threshold + row, threshold_of_rows(value, K, SLACK))
    count = tl.load(counts + row)
    own = entries + row[:, None] * n
    tl.store(key + row, threshold_in_memory(own, count, K, SMALL, FEW))


@triton.jit
def _keep_each(rank, keep, n, BLOCK: tl.constexpr, K: tl.constexpr):
    column = tl.arange(0, BLOCK)
    place = tl.program_id(0) * n + column
    value = tl.load(rank + place, mask=column < n, other=float("-inf"))
    tl.store(keep + place, keep_best(value, K).to(tl.int32), mask=column < n)


@pytest.mark.slow
def test_a_whole_engine_on_sparse_kernels(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Chunked prefill, mixed steps, decode across a page's end and a prefix hit, against torch."""
    use_few_programs(monkeypatch)
    folder = write_model(tmp_path, {**TINY_HILS, "hidden_size": 64, "full_attn_interleave": 2})
    prompts = [tokens_of(40) + tokens_of(n, seed=n) for n in (19, 45)]
    answers = []
    for refused in ("for comparison", None):
        monkeypatch.setattr(KernelSparse, "refusal", staticmethod(lambda *_, why=refused: why))
        with LLM(
            folder, device="cpu", dtype="float32", kv_cache_gib=0.05, chunked_prefill_size=48
        ) as llm:
            poison_free_memory(llm.engine)
            watched = _watched(llm)
            texts = llm.generate(prompts, max_tokens=4, ignore_eos=True)
            assert (watched is None) == (refused is not None)
            assert watched is None or watched.reuse
            texts += llm.generate(prompts[:1], max_tokens=2, ignore_eos=True)
            answers.append([text.token_ids for text in texts])
            backend = llm.engine.runner.stepper.backend
            assert isinstance(backend, HSABackend)
            assert (backend.launches > 0) == (refused is None)
            llm.engine.scheduler.check()
    assert answers[0] == answers[1]


@pytest.mark.parametrize("policy", ["quest", "tests.kernels.sparse_case:KeysAlone"])
def test_prompts_that_are_read_densely_leave_landmarks_in_every_layer(
    policy: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The last layer of a chunk saves those of all layers; decode steps complete one more page."""
    use_few_programs(monkeypatch)
    folder = write_model(tmp_path, {**TINY_LLAMA, "hidden_size": 64, "num_hidden_layers": 3})
    options = {"attention_backend": "torch,hsa", "hsa_policy": policy, "page_size": 16}
    options |= {"hsa_topk": 1, "hsa_window": 16, "hsa_dense_below": 0}
    found = []
    for refused in ("for comparison", None):
        monkeypatch.setattr(KernelSparse, "refusal", staticmethod(lambda *_, why=refused: why))
        with LLM(
            folder, device="cpu", dtype="float32", kv_cache_gib=0.05, hsa_dense_layers=1, **options
        ) as llm:
            poison_free_memory(llm.engine)
            llm.generate(tokens_of(76), max_tokens=6, ignore_eos=True)
            backend = llm.engine.runner.stepper.backend
            assert isinstance(backend, HSABackend)
            assert (backend.kernels is None) == (refused is not None)
            assert sorted(backend._landmarks.vectors) == [1, 2]
            found.append([own.clone() for own in backend._landmarks.vectors.values()])
    for torch_made, kernel_made in zip(*found, strict=True):
        assert (~torch_made.isnan()).any(-1).flatten(1).all(-1).sum() >= 5
        torch.testing.assert_close(kernel_made, torch_made, equal_nan=True)
