"""Kernels of the host tier in Triton's interpreter. Run by test_kernels.py."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from cairn import LLM
from cairn.attention.hsa.kernel_sparse import KernelSparse
from cairn.bench.drift import DriftState, drift
from cairn.bench.tier_engines import drift as drift_in_decode
from cairn.bench.tier_engines import stop_copying
from cairn.kernels import sparse_decode, swap_in
from cairn.kernels.sparse_shape import SparseShape
from cairn.memory import prompt_stage
from tests.engine.lanes import tier_of
from tests.engine.tiered import check_clean, tiered
from tests.helpers import (
    TINY_HILS,
    TINY_LLAMA,
    tokens_of,
    write_model,
)
from tests.kernels import located_case, swap_case
from tests.kernels.kernel_engines import use_few_programs, use_kernels

CPU = torch.device("cpu")


@pytest.mark.parametrize(("entries", "ways"), [(1024, 16), (8, 2)])
@pytest.mark.parametrize(
    "shape", [*swap_case.SHAPES[:2], pytest.param(swap_case.SHAPES[2], marks=pytest.mark.slow)]
)
def test_swap_in(
    shape: tuple[int, int, int, int], entries: int, ways: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also where a selection is looked at in several parts, and slots are searched in halves."""
    monkeypatch.setattr(swap_in, "_ENTRIES", (entries,))
    monkeypatch.setattr(swap_in, "plan_ways", lambda _: ways)
    swap_case.check(*shape, CPU, torch.float32)


@pytest.mark.slow
def test_swap_in_after_a_month() -> None:
    """Ages are set back in the third of six steps, and slots are given up in the same order."""
    swap_case.check(3, 5, 7, 40, CPU, torch.float32, clock=swap_case.LATE - 6)


def test_swap_in_of_pages_in_several_pieces() -> None:
    swap_case.check_pieces(CPU)


@pytest.mark.parametrize(
    "shape",
    [swap_case.STAGED[0], *(pytest.param(s, marks=pytest.mark.slow) for s in swap_case.STAGED[1:])],
)
def test_swap_in_for_prompts(shape: tuple[int, int, int]) -> None:
    swap_case.check_stage(*shape, CPU, torch.float32)


