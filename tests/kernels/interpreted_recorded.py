"""Recorded steps on kernels in Triton's interpreter. Run by test_kernels.py."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import pytest
import torch

from cairn import LLM, SamplingParams
from cairn.attention.backend import Graph
from cairn.engine import graphs
from cairn.engine.drafting import Drafting
from cairn.engine.graphs import StepSize
from cairn.engine.plan import StepPlan
from cairn.kernels import sparse_select
from tests.engine.test_speculation import Always, Liar
from tests.helpers import (
    TINY_HILS,
    TINY_LLAMA,
    TINY_OLMO3,
    poison_free_memory,
    tokens_of,
    write_model,
)
from tests.kernels.kernel_engines import rerun_steps, use_few_programs, use_kernels


def test_a_whole_engine_on_recorded_steps(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Decode and mixed steps with dense rows, sparse rows and both, padded to recorded sizes,
    against torch."""
    use_few_programs(monkeypatch)
    monkeypatch.setattr(graphs, "_MIXED_TOKENS", (32, 48))
    config = {**TINY_LLAMA, "hidden_size": 64, "num_hidden_layers": 1, "vocab_size": 64}
    folder = write_model(tmp_path, config)
    prompts = [tokens_of(n, seed=n, vocab=64) for n in (45, 23)]
    options: dict[str, Any] = {"page_size": 16, "hsa_unit_size": 16, "hsa_topk": 2}
    options |= {"hsa_window": 16, "hsa_dense_below": 26}
    answers, used = [], set()
    for records in (False, True):
        if records:
            use_kernels(monkeypatch)
        with LLM(
            folder,
            attention_backend="triton,hsa" if records else "torch,hsa",
            device="cpu",
            dtype="float32",
            kv_cache_gib=0.05,
            chunked_prefill_size=32,
            max_running_requests=2,
            **options,
        ) as llm:
            runner = llm.engine.runner
            if records:
                rerun_steps(monkeypatch)
                runner.stepper.record_graphs(64)
            poison_free_memory(llm.engine)
            results = llm.generate(prompts, max_tokens=6, ignore_eos=True)
            answers.append([result.token_ids for result in results])
            llm.engine.scheduler.check()
            if records:
                assert runner.stepper.graphs is not None
                for (graph, _), step in runner.stepper.graphs._graphs.items():
                    rerun: Any = step.graph
                    if rerun.replays:
                        used.add((graph.mixed, graph.kind))
    assert answers[0] == answers[1]
    assert used == {(True, "dense"), (True, "both"), (False, "both"), (False, "sparse")}


