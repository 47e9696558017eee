"""Things that happen while a step is in flight. On a CPU the step has run by then, but its tokens
are not known yet to anyone, as on a GPU; the order of events is scripted, not left to time."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from cairn import LLM, SamplingParams
from cairn.engine.plan import Allowed, StepPlan
from cairn.engine.request import State
from tests.engine.test_speculation import Always, Liar
from tests.helpers import TINY_OLMO3, byte_tokenizer, poison_free_memory, tokens_of, write_model

PAGE = 16


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = write_model(tmp_path_factory.mktemp("overlap"), {**TINY_OLMO3, "vocab_size": 256})
    byte_tokenizer().save(str(folder / "tokenizer.json"))
    return folder


def load(folder: Path, *, overlap: bool = True, **options: Any) -> LLM:
    llm = LLM(folder, dtype="float64", device="cpu", **{"page_size": PAGE, **options})
    poison_free_memory(llm.engine)
    llm.engine.overlap = overlap
    return llm


def alone(folder: Path, prompt: list[int], params: SamplingParams) -> list[int]:
    with load(folder, overlap=False) as llm:
        return llm.generate(prompt, params).token_ids


PARAMS = SamplingParams(max_tokens=40, ignore_eos=True)


def start(llm: LLM, prompts: list[list[int]], params: SamplingParams = PARAMS) -> list[Any]:
    """Requests that have a token each and a step in flight."""
    frontend = llm.frontend
    requests = [frontend.prepare(prompt, params)[0] for prompt in prompts]
    for request in requests:
        frontend.submit([request])
    while any(request.num_output < 3 for request in requests):
        frontend.step()
    assert llm.engine._in_flight is not None
    assert all(request.pending == 1 for request in requests)
    return requests


def drain(llm: LLM) -> None:
    while llm.engine.has_work:
        llm.frontend.step()
    llm.frontend.step()  # what is still in flight lands
    llm.engine.scheduler.check()


def test_a_step_is_launched_before_the_last_ones_tokens_are_known(folder: Path) -> None:
    with load(folder) as llm:
        (request,) = start(llm, [tokens_of(20)])
        assert request.computed == len(request.token_ids)  # the unknown token's row is computed
        drain(llm)
        assert request.output_ids == alone(folder, tokens_of(20), PARAMS)


def test_abort_in_flight_frees_pages_and_spares_the_others(folder: Path) -> None:
    prompts = [tokens_of(20), tokens_of(33, seed=1)]
    with load(folder) as llm:
        gone, stays = start(llm, prompts)
        before = list(gone.output_ids)
        assert llm.abort(gone.id)
        llm.engine.scheduler.check()
        # Its pages and its slot go to a newcomer while the step that writes them is in flight.
        frontend = llm.frontend
        (newcomer,) = frontend.prepare(tokens_of(25, seed=2), PARAMS)
        frontend.submit([newcomer])
        drain(llm)
        assert gone.output_ids == before
        assert stays.output_ids == alone(folder, prompts[1], PARAMS)
        assert newcomer.output_ids == alone(folder, tokens_of(25, seed=2), PARAMS)


def test_a_stop_token_drops_the_step_in_flight(folder: Path) -> None:
    text = alone(folder, tokens_of(20), PARAMS)
    stop = text[5]
    length = text.index(stop) + 1
    params = SamplingParams(max_tokens=40, ignore_eos=True, stop_token_ids=(stop,))
    with load(folder) as llm:
        result = llm.generate(tokens_of(20), params)
        assert result.token_ids == text[:length]
        assert result.finish_reason == "stop"
        drain(llm)
        assert all(usage.owned == 0 for usage in llm.engine.usage())


def test_a_stop_string_drops_the_step_in_flight(folder: Path) -> None:
    with load(folder, overlap=False) as llm:
        expected = llm.generate(tokens_of(20), PARAMS).text or ""
        stop = expected[6:8]
        params = SamplingParams(max_tokens=40, ignore_eos=True, stop=stop)
        cut = llm.generate(tokens_of(20), params)
        assert len(cut.token_ids) < 40
    with load(folder) as llm:
        result = llm.generate(tokens_of(20), params)
        assert result.text == cut.text and result.token_ids == cut.token_ids
        drain(llm)
        assert all(usage.owned == 0 for usage in llm.engine.usage())


def test_the_last_token_is_not_computed_in_vain(folder: Path) -> None:
    with load(folder) as llm:
        llm.generate(tokens_of(20), max_tokens=5, ignore_eos=True)
        drain(llm)
        assert llm.engine.stats.computed_tokens == 20 + 4


def test_retraction_in_flight_keeps_the_token_that_is_coming(folder: Path) -> None:
    prompts = [tokens_of(20 + i, seed=i) for i in range(4)]
    with load(folder, kv_cache_gib=4 * 13 * 3 * 2 * PAGE * 32 * 8 / 4 / 2**30) as llm:
        scheduler = llm.engine.scheduler
        requests = start(llm, prompts)
        victim = requests[-1]
        known = len(victim.token_ids)
        scheduler._retract(victim)
        assert victim.state is State.WAITING and victim.pending == 1
        scheduler.check()
        llm.frontend.step()
        assert victim.pending == 0 and len(victim.token_ids) == known + 1
        drain(llm)
        for prompt, request in zip(prompts, requests, strict=True):
            assert request.output_ids == alone(folder, prompt, PARAMS)


def test_requests_that_need_their_token_on_the_host_take_turns(folder: Path) -> None:
    prompts = [tokens_of(20), tokens_of(30, seed=1)]
    with load(folder) as llm:
        frontend = llm.frontend
        slow, fast = (frontend.prepare(prompt, PARAMS)[0] for prompt in prompts)
        slow.host_tokens = True
        for request in (slow, fast):
            frontend.submit([request])
        while fast.num_output < 30:
            frontend.step()
        assert 13 <= slow.num_output <= 17  # every other step
        drain(llm)
        for prompt, request in zip(prompts, (slow, fast), strict=True):
            assert request.output_ids == alone(folder, prompt, PARAMS)


def test_a_failure_while_two_steps_are_out_loses_no_token(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    prompts = [tokens_of(20), tokens_of(40, seed=1)]
    with load(folder) as llm:
        requests = start(llm, prompts)
        runner = llm.engine.runner

        def broken(step: Any) -> Any:
            raise RuntimeError("the device is gone")

        with monkeypatch.context() as patch:
            patch.setattr(runner, "finish", broken)
            with pytest.raises(RuntimeError, match="gone"):
                llm.frontend.step()
        llm.engine.scheduler.check()
        assert all(request.pending == 0 for request in requests)
        drain(llm)
        for prompt, request in zip(prompts, requests, strict=True):
            assert request.output_ids == alone(folder, prompt, PARAMS)


def test_tokens_of_a_request_that_a_failure_ended_are_dropped(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A check was finished, then the launch of the next step failed. Whoever called gives up; the
    other goes on, and gets the tokens of both."""
    prompts = [tokens_of(20), tokens_of(40, seed=1)]
    outputs = [alone(folder, prompt, PARAMS) for prompt in prompts]
    with load(folder, speculative="ngram") as llm:
        speculation = llm.engine.scheduler.speculation
        assert speculation is not None
        truth = [(*prompt, *output) for prompt, output in zip(prompts, outputs, strict=True)]
        speculation.pace, speculation.drafter = Always(), Liar(truth, 0, honest=1.0)
        stream = llm.stream(prompts[0], PARAMS)
        tokens = list(next(stream).token_ids)
        runner = llm.engine.runner
        launch, launched = runner.launch, list[StepPlan]()

        def breaks(plan: StepPlan) -> Any:
            if any(before.awaited and len(before.advances) == 2 for before in launched):
                raise RuntimeError("out of luck")
            launched.append(plan)
            return launch(plan)

        with monkeypatch.context() as patch:
            patch.setattr(runner, "launch", breaks)
            with pytest.raises(RuntimeError, match="out of luck"):
                llm.generate(prompts[1], PARAMS)
        tokens += [token for chunk in stream for token in chunk.token_ids]
        assert tokens == outputs[0]
        assert llm.generate(prompts[1], PARAMS).token_ids == outputs[1]


