"""Kernels that swap single rows in from host memory, in the interpreter. Run by test_kernels.py."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from cairn.attention.backend import Graph
from cairn.attention.dsa_backend import DSABackend
from cairn.kernels import swap_rows
from cairn.memory import hot_cache
from tests.engine.lanes import tier_of
from tests.engine.test_hisparse_rows import leave_the_device
from tests.engine.tiered import check_clean, load, tiered
from tests.helpers import tokens_of
from tests.kernels import swap_rows_case
from tests.kernels.interpreted_rows import indexed_model
from tests.kernels.kernel_engines import rerun_steps, use_kernels

CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def few_programs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(swap_rows, "_PROGRAMS", 2)
    monkeypatch.setattr(swap_rows, "_COPY_PROGRAMS", 2)


@pytest.mark.parametrize(
    ("shape", "block", "ages"),
    [((1, 3, 5, 4), 16, 8), ((4, 2, 9, 16), 256, 256), ((3, 20, 70, 16), 16, 8)],
    ids=str,
)
def test_swap_in_of_rows(
    shape: tuple[int, int, int, int], block: int, ages: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also where programs look at their part in several steps, and old slots are equally old."""
    for name in ("_ENTRIES", "_LISTED", "_SLOTS"):
        monkeypatch.setattr(swap_rows, name, block)
    if block < 256:  # several programs list rows, and some list none
        monkeypatch.setattr(swap_rows, "_PROGRAMS", 8)
    for module in (swap_rows, hot_cache):
        monkeypatch.setattr(module, "HOT_AGES", ages)
    swap_rows_case.check(*shape, CPU, torch.float32, steps=5)


def test_rows_of_an_odd_number_of_bytes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Words of two bytes, and as many rows at once as fit."""
    monkeypatch.setattr(swap_rows, "_COPY_WORDS", 16)
    swap_rows_case.check(2, 4, 9, 4, CPU, torch.bfloat16, steps=5, width=7)


def test_null_rows() -> None:
    swap_rows_case.check_null_rows(CPU)


@pytest.mark.slow
def test_a_whole_engine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Chunks that are staged, mixed steps, decode over rows in host memory, prefix hits, traces;
    and steps that are recorded, with all pages on the device or not. Every answer is that of an
    engine in plain torch without a tier."""
    folder = indexed_model(tmp_path)
    prompts = [tokens_of(n, seed=n, vocab=64) for n in (36, 18)]
    options: dict[str, Any] = {"dtype": "float32", "max_running_requests": 2}
    options |= {"chunked_prefill_size": 20}
    with load(folder, kv_cache_gib=0.02, **options) as llm:
        expected = llm.generate(prompts, max_tokens=3, ignore_eos=True, trace=True)
        alone = llm.generate(tokens_of(14, vocab=64), max_tokens=2, ignore_eos=True)
    use_kernels(monkeypatch)
    rerun_steps(monkeypatch)
    with tiered(folder, frames=4, hot=2, pages=20, **options) as llm:
        engine, backend = llm.engine, llm.engine.runner.stepper.backend
        assert isinstance(backend, DSABackend) and tier_of(engine).row_swap is not None
        step = engine.step

        def step_alone() -> Any:
            leave_the_device(engine)
            return step()

        engine.step = step_alone  # type: ignore[method-assign]
        traced = llm.generate(prompts, max_tokens=3, ignore_eos=True, trace=True)
        for one, other in zip(traced, expected, strict=True):
            assert one.token_ids == other.token_ids
            assert one.trace is not None and other.trace is not None
            for own, same in zip(one.trace.tokens, other.trace.tokens, strict=True):
                assert [x.pages for x in own.layers] == [x.pages for x in same.layers]
        stats = tier_of(engine).stats
        assert stats.misses > 0 and stats.hits > 0 and stats.resident > 0 and stats.bytes_in > 0
        engine.runner.stepper.record_graphs(20)
        again = llm.generate(prompts, max_tokens=3, ignore_eos=True)
        assert [own.token_ids for own in again] == [own.token_ids for own in expected]
        steps: Any = engine.runner.stepper.graphs
        used = {key for (key, _), own in steps._graphs.items() if own.graph.replays}
        assert used == {Graph("sparse", mixed=False)}
        engine.step = step  # type: ignore[method-assign]
        fresh = llm.generate(tokens_of(14, vocab=64), max_tokens=2, ignore_eos=True)
        assert fresh.token_ids == alone.token_ids
        used = {key for (key, _), own in steps._graphs.items() if own.graph.replays}
        assert used >= {Graph("resident", mixed=own) for own in (False, True)}
        check_clean(engine)