def test_prompts_that_select_pages_in_recorded_steps(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Prompts of a HiLS model, beside decoding rows and alone, padded to recorded sizes, against
    torch. Chunks with more candidates than recorded steps have run as they are."""
    use_few_programs(monkeypatch)
    monkeypatch.setattr(graphs, "_MIXED_TOKENS", (12, 40))
    monkeypatch.setattr(sparse_select, "_FEW", 2)
    config = {**TINY_HILS, "hidden_size": 64, "num_hidden_layers": 2, "full_attn_interleave": 2}
    config |= {"vocab_size": 64, "hils_sliding_window": 20, "hils_topk": 1}
    folder = write_model(tmp_path, config)
    prompts = [tokens_of(n, seed=n, vocab=64) for n in (20, 45, 75)]
    answers, replayed = [], {}
    for records in (False, True):
        if records:
            use_kernels(monkeypatch)
        with LLM(
            folder,
            device="cpu",
            dtype="float32",
            kv_cache_gib=0.05,
            attention_backend="hsa",
            chunked_prefill_size=50,
            max_running_requests=2,
        ) as llm:
            runner = llm.engine.runner
            if records:
                rerun_steps(monkeypatch)
                runner.stepper.record_graphs(50)
            poison_free_memory(llm.engine)
            results = llm.generate(prompts[:2], max_tokens=4, ignore_eos=True)
            results += llm.generate(prompts[2:], max_tokens=2, ignore_eos=True)
            answers.append([result.token_ids for result in results])
            llm.engine.scheduler.check()
            if records:
                assert runner.stepper.graphs is not None
                steps: Any = runner.stepper.graphs._graphs.items()
                replayed = {key: step.graph.replays for key, step in steps if step.graph.replays}
    assert answers[0] == answers[1]
    mixed = Graph("sparse", mixed=True)
    assert replayed[mixed, StepSize(50, 3)] == 2  # not the second chunk of the longest prompt
    assert replayed[mixed, StepSize(42, 3)] == 1  # beside a decoding row
    assert {graph for graph, _ in replayed} == {mixed, Graph("sparse", mixed=False)}


def test_drafts_are_checked_in_recorded_steps(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rows of a sequence read its past together, also behind a window."""
    use_few_programs(monkeypatch)
    monkeypatch.setattr(graphs, "_MIXED_TOKENS", (32,))
    config = {**TINY_OLMO3, "hidden_size": 64, "vocab_size": 64, "sliding_window": 20}
    config |= {"num_hidden_layers": 2, "layer_types": ["sliding_attention", "full_attention"]}
    folder = write_model(tmp_path, config)
    prompts = [tokens_of(n, seed=n, vocab=64) for n in (45, 23)]
    options: dict[str, Any] = {"page_size": 16, "device": "cpu", "dtype": "float32"}
    options |= {"kv_cache_gib": 0.05}
    options |= {"chunked_prefill_size": 32, "max_running_requests": 3}
    asked = SamplingParams(max_tokens=9, ignore_eos=True)
    with LLM(folder, attention_backend="torch", **options) as llm:
        expected = [result.token_ids for result in llm.generate(prompts, asked)]
    truth = [(*prompt, *own) for prompt, own in zip(prompts, expected, strict=True)]
    use_kernels(monkeypatch)
    rerun_steps(monkeypatch)
    options |= {"attention_backend": "triton", "speculative": "ngram", "speculative_tokens": 3}
    with LLM(folder, **options) as llm:
        speculation, runner = llm.engine.scheduler.speculation, llm.engine.runner
        assert speculation is not None
        speculation.pace, speculation.drafter = Always(), Liar(truth, 1, honest=0.8)
        runner.stepper.record_graphs(32)
        poison_free_memory(llm.engine)
        assert [result.token_ids for result in llm.generate(prompts, asked)] == expected
        assert runner.stepper.graphs is not None and llm.engine.scheduler.stats.accepted > 4
        replayed: Any = {
            key: step.graph for key, step in runner.stepper.graphs._graphs.items() if key[0].few
        }
        assert sum(step.replays for step in replayed.values()) > 2


@pytest.mark.slow
def test_drafts_read_the_pages_that_the_first_one_selected(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """There are as many pages before the window as are selected, so all drafts come true. Those of
    the next step read the same pages, unless other steps came between. First the model drafts
    within a step, later behind it, from tokens that the host has not seen."""
    use_few_programs(monkeypatch)
    monkeypatch.setattr(graphs, "_MIXED_TOKENS", (32,))
    config = {**TINY_LLAMA, "hidden_size": 64, "num_hidden_layers": 2, "vocab_size": 64}
    folder = write_model(tmp_path, config)
    prompts = [tokens_of(n, seed=n, vocab=64) for n in (55, 52)]
    asked = SamplingParams(max_tokens=7, ignore_eos=True)
    options: dict[str, Any] = {"page_size": 16, "device": "cpu", "dtype": "float32"}
    options |= {"kv_cache_gib": 0.05, "max_running_requests": 2}
    with LLM(folder, attention_backend="torch", **options) as llm:
        plain = llm.generate(prompts, asked)
    use_kernels(monkeypatch)
    rerun_steps(monkeypatch)
    with LLM(
        folder,
        **options,
        attention_backend="triton",
        speculative="sparse",
        speculative_tokens=2,
        hsa_topk=2,
        hsa_window=20,
        hsa_dense_below=0,
    ) as llm:
        speculation, runner = llm.engine.scheduler.speculation, llm.engine.runner
        assert speculation is not None
        speculation.pace = Always()
        speculation.drafts_ahead = True
        drafted: list[Drafting] = []
        behind: list[bool] = []
        draft, draft_behind = runner.drafts._draft, runner.drafts._draft_behind
        backend = cast(Any, runner.stepper.backend)

        def watched_behind(plan: StepPlan, tokens: torch.Tensor) -> bool:
            behind.append(draft_behind(plan, tokens))
            return behind[-1]

        def watched(drafting: Drafting) -> None:
            draft(drafting)
            drafted.append(drafting)
            if len(drafted) == 1:  # once more, as if the shorter text were dense
                assert runner.drafts._selected is not None
                config = replace(backend._config, dense_below=int(drafting.starts.min()) + 1)
                with monkeypatch.context() as patch:
                    patch.setattr(backend, "_config", config)
                    draft(drafting)
                assert runner.drafts._selected is None

        monkeypatch.setattr(runner.drafts, "_draft", watched)
        monkeypatch.setattr(runner.drafts, "_draft_behind", watched_behind)
        poison_free_memory(llm.engine)
        runner.stepper.record_graphs(32)
        results = llm.generate(prompts, asked)
        assert [own.token_ids for own in results] == [own.token_ids for own in plain]
        stats = llm.engine.scheduler.stats
        assert stats.accepted == stats.drafted >= 6
        assert len(drafted) == 1 and behind and all(behind)
        assert runner.stepper.graphs is not None
        steps: Any = runner.stepper.graphs._graphs.items()
        replays = {"kept": 0, "sparse": 0, "both": 0}
        for (graph, _), recorded in steps:
            if graph.kind in replays:
                replays[graph.kind] += recorded.graph.replays
        # Each time the first draft selects, but for the third time; a dense row makes all select.
        assert replays == {"sparse": 1 + 1 + 1, "kept": 1 + 1 + 2, "both": 1}
        llm.engine.scheduler.check()


@pytest.mark.slow
def test_drafts_behind_a_check_follow_what_came_true(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Drafts read one page and a short window, so that many fail. Requests end at different
    times, and rows of drafts go beyond the room of some."""
    use_few_programs(monkeypatch)
    monkeypatch.setattr(graphs, "_MIXED_TOKENS", (32,))
    config = {**TINY_LLAMA, "hidden_size": 64, "num_hidden_layers": 2, "vocab_size": 64}
    folder = write_model(tmp_path, config)
    prompts = [tokens_of(n, seed=n, vocab=64) for n in (75, 62, 90)]
    asked = [SamplingParams(max_tokens=count, ignore_eos=True) for count in (21, 33, 27)]
    options: dict[str, Any] = {"page_size": 16, "device": "cpu", "dtype": "float32"}
    options |= {"kv_cache_gib": 0.05, "max_running_requests": 3}
    with LLM(folder, attention_backend="torch", **options) as llm:
        plain = llm.generate(prompts, asked)
    use_kernels(monkeypatch)
    rerun_steps(monkeypatch)
    options |= {"speculative": "sparse", "speculative_tokens": 3, "hsa_dense_below": 0}
    with LLM(folder, **options, attention_backend="triton", hsa_topk=1, hsa_window=16) as llm:
        speculation, runner = llm.engine.scheduler.speculation, llm.engine.runner
        assert speculation is not None
        speculation.pace = Always()
        speculation.drafts_ahead = True
        behind: list[bool] = []
        draft_behind = runner.drafts._draft_behind

        def watched(plan: StepPlan, tokens: torch.Tensor) -> bool:
            behind.append(draft_behind(plan, tokens))
            return behind[-1]

        monkeypatch.setattr(runner.drafts, "_draft_behind", watched)
        poison_free_memory(llm.engine)
        runner.stepper.record_graphs(32)
        results = llm.generate(prompts, asked)
        assert [own.token_ids for own in results] == [own.token_ids for own in plain]
        stats = llm.engine.scheduler.stats
        assert 20 < stats.accepted < stats.drafted - 20 and sum(behind) >= 8
        llm.engine.scheduler.check()
