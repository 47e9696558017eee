"""DeepSeek sparse attention by kernels: which rows are read, and that recorded steps read them."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from cairn import LLM
from cairn.attention.dsa_backend import DSABackend
from tests.helpers import GOLDENS
from tests.models.test_dsa import CASES, SHARED, check_selections, load, read_by

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("chunk", [7, 4096])
@pytest.mark.parametrize("case", CASES)
def test_selections_of_goldens_are_exact(case: str, chunk: int) -> None:
    golden = load_file(GOLDENS / case / "golden.safetensors")
    options: dict[str, Any] = {"device": "cuda", "kv_cache_gib": 0.1, "disable_cuda_graph": True}
    with load(GOLDENS / case, chunked_prefill_size=chunk, **options) as llm:
        backend = llm.engine.runner.backend
        assert isinstance(backend, DSABackend) and backend._kernels is not None
        ids = golden["input_ids_a"].tolist()
        expected = golden["logits_a"].log_softmax(-1)
        torch.testing.assert_close(llm.logprobs(ids), expected, rtol=0, atol=5e-4)
        check_selections(llm, case)
        for name in ("a", "b", "short"):  # the continuation of `short` crosses k
            read_by(llm).clear()
            ids = golden[f"input_ids_{name}"].tolist()
            result = llm.generate(ids, max_tokens=32, ignore_eos=True)
            assert result.token_ids == golden[f"greedy_ids_{name}"].tolist()


@pytest.mark.parametrize("case", CASES)
def test_recorded_steps_say_what_goldens_say(case: str) -> None:
    golden = load_file(GOLDENS / case / "golden.safetensors")
    names = ("a", "short", "b")
    prompts = [golden[f"input_ids_{name}"].tolist() for name in names]
    with LLM(GOLDENS / case, dtype="float32", device="cuda", kv_cache_gib=0.1) as llm:
        graphs = llm.engine.runner.graphs
        assert graphs is not None
        assert {(kind.kind, kind.mixed) for kind, _ in graphs._graphs} >= {
            ("sparse", False),
            ("dense", False),
        }
        for _ in range(2):
            results = llm.generate(prompts, max_tokens=32, ignore_eos=True)
            for name, result in zip(names, results, strict=True):
                assert result.token_ids == golden[f"greedy_ids_{name}"].tolist()


def test_a_trace_is_the_same_as_on_a_cpu() -> None:
    golden = load_file(GOLDENS / SHARED / "golden.safetensors")
    ids = golden["input_ids_a"].tolist()
    traces = []
    for device in ("cpu", "cuda"):
        with LLM(GOLDENS / SHARED, dtype="float32", device=device, kv_cache_gib=0.1) as llm:
            trace = llm.generate(ids, max_tokens=8, ignore_eos=True, trace=True).trace
            assert trace is not None
            traces.append([[own.pages for own in token.layers] for token in trace.tokens])
    assert traces[0] == traces[1]
