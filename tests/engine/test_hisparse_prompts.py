"""Prompts that are read densely while their pages are in host memory."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from cairn import LLM, SamplingParams
from cairn.bench.tier_engines import drop_copies
from cairn.engine.engine import Engine
from cairn.engine.request import Request
from cairn.memory.prompt_stage import PromptStage, StagedStep
from tests.engine.lanes import tier_of
from tests.engine.tiered import MODELS, PAGE, check, check_clean, expected, load, tiered
from tests.helpers import tokens_of, write_model

PARAMS = SamplingParams(max_tokens=24, ignore_eos=True)


@pytest.fixture(scope="module", params=["dense", "pair"])
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp(request.param), MODELS[request.param][0])


def stage_of(llm: LLM) -> PromptStage:
    stage = tier_of(llm.engine).stage
    assert stage is not None
    return stage


def submit(engine: Engine, prompt: list[int], params: SamplingParams = PARAMS) -> Request:
    (request,) = engine.make_requests(prompt, params)
    engine.submit(request)
    return request


def evict_frames(llm: LLM) -> None:
    """Every page that no request holds is in host memory alone."""
    llm.engine.step()
    drop_copies(llm.engine.scheduler.cache)


@pytest.mark.parametrize("chunk", [7, 32, 4096])
def test_logprobs_are_the_same_with_the_tier_and_without(folder: Path, chunk: int) -> None:
    prompt = tokens_of(300)
    with load(folder, disable_radix_cache=True, chunked_prefill_size=4096) as llm:
        without = llm.logprobs(prompt)
    with tiered(folder, frames=9, chunked_prefill_size=chunk) as llm:
        torch.testing.assert_close(llm.logprobs(prompt), without, rtol=0, atol=1e-6)
        assert stage_of(llm).bytes_in > 0
        check_clean(llm.engine)


@pytest.mark.parametrize("room", [10, 40])
def test_prompts_of_one_step_share_the_stage_or_take_turns(
    folder: Path, room: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    prefixes = [tokens_of(130, seed=seed) for seed in range(3)]
    prompts = [[*prefix, 5, seed] for seed, prefix in enumerate(prefixes)]
    prompts.append([*prefixes[0], 7, 8])  # shares what the first one reads
    fills: list[int] = []
    fill = PromptStage.fill

    def counted(stage: PromptStage, step: StagedStep) -> None:
        fills.append(len(step.fills))
        fill(stage, step)

    with tiered(folder, frames=60, max_running_requests=5, chunked_prefill_size=64) as llm:
        stage_of(llm).room = room
        llm.generate(prefixes, max_tokens=1, ignore_eos=True)
        evict_frames(llm)
        other = submit(llm.engine, tokens_of(60, seed=9))
        while not other.num_output:  # decodes beside the prompts
            llm.engine.step()
        monkeypatch.setattr(PromptStage, "fill", counted)
        requests = [submit(llm.engine, prompt) for prompt in prompts]
        while llm.engine.has_work:
            llm.engine.step()
            check(llm.engine)
        for request in (other, *requests):
            prompt = tuple(request.token_ids[: request.prompt_len])
            assert request.output_ids == expected(folder, prompt, PARAMS)
        assert all(request.cached_tokens == 128 for request in requests)
        layers = len(tier_of(llm.engine)._host.layers)
        if room == 10:  # nine pages each
            assert max(fills) > layers
        else:
            assert max(fills) == layers
        check_clean(llm.engine)


def test_pages_stay_on_the_device_while_there_are_frames(folder: Path) -> None:
    """What a chunk copies in is what does not fit, and nothing while everything fits."""
    prompt, chunk, frames = tokens_of(480), 32, 14
    with tiered(folder, frames=frames, chunked_prefill_size=chunk) as llm:
        stage, engine = stage_of(llm), llm.engine
        page_bytes = tier_of(engine)._host.page_bytes
        request = submit(engine, prompt)
        while not request.num_output:
            before = stage.bytes_in
            engine.step()
            pages = -(-request.computed // PAGE)
            copied = (stage.bytes_in - before) / page_bytes
            assert copied == max(0, pages - frames)
        assert copied > 0
        while engine.has_work:
            engine.step()
        assert request.output_ids == expected(folder, tuple(prompt), PARAMS)
        assert tier_of(engine).stats.bytes_in >= stage.bytes_in > 0


def test_traced_requests(folder: Path) -> None:
    prompt = tokens_of(200)

    def reads(llm: LLM) -> list[Any]:
        trace = llm.generate(prompt, PARAMS, trace=True).trace
        assert trace is not None
        return [
            (token.token_id, [(read.layer, read.pages) for read in token.layers])
            for token in trace.tokens
        ]

    with load(folder) as llm:
        without = reads(llm)
    with tiered(folder, frames=9, chunked_prefill_size=50) as llm:
        assert reads(llm) == without  # cold, and on a prefix in host memory
        assert reads(llm) == without
        assert stage_of(llm).bytes_in > 0


def test_a_retracted_request_reads_its_prompt_densely_and_its_answer_sparsely(
    folder: Path,
) -> None:
    """Nothing is cached: it computes both again, in chunks that hold one or the other."""
    prompt = tokens_of(120)
    with tiered(folder, frames=9, disable_radix_cache=True, chunked_prefill_size=100) as llm:
        engine, plan = llm.engine, llm.engine.scheduler.plan
        chunks: list[tuple[int, int]] = []

        def noted() -> Any:
            made = plan()
            chunks.extend((advance.start, advance.stop) for advance in made.advances)
            return made

        engine.scheduler.plan = noted  # type: ignore[method-assign]
        request = submit(engine, prompt)
        while request.num_output < 20:
            engine.step()
        engine.scheduler._retract(request)
        chunks.clear()
        while engine.has_work:
            engine.step()
        assert chunks[:3] == [(0, 100), (100, 120), (120, 140)]
        assert request.output_ids == expected(folder, tuple(prompt), PARAMS)
        check_clean(engine)
