"""DeepSeek sparse attention by kernels: which rows are read, and that recorded steps read them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from cairn import LLM, SamplingParams
from cairn.attention import dsa_kernels
from cairn.attention.backend import Graph
from cairn.attention.dsa_backend import DSABackend
from tests.gpu.test_row_tier import watch_graphs
from tests.helpers import GOLDENS, TINY_DSA, tokens_of, write_model
from tests.kernels import row_case
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
        recorded = {(kind.kind, kind.mixed) for kind, _ in stepper.graphs._graphs}
        assert recorded >= {("sparse", False), ("sparse", True), ("dense", False)}
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


@pytest.mark.parametrize("scores", [2**25, 1], ids=["one tile", "many tiles"])
def test_recorded_prompts_say_what_others_say(
    scores: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """New tokens behind a cached prefix, alone and beside decoding requests, in steps that are
    padded, in steps of just the recorded sizes, and in steps of too many rows."""
    monkeypatch.setattr(dsa_kernels, "_SCORES", scores)
    config = {**TINY_DSA, "index_head_dim": 32, "max_position_embeddings": 9000}
    folder = write_model(tmp_path, config)
    sizes = {"chunked_prefill_size": 700, "max_running_requests": 12}
    asked = SamplingParams(max_tokens=6, ignore_eos=True)
    prefix = tokens_of(6000)  # 93 pages, and 48 tokens that are computed again
    sets = [[prefix + tokens_of(n, seed=n)] for n in (1, 3, 16, 17, 64, 100, 333, 464, 465)]
    sets.append([tokens_of(40), *(prefix + tokens_of(n, seed=n) for n in (2, 30, 31, 150, 260))])
    sets.append([prefix + tokens_of(9, seed=n) for n in range(12)])
    with LLM(folder, dtype="float32", **options(**sizes)) as llm:
        stepper: Any = llm.engine.runner.stepper
        used = watch_graphs(llm)
        answers = []
        for graphs in (stepper.graphs, None):
            stepper.graphs = graphs
            llm.engine.scheduler.cache.clear()
            llm.generate(prefix, asked)
            found = [llm.generate(prompts, asked) for prompts in sets]
            answers.append([[own.token_ids for own in results] for results in found])
        assert Graph("sparse", mixed=True) in used
    assert answers[0] == answers[1]


@pytest.mark.parametrize("case", row_case.LISTS, ids=str)
def test_list_of_rows(case: tuple[list[int], list[int], int]) -> None:
    row_case.check_list(*case, torch.device("cuda"))


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