def test_no_step_takes_masks_of_an_earlier_token(folder: Path) -> None:
    """A check is finished and the next step planned before anyone hears of the new tokens."""
    prompt = tokens_of(20)

    def allowed(length: int, drafts: list[int]) -> Allowed:
        """Every token has its own range of ten."""
        masks = [sum(1 << (10 * (length + i) % 200 + j) for j in range(10)) for i in range(8)]
        return Allowed(
            tuple(m.to_bytes(32, "little") for m in masks[: 1 + len(drafts)]), (*drafts,)
        )

    outputs: list[list[int]] = []
    for speculative in (None, "ngram"):
        with load(folder, speculative=speculative) as llm:
            engine = llm.engine
            speculation = engine.scheduler.speculation
            if speculation is not None:
                truth = [(*prompt, *outputs[0])]
                speculation.pace, speculation.drafter = Always(), Liar(truth, 0, honest=1.0)
            (request,) = engine.make_requests(prompt, PARAMS)
            told = {0: allowed(0, [])}
            request.allowed_tokens, request.host_tokens = told.get, True
            engine.submit(request)
            while engine.has_work:
                for _ in engine.step():
                    drafts = [] if speculation is None else speculation.suggest(request)
                    told[request.num_output] = allowed(request.num_output, drafts)
            outputs.append(request.output_ids)
            assert speculation is None or request.accepted_tokens > 20
    assert [token // 10 for token in outputs[0]] == [place % 20 for place in range(40)]
    assert outputs[0] == outputs[1]


@pytest.mark.parametrize("whole", [False, True])
def test_scores_of_a_prompt_retracted_in_flight_come_once(folder: Path, whole: bool) -> None:
    prompt = tokens_of(100)
    scored = SamplingParams(max_tokens=3, ignore_eos=True, prompt_logprobs=1)
    for steps in range(1, 9):
        with load(folder, chunked_prefill_size=32) as llm:
            engine = llm.engine
            (request,) = engine.make_requests(prompt, scored, returns="whole" if whole else "none")
            engine.submit(request)
            for _ in range(steps):
                engine.step()
            if request.pages is None:
                break  # it has ended
            engine.scheduler._retract(request)
            while engine.has_work:
                engine.step()
            engine.step()
            engine.scheduler.check()
            if whole:
                assert sum(map(len, request.distributions)) == len(prompt)
            else:
                assert len(request.prompt_logprobs) == len(prompt) - 1
                assert request.output_ids == alone(folder, prompt, replace(PARAMS, max_tokens=3))
    assert steps > 3
