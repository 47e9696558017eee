"""The kernel for CPUs that attends to a window and selected units, beside plain torch."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from cairn import LLM
from cairn.attention.hsa.cpu_sparse import CpuSparse
from cairn.kernels.cpu import CpuKernels, CpuKernelsUnavailableError
from cairn.sparsity.mean import MeanPolicy
from cairn.sparsity.policy import Landmark
from tests.helpers import TINY, tokens_of, write_model
from tests.kernels.sparse_case import DECODE, MIXED, Case, run

CPU = torch.device("cpu")


class Biased(MeanPolicy):
    """A user's policy with a landmark for each query head, and a bias."""

    has_bias = True

    @property
    def landmark_heads(self) -> int:
        return self.shape.num_heads

    def landmark(self, keys: torch.Tensor, prior: torch.Tensor | None) -> Landmark:
        group = self.shape.num_heads // self.shape.num_kv_heads
        vectors = keys.mean(1).repeat_interleave(group, 1)
        return Landmark(vectors, 3 * vectors.sum(-1))


class OwnScore(MeanPolicy):
    """A user's policy with a score that the kernel does not know."""

    def score(self, query: torch.Tensor, landmark: Landmark) -> torch.Tensor:
        return -super().score(query, landmark)


UNITS: dict[str, Any] = {"page_size": 64, "units": 8, "topk": 11, "dim": 64}
CASES = {
    "spread": Case(*DECODE, "spread", dim=32, traced=[3, 5]),
    "units": Case(*DECODE, "spread", traced=[2, 5], **UNITS),
    "beside chunks": Case(*MIXED, "spread", traced=[0, 42], **UNITS),
    "quest": Case(*DECODE, "quest", dim=96, options={"sinks": 2}),
    "mean": Case(*DECODE, "mean", dim=128, traced=[4]),
    "mean of units": Case(*DECODE, "mean", 9, 3, traced=[5], options={"sinks": 3}, **UNITS),
    "by sum": Case(*DECODE, "mean", dim=32, traced=[5], options={"strategy": "group"}),
    "by best": Case(*DECODE, "mean", dim=256, traced=[5], options={"strategy": "head"}),
    "one group": Case(*DECODE, "spread", 7, 1, 32),
    "no groups": Case(*DECODE, "spread", 2, 2, 32, traced=[5]),
    "all candidates": Case(*DECODE, "quest", dim=32, topk=40, traced=[3, 5]),
    "window of one": Case(*DECODE, "spread", dim=32, window=1, traced=[1, 5]),
    "ties": Case(*DECODE, "streaming", dim=32, traced=[3, 4, 5]),
    "more sinks than pages": Case(*DECODE, "mean", dim=32, traced=[5], options={"sinks": 5}),
    "stale landmarks": Case(*DECODE, "spread", dim=32, stale=True, topk=12, traced=[3, 5]),
    "bias": Case(*DECODE, f"{__name__}:Biased", dim=32, traced=[5]),
    "dense rows": Case([1, 1, 5], [48, 365, 340], "quest", dim=32, options={"dense_below": 320}),
}


@pytest.fixture(
    scope="module",
    params=["native", *(pytest.param(f"x86-64{v}", marks=pytest.mark.slow) for v in ("-v3", ""))],
)
def cpu(request: pytest.FixtureRequest) -> CpuKernels:
    try:
        return CpuKernels.load(request.param)
    except CpuKernelsUnavailableError as error:
        pytest.skip(str(error))


@pytest.mark.parametrize("name", CASES)
def test_it_computes_what_torch_does(name: str, cpu: CpuKernels) -> None:
    """Rows that were never written are NaN, and so are stale landmarks."""
    case = CASES[name]
    found, expected = (run(case, CPU, kernels=False, cpu=own) for own in (cpu, None))
    assert found.backend._cpu is not None and expected.backend._cpu is None
    torch.testing.assert_close(found.out, expected.out, rtol=1e-4, atol=1e-5)
    for row, selection in expected.selections.items():
        own = found.selections[row]
        assert torch.equal(own.page_index, selection.page_index)
        assert torch.equal(own.page_ids, selection.page_ids)
        for part in ("scores", "weights", "window_lse", "window_weight"):
            torch.testing.assert_close(
                getattr(own, part), getattr(selection, part), rtol=1e-4, atol=1e-5
            )


@pytest.mark.parametrize("name", ["spread", "units", "mean of units"])
def test_results_do_not_depend_on_threads(name: str, cpu: CpuKernels) -> None:
    before = torch.get_num_threads()
    found = []
    try:
        for threads in (1, 2, 3):
            torch.set_num_threads(threads)
            found.append(run(CASES[name], CPU, kernels=False, cpu=cpu).out)
    finally:
        torch.set_num_threads(before)
    assert torch.equal(found[0], found[1]) and torch.equal(found[0], found[2])


OTHERS = {
    "size of heads": Case(*DECODE, "spread", dim=16),
    "type of the cache": Case(*DECODE, "spread", dim=32, cache=torch.int8),
    "weights by landmarks": Case(*DECODE, "mean", dim=32, options={"fusion": "landmark"}),
    "empty split": Case(*DECODE, "mean", dim=32, options={"null_split": True}),
    "landmark rows": Case(*DECODE, dim=32),
    "own score": Case(*DECODE, f"{__name__}:OwnScore", dim=32),
}


@pytest.mark.parametrize("name", OTHERS)
def test_torch_computes_everything_else(name: str, cpu: CpuKernels) -> None:
    assert run(OTHERS[name], CPU, kernels=False, cpu=cpu).backend._cpu is None


MODEL = {**TINY, "hidden_size": 128, "intermediate_size": 64,
         "architectures": ["LlamaForCausalLM"]}  # fmt: skip
SPARSE: dict[str, Any] = {"attention_backend": "hsa", "hsa_window": 16, "hsa_topk": 5}


@pytest.mark.parametrize("options", [{}, {"hsa_policy": "quest", "page_size": 8}])
def test_answers_are_the_same_alone_together_traced_and_in_torch(
    options: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = write_model(tmp_path, MODEL)
    prompts = [tokens_of(n, seed=n) for n in (90, 3, 61, 130)]
    every = {"device": "cpu", "quantization": "int8", "kv_cache_gib": 0.01, **SPARSE, **options}
    calls = []
    forward = CpuSparse.forward

    def counted(*args: Any) -> torch.Tensor:
        calls.append(0)
        return forward(*args)

    monkeypatch.setattr(CpuSparse, "forward", counted)
    with LLM(folder, **every) as llm:
        if any("slowly" in note for note in llm.engine.notes):
            pytest.skip("there is no C++ compiler")
        together = [one.token_ids for one in llm.generate(prompts, max_tokens=30)]
        assert len(calls) >= 29 * TINY["num_hidden_layers"]
        alone = [llm.generate(prompt, max_tokens=30).token_ids for prompt in prompts]
        traced = [one.token_ids for one in llm.generate(prompts, max_tokens=30, trace=True)]
    assert together == alone == traced
    calls.clear()
    monkeypatch.setenv("CXX", "no-such-compiler")
    with LLM(folder, **every) as llm:
        assert [one.token_ids for one in llm.generate(prompts, max_tokens=30)] == together
    assert not calls
