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


def options(**more: Any) -> dict[str, Any]:
    return {"device": "cuda", "kv_cache_gib": 0.1, "max_running_requests": 4, **more}


@pytest.mark.parametrize("chunk", [4096, pytest.param(7, marks=pytest.mark.slow)])
@pytest.mark.parametrize("case", CASES)
def test_goldens(case: str, chunk: int) -> None:
    """Selections of a prompt and logits, then answers on recorded steps and on steps as they are:
    the same tokens, and rows that are read again are the same."""
    golden = load_file(GOLDENS / case / "golden.safetensors")
    names = ("a", "short", "b")  # the continuation of `short` crosses k
    prompts = {name: golden[f"input_ids_{name}"].tolist() for name in names}
    with load(GOLDENS / case, **options(chunked_prefill_size=chunk)) as llm:
        stepper: Any = llm.engine.runner.stepper
        assert isinstance(stepper.backend, DSABackend) and stepper.backend._kernels is not None
        assert {(kind.kind, kind.mixed) for kind, _ in stepper.graphs._graphs} >= {
            ("sparse", False),
            ("dense", False),
        }
        expected = golden["logits_a"].log_softmax(-1)
        torch.testing.assert_close(llm.logprobs(prompts["a"]), expected, rtol=0, atol=5e-4)
        check_selections(llm, case)
        for graphs in (stepper.graphs, None):
            stepper.graphs = graphs
            for name, prompt in prompts.items():
                read_by(llm).clear()
                result = llm.generate(prompt, max_tokens=32, ignore_eos=True)
                assert result.token_ids == golden[f"greedy_ids_{name}"].tolist()


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_recorded_steps_are_the_same_as_others(dtype: str) -> None:
    """Of several requests at once. Prefixes are not cached, so that both times requests share steps
    in the same way: in half precision, steps of few rows round otherwise than larger ones."""
    golden = load_file(GOLDENS / SHARED / "golden.safetensors")
    prompts = [golden[f"input_ids_{name}"].tolist() for name in ("a", "short", "b")]
    with LLM(GOLDENS / SHARED, **options(dtype=dtype, disable_radix_cache=True)) as llm:
        stepper: Any = llm.engine.runner.stepper
        answers = []
        for graphs in (stepper.graphs, None):
            stepper.graphs = graphs
            results = llm.generate(prompts, max_tokens=32, ignore_eos=True)
            answers.append([result.token_ids for result in results])
    assert answers[0] == answers[1]


def test_a_trace_is_the_same_as_on_a_cpu() -> None:
    golden = load_file(GOLDENS / SHARED / "golden.safetensors")
    ids = golden["input_ids_a"].tolist()
    traces = []
    for device in ("cpu", "cuda"):
        with LLM(GOLDENS / SHARED, dtype="float32", **options(device=device)) as llm:
            trace = llm.generate(ids, max_tokens=8, ignore_eos=True, trace=True).trace
            assert trace is not None
            traces.append([[own.pages for own in token.layers] for token in trace.tokens])
    assert traces[0] == traces[1]