@pytest.mark.slow
def test_made_up_selections_drift() -> None:
    shape = SparseShape(
        heads=4, kv_heads=2, head_dim=16, page_size=16, landmark_heads=2, landmark_width=32,
        topk=5, window=32, scale=1.0, strategy="group", by_lse=True, sinks=0, null_split=False,
        hide_last=False,
    )  # fmt: skip
    state = DriftState.empty(shape, 2, 4, CPU)
    lengths = torch.tensor([40 * 16, 60, 1000], dtype=torch.int32)
    limits = [(length - 32) // 16 for length in (40 * 16, 60, 1000)]
    last, changed, steps = None, 0, 12
    for _ in range(steps):
        drift(shape, state, lengths, change=0.2)
        selected = state.selected[:, :3]
        assert (state.selected[:, 3] == -1).all()
        # Fewer candidates than it selects: all of them.
        assert (selected[:, 1] == torch.tensor([0, -1, -1, -1, -1])).all()
        for row in (0, 2):
            places = selected[:, row]
            assert (places.diff(dim=-1) > 0).all() and (places >= 0).all()
            assert (places < limits[row]).all()
        now = selected[:, [0, 2]].clone()
        changed += 0 if last is None else int((now != last).sum())
        last = now
    assert 0.1 < changed / (steps * 40) < 0.25
    assert (selected[0, 0] != selected[1, 0]).any()  # every layer draws its own
    # Pages that are added move nothing but what stands at the edge of a part.
    for _ in range(10):
        before = state.selected[:, 0].clone()
        lengths[0] += 16
        drift(shape, state, lengths, change=0.0)
        assert (state.selected[:, 0] != before).sum() <= 4
        assert (state.selected[:, 0].diff(dim=-1) > 0).all()


@pytest.mark.parametrize(
    ("parts", "by_lse"),
    [(2, False), *(pytest.param(n, True, marks=pytest.mark.slow) for n in (1, 3))],
)
def test_pages_that_come_late(parts: int, by_lse: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """However few programs share them."""
    monkeypatch.setattr(sparse_decode, "_parts_beside_copies", lambda *_: parts)
    located_case.check(CPU, torch.float32, seqs=2, kv_heads=1, topk=6, by_lse=by_lse)


def test_small_pages_that_come_late(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sparse_decode, "_parts_beside_copies", lambda *_: 2)
    located_case.check(CPU, torch.float32, seqs=2, kv_heads=1, topk=19, page_size=8)


def test_whole_pages_between_host_and_device() -> None:
    swap_case.check_pages(CPU, torch.float32)


OPTIONS: dict[str, Any] = {"dtype": "float32", "chunked_prefill_size": 64}
OPTIONS |= {"max_running_requests": 1, "hot": 8, "pages": 20}


@pytest.fixture
def hils(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[Path, list[int]]:
    """A model for sparse kernels, and what it answers without them."""
    use_few_programs(monkeypatch)
    config = {**TINY_HILS, "hidden_size": 64, "num_hidden_layers": 1}
    folder = write_model(tmp_path / "hils", config)
    with LLM(folder, device="cpu", dtype="float32", kv_cache_gib=0.05) as llm:
        expected = llm.generate(tokens_of(100), max_tokens=4, ignore_eos=True).token_ids
    monkeypatch.setattr(KernelSparse, "refusal", staticmethod(lambda *_: None))
    return folder, expected


def test_a_whole_engine_on_sparse_kernels_with_a_host_tier(hils: tuple[Path, list[int]]) -> None:
    """Pages leave the device, are read through the hot cache, staged for prompts, and fetched."""
    folder, expected = hils
    with tiered(folder, frames=6, **OPTIONS) as llm:
        for traced in (False, True):
            result = llm.generate(tokens_of(100), max_tokens=4, ignore_eos=True, trace=traced)
            assert result.token_ids == expected
        tier = llm.engine.tier()
        assert tier is not None and tier.totals.misses > 0 and tier.totals.hits > 0
        swap = tier_of(llm.engine).swap
        assert swap is not None and swap.totals[3] > 0
        check_clean(llm.engine)


@pytest.mark.slow
def test_where_everything_fits_nothing_is_looked_up_or_copied(
    hils: tuple[Path, list[int]],
) -> None:
    folder, expected = hils
    with tiered(folder, frames=20, **OPTIONS) as llm:
        result = llm.generate(tokens_of(100), max_tokens=4, ignore_eos=True)
        assert result.token_ids == expected
        swap = tier_of(llm.engine).swap
        assert swap is not None and swap.totals[0] > 0 and swap.totals[1:] == [0, 0, 0]


@pytest.mark.slow
def test_made_up_reads(hils: tuple[Path, list[int]]) -> None:
    """What benchmarks put in the place of kernels and swap: drifting pages, copies left out."""
    with tiered(hils[0], frames=6, **OPTIONS) as llm:
        llm.generate(tokens_of(100), max_tokens=4, ignore_eos=True)
        drift_in_decode(llm, change=0.0)
        swap = tier_of(llm.engine).swap
        assert swap is not None
        before = swap.totals
        llm.generate(tokens_of(100), max_tokens=5, ignore_eos=True)
        hits = swap.totals[1] - before[1]
        assert hits > swap.totals[2] - before[2]  # pages stay the same, so most reads are hits
        assert stop_copying(llm)
        not_copying = tier_of(llm.engine).swap
        assert type(not_copying) is not type(swap) and isinstance(not_copying, type(swap))
        llm.generate(tokens_of(90, seed=5), max_tokens=2, ignore_eos=True)


@pytest.mark.parametrize(
    ("policy", "size"), [("spread", 8), pytest.param("quest", 16, marks=pytest.mark.slow)]
)
def test_a_whole_engine_on_kernels_with_dense_prompts_in_a_host_tier(
    policy: str, size: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Pages of prompts are gathered in the stage, where kernels attend to all of them."""
    use_few_programs(monkeypatch)
    config = {**TINY_LLAMA, "hidden_size": 64}
    folder = write_model(tmp_path / "dense", config)
    prompt = tokens_of(100)
    sparse: dict[str, Any] = {"hsa_policy": policy, "hsa_dense_below": 0, "page_size": size}
    sparse |= {"dtype": "float32", "device": "cpu"}
    sparse |= {"hsa_topk": 2, "hsa_window": 20, "hsa_sinks": 1}
    with LLM(folder, attention_backend="torch,hsa", kv_cache_gib=0.05, **sparse) as llm:
        expected = llm.generate(prompt, max_tokens=4, ignore_eos=True).token_ids
    use_kernels(monkeypatch)
    monkeypatch.setattr(prompt_stage, "_MOST_RUNS", 0)  # a kernel copies what is on the host
    options = {**sparse, "attention_backend": "triton,hsa", "chunked_prefill_size": 32}
    options |= {"frames": 80 // size, "hot": 128 // size, "pages": 320 // size}
    with tiered(folder, max_running_requests=1, **options) as llm:
        for _ in range(2):
            result = llm.generate(prompt, max_tokens=4, ignore_eos=True)
            assert result.token_ids == expected
        stage = tier_of(llm.engine).stage
        assert stage is not None and stage.bytes_in > 0
        check_clean(llm.engine)
