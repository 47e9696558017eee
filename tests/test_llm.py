from __future__ import annotations

import gc
import json
import os
import signal
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from cairn import LLM, Generation, SamplingParams
from cairn.engine.engine import Engine
from cairn.errors import CairnError, ConfigError, QueueFullError, RequestError
from cairn.frontend import Output
from cairn.memory.cache import PagedCache
from tests.helpers import TINY_LLAMA, byte_tokenizer, poison_free_memory, tokens_of, write_model

CHAT = "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("text-model")
    write_model(path, {**TINY_LLAMA, "vocab_size": 256, "eos_token_id": [250, 251]})
    byte_tokenizer().save(str(path / "tokenizer.json"))
    (path / "tokenizer_config.json").write_text(json.dumps({"chat_template": CHAT}))
    return path


@pytest.fixture
def llm(folder: Path) -> Any:
    with LLM(folder, device="cpu", dtype="float64", page_size=16) as llm:
        poison_free_memory(llm.engine)
        yield llm
        llm.engine.scheduler.check()
        assert llm.engine.scheduler.num_running == llm.engine.scheduler.num_waiting == 0


def test_one_prompt_gives_one_result_and_many_give_many(llm: LLM) -> None:
    one = llm.generate("hello", max_tokens=5)
    assert one.text is not None
    assert llm.generate(["hello"], max_tokens=5)[0].token_ids == one.token_ids
    by_ids = llm.generate(list(b"hello"), max_tokens=5)
    ids = llm.tokenizer.encode("hello") if llm.tokenizer else []
    assert llm.generate([ids, ids], max_tokens=5)[1].token_ids == one.token_ids
    assert by_ids.usage.prompt_tokens == 5


def test_results_carry_usage_reason_and_timings(llm: LLM) -> None:
    result = llm.generate("hello", max_tokens=7, ignore_eos=True)
    assert result.finish_reason == "length"
    assert result.usage.completion_tokens == len(result.token_ids) == 7
    assert result.usage.total_tokens == 12
    times = result.timings
    assert times.queued is not None and times.first_token is not None
    assert 0 <= times.queued <= times.first_token <= times.total


def test_sampling_by_keyword_equals_sampling_params(llm: LLM) -> None:
    params = SamplingParams(max_tokens=9, temperature=1.0, seed=3, ignore_eos=True)
    by_keyword = llm.generate("x", max_tokens=9, temperature=1.0, seed=3, ignore_eos=True)
    assert llm.generate("x", params).token_ids == by_keyword.token_ids
    other = llm.generate("x", max_tokens=9, temperature=1.0, seed=4, ignore_eos=True)
    assert other.token_ids != by_keyword.token_ids


def test_unseeded_requests_differ_but_follow_the_engines_seed(folder: Path) -> None:
    runs = []
    for _ in range(2):
        with LLM(folder, device="cpu", seed=5) as llm:
            runs.append(
                [llm.generate("x", temperature=2.0, max_tokens=9).token_ids for _ in range(2)]
            )
    assert runs[0] == runs[1]
    assert runs[0][0] != runs[0][1]


def test_a_stop_token_ends_the_text_and_is_not_in_it(llm: LLM) -> None:
    free = llm.generate("hello", max_tokens=12, ignore_eos=True)
    stop = free.token_ids[4]
    at = free.token_ids.index(stop)
    result = llm.generate("hello", max_tokens=12, ignore_eos=True, stop_token_ids=[stop])
    assert result.finish_reason == "stop"
    assert result.token_ids == free.token_ids[: at + 1]
    assert llm.tokenizer is not None
    assert result.text == llm.tokenizer.decode(free.token_ids[:at])


def test_every_eos_id_of_the_model_ends_the_text(folder: Path, llm: LLM) -> None:
    eos = llm.engine.eos_token_ids
    assert eos == {250, 251}
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": 249}))
    try:
        with LLM(folder, device="cpu") as other:
            assert other.engine.eos_token_ids == {249, 250, 251}
    finally:
        (folder / "generation_config.json").unlink()


def test_a_stop_string_ends_the_text_across_tokens(llm: LLM) -> None:
    free = llm.generate("hello", max_tokens=30, temperature=1.0, seed=8, ignore_eos=True)
    assert free.text is not None
    stop = free.text[6:9]
    at = free.text.index(stop)
    options: dict[str, Any] = {"max_tokens": 30, "temperature": 1.0, "seed": 8, "ignore_eos": True}
    result = llm.generate("hello", stop=stop, **options)
    assert result.finish_reason == "stop"
    assert result.text == free.text[:at]
    assert len(result.token_ids) < 30
    first = result.timings.first_token
    assert first is not None and 0 < first <= result.timings.total
    streamed = list(llm.stream("hello", stop=[stop], **options))
    assert "".join(chunk.text for chunk in streamed) == result.text
    assert streamed[-1].finish_reason == "stop"


def test_stream_gives_the_same_text_piece_by_piece(llm: LLM) -> None:
    whole = llm.generate("hello", max_tokens=20, temperature=0.9, seed=1, ignore_eos=True)
    chunks = list(llm.stream("hello", max_tokens=20, temperature=0.9, seed=1, ignore_eos=True))
    assert "".join(chunk.text for chunk in chunks) == whole.text
    assert [t for chunk in chunks for t in chunk.token_ids] == whole.token_ids
    assert [c.finish_reason for c in chunks[:-1]] == [None] * (len(chunks) - 1)
    assert chunks[-1].result is not None
    assert chunks[-1].result.text == whole.text


def test_two_streams_share_steps(llm: LLM) -> None:
    one = llm.stream("abc", max_tokens=10, ignore_eos=True)
    two = llm.stream("xyz", max_tokens=10, ignore_eos=True)
    pairs = list(zip(one, two, strict=True))
    assert len(pairs) == 10
    # Twenty tokens in hardly more than ten steps.
    assert llm.engine.stats.steps <= 12


def test_abort_closes_a_stream_and_leaves_others_alone(llm: LLM) -> None:
    expected = llm.generate("other", max_tokens=10, ignore_eos=True).token_ids
    doomed = llm.stream("hello", max_tokens=50, ignore_eos=True)
    other = llm.stream("other", max_tokens=10, ignore_eos=True)
    next(doomed)
    assert llm.abort(doomed.request_id)
    rest = list(doomed)
    assert rest[-1].finish_reason == "abort"
    assert rest[-1].result is not None and len(rest[-1].result.token_ids) >= 1
    assert not llm.abort(doomed.request_id)
    assert [t for chunk in other for t in chunk.token_ids] == expected


def test_a_stream_nobody_wants_any_more_is_aborted(llm: LLM) -> None:
    stream = llm.stream("hello", max_tokens=50, ignore_eos=True)
    next(stream)
    del stream
    gc.collect()
    assert not llm.engine.has_work
    with llm.stream("hello", max_tokens=50, ignore_eos=True):
        pass
    assert not llm.engine.has_work


def test_the_garbage_collector_finds_a_stream_within_a_step(
    llm: LLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The step that is being launched has a token of the stream's request."""
    expected = llm.generate("other", max_tokens=5, ignore_eos=True).token_ids
    launch = type(llm.engine.runner).launch

    def collecting(*given: Any) -> Any:
        launched = launch(*given)
        if not collected:
            collected.append(gc.collect())
        return launched

    params = [SamplingParams(max_tokens=count, ignore_eos=True) for count in (1, 50)]
    for begin in (
        lambda: llm.stream("hello", params[1]),
        lambda: llm.generate_each(["hello", "world"], params),
    ):
        ring: list[Any] = [begin()]
        ring.append(ring)  # only the collector frees it
        next(ring[0])
        collected: list[int] = []
        with monkeypatch.context() as patch:
            patch.setattr(type(llm.engine.runner), "launch", collecting)
            gc.disable()
            try:
                del ring
                assert llm.generate("other", max_tokens=5, ignore_eos=True).token_ids == expected
            finally:
                gc.enable()
        assert not llm.engine.has_work


def test_chat_uses_the_models_template(llm: LLM) -> None:
    messages = [{"role": "user", "content": "hi"}]
    answer = llm.chat(messages, max_tokens=6, ignore_eos=True)
    assert answer.token_ids == llm.generate("user: hi\n", max_tokens=6, ignore_eos=True).token_ids
    streamed = list(llm.stream_chat(messages, max_tokens=6, ignore_eos=True))
    assert [t for chunk in streamed for t in chunk.token_ids] == answer.token_ids


def test_ctrl_c_leaves_a_working_engine(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    expected = llm.generate("hello", max_tokens=5, ignore_eos=True).token_ids
    steps = iter(range(3))
    whole_step = Engine.step

    def interrupted(engine: Engine) -> Any:
        if next(steps) == 2:
            raise KeyboardInterrupt
        return whole_step(engine)

    with monkeypatch.context() as patch:
        patch.setattr(Engine, "step", interrupted)
        with pytest.raises(KeyboardInterrupt):
            llm.generate(["hello", "world"], max_tokens=50, ignore_eos=True)
    assert not llm.engine.has_work
    assert llm.generate("hello", max_tokens=5, ignore_eos=True).token_ids == expected


def test_each_result_comes_before_the_rest_is_done(llm: LLM) -> None:
    params = [SamplingParams(max_tokens=count, ignore_eos=True) for count in (3, 60, 2)]
    prompts = ["hello", "world", "again"]
    expected = [result.token_ids for result in llm.generate(prompts, params)]
    assert [result.token_ids for result in llm.generate_each(prompts, params)] == expected
    each = llm.generate_each(prompts, params)
    first, busy = next(each), llm.engine.has_work
    assert first.token_ids == expected[0] and busy
    each.close()  # the rest is aborted
    assert not llm.engine.has_work
    llm.engine.scheduler.check()
    assert list(llm.generate_each([])) == []
    with pytest.raises(RequestError, match="use generate"):
        llm.generate_each("hello")


@pytest.mark.parametrize("call", [1, 4])
def test_ctrl_c_while_a_step_is_planned(
    llm: LLM, monkeypatch: pytest.MonkeyPatch, call: int
) -> None:
    """A request has been given pages of the prefix cache, and does not know it yet."""
    prompts = ["hello " * 20 + str(number) for number in range(6)]
    expected = llm.generate(prompts[0], max_tokens=5, ignore_eos=True).token_ids
    calls = 0
    give = PagedCache.open

    def interrupted(*given: Any, **options: Any) -> Any:
        nonlocal calls
        calls += 1
        pages = give(*given, **options)
        if calls == call:
            os.kill(os.getpid(), signal.SIGINT)
        return pages

    with monkeypatch.context() as patch:
        patch.setattr(PagedCache, "open", interrupted)
        with pytest.raises(KeyboardInterrupt):
            llm.generate(prompts, max_tokens=20, ignore_eos=True)
    assert calls >= call and not llm.engine.has_work
    llm.engine.scheduler.check()
    assert all(group.owned == 0 for group in llm.engine.usage())
    assert llm.generate(prompts[0], max_tokens=5, ignore_eos=True).token_ids == expected


def test_threads_take_turns(llm: LLM) -> None:
    prompts = [f"thread {number}" for number in range(8)]
    given: dict[str, Any] = {"max_tokens": 20, "ignore_eos": True}
    expected = [llm.generate(prompt, **given).token_ids for prompt in prompts]

    def streamed(prompt: str) -> list[int]:
        return [token for chunk in llm.stream(prompt, **given) for token in chunk.token_ids]

    def generated(prompt: str) -> list[int]:
        result: Generation = llm.generate(prompt, **given)
        return result.token_ids

    with ThreadPoolExecutor(8) as threads:
        for way in (generated, streamed):
            assert list(threads.map(way, prompts)) == expected
        mixed = [threads.submit(way, p) for p in prompts for way in (generated, streamed)]
        assert [each.result() for each in mixed] == [ids for ids in expected for _ in range(2)]


def test_choices_that_wait_share_their_prompt(llm: LLM) -> None:
    prompt = list(range(50))
    first, *others = llm.engine.make_requests(prompt, SamplingParams(n=4, max_tokens=2))
    assert all(other.token_ids is first.token_ids for other in others)
    outputs = llm.frontend.submit([first, *others])
    while llm.engine.has_work:
        llm.frontend.step()
    assert len({id(output.request.token_ids) for output in outputs}) == 4
    assert all(output.request.token_ids[:50].tolist() == prompt for output in outputs)


def test_scoring_a_cached_prompt_larger_than_half_the_pool_ends(folder: Path) -> None:
    with LLM(folder, device="cpu", dtype="float32", page_size=16, kv_cache_gib=8e-5) as llm:
        total = llm.engine.usage()[0].total
        prompt = tokens_of((total * 3 // 4) * 16)
        first = llm.logprobs(prompt)
        llm.generate(prompt, max_tokens=1, ignore_eos=True)  # now its pages are cached
        assert torch.equal(llm.logprobs(prompt), first)


def test_scores_of_a_retracted_prompt_are_not_counted_twice(folder: Path) -> None:
    options: dict[str, Any] = {"page_size": 16, "kv_cache_gib": 7e-5, "chunked_prefill_size": 16}
    with LLM(folder, device="cpu", dtype="float64", **options) as llm:
        prompts = [tokens_of(60, seed=i) for i in range(3)]
        params = SamplingParams(max_tokens=20, ignore_eos=True, prompt_logprobs=1)
        results = llm.generate(prompts, params)
        assert llm.engine.scheduler.stats.retractions > 0
        for prompt, result in zip(prompts, results, strict=True):
            assert result.prompt_logprobs is not None
            assert len(result.prompt_logprobs) == len(prompt)
            expected = llm.logprobs(prompt)
            for i, score in enumerate(result.prompt_logprobs[1:], start=1):
                assert score is not None and score.token_id == prompt[i]
                assert score.logprob == pytest.approx(expected[i - 1, prompt[i]].item(), abs=1e-5)
                assert score.top[0][1] == pytest.approx(expected[i - 1].max().item(), abs=1e-5)


def test_a_failing_step_loses_nothing(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    """The step breaks after the plan was made; cached prefixes must stay right."""
    prompts = ["a shared beginning, then one", "a shared beginning, then two"]
    expected = [r.token_ids for r in llm.generate(prompts, max_tokens=20, ignore_eos=True)]
    llm.engine.scheduler.cache.tree.clear()
    stream = llm.stream(prompts[0], max_tokens=20, ignore_eos=True)
    tokens = list(next(stream).token_ids)
    runner = llm.engine.runner
    whole = type(runner).launch
    calls = iter(range(100))

    def breaks_at_third(self: Any, plan: Any) -> Any:
        if next(calls) == 2:
            raise RuntimeError("out of luck")
        return whole(self, plan)

    with monkeypatch.context() as patch:
        patch.setattr(type(runner), "launch", breaks_at_third)
        with pytest.raises(RuntimeError, match="out of luck"):
            llm.generate(prompts[1], max_tokens=20, ignore_eos=True)
    llm.engine.scheduler.check()
    tokens += [t for chunk in stream for t in chunk.token_ids]
    assert tokens == expected[0]
    assert llm.generate(prompts[1], max_tokens=20, ignore_eos=True).token_ids == expected[1]


def test_text_that_fails_ends_its_own_request_only(
    llm: LLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also if another caller makes the step in which it fails."""
    expected = llm.generate("other", max_tokens=20, ignore_eos=True).token_ids
    take = Output.take

    def failing(output: Output, progress: Any) -> None:
        if output.request.prompt_len == 3 and output.request.num_output == 5:
            raise RuntimeError("no text")
        take(output, progress)

    monkeypatch.setattr(Output, "take", failing)
    other = llm.stream("other", max_tokens=20, ignore_eos=True)
    params = [SamplingParams(max_tokens=count, ignore_eos=True) for count in (1, 50)]
    each = llm.generate_each(["first", "bad"], params)
    bad = llm.stream("bad", max_tokens=50, ignore_eos=True)
    assert len(next(each).token_ids) == 1
    assert [token for chunk in other for token in chunk.token_ids] == expected
    assert not llm.engine.has_work
    for broken in (each, bad):
        with pytest.raises(RuntimeError, match="no text"):
            list(broken)
    with pytest.raises(RuntimeError, match="no text"):
        llm.generate("bad", max_tokens=50, ignore_eos=True)


def test_choices_share_the_prompt_and_differ(llm: LLM) -> None:
    result = llm.generate("x" * 40, n=4, temperature=1.0, seed=9, max_tokens=12, ignore_eos=True)
    answers = [result, *result.alternatives]
    assert len(answers) == 4
    assert len({tuple(answer.token_ids) for answer in answers}) == 4
    assert [answer.usage.cached_tokens for answer in answers[1:]] == [32, 32, 32]
    alone = llm.generate("x" * 40, temperature=1.0, seed=9, max_tokens=12, ignore_eos=True)
    assert alone.token_ids == result.token_ids
    chunks = list(llm.stream("x", n=2, temperature=1.0, seed=9, max_tokens=5, ignore_eos=True))
    assert {chunk.choice for chunk in chunks} == {0, 1}
    assert sum(chunk.finish_reason is not None for chunk in chunks) == 2


def test_logprobs_are_those_of_the_model_whatever_the_sampling(llm: LLM) -> None:
    options: dict[str, Any] = {"max_tokens": 6, "ignore_eos": True, "logprobs": 3}
    result = llm.generate("hello", temperature=1.5, seed=2, logit_bias={7: 5.0}, **options)
    assert result.logprobs is not None and len(result.logprobs) == 6
    ids = list(llm.tokenizer.encode("hello")) if llm.tokenizer else []
    whole = llm.logprobs([*ids, *result.token_ids])
    for i, score in enumerate(result.logprobs):
        row = whole[len(ids) - 1 + i]
        assert score.token_id == result.token_ids[i]
        assert score.logprob == pytest.approx(row[score.token_id].item(), abs=1e-5)
        assert [t for t, _ in score.top] == row.topk(3).indices.tolist()
    plain = llm.generate("hello", max_tokens=3)
    assert plain.logprobs is None and plain.prompt_logprobs is None
    streamed = list(llm.stream("hello", **options))
    assert all(len(chunk.logprobs) == 1 for chunk in streamed)


def test_penalties_bias_and_min_tokens_work_end_to_end(llm: LLM) -> None:
    free = llm.generate("hello", max_tokens=20, ignore_eos=True).token_ids
    never_again = llm.generate(
        "hello", max_tokens=20, ignore_eos=True, presence_penalty=2.0, repetition_penalty=50.0
    ).token_ids
    assert len(set(never_again)) > len(set(free))
    forced = llm.generate("hello", max_tokens=4, ignore_eos=True, logit_bias={65: 100.0})
    assert forced.token_ids == [65] * 4
    stop = free[0]
    early = llm.generate("hello", max_tokens=10, ignore_eos=True, stop_token_ids=[stop])
    late = llm.generate(
        "hello", max_tokens=10, ignore_eos=True, stop_token_ids=[stop], min_tokens=5
    )
    assert len(early.token_ids) == 1
    assert len(late.token_ids) >= 6 or late.finish_reason == "length"
    assert stop not in late.token_ids[:5]


def test_ids_may_come_as_tensors_and_arrays(llm: LLM) -> None:
    ids = [10, 20, 30]
    expected = llm.generate(ids, max_tokens=4).token_ids
    assert llm.generate(torch.tensor(ids), max_tokens=4).token_ids == expected  # type: ignore[call-overload]
    both = llm.generate(np.array([ids, ids]), max_tokens=4)  # type: ignore[call-overload]
    assert [result.token_ids for result in both] == [expected] * 2


def test_more_prompts_than_the_queue_holds_are_fed_in(folder: Path) -> None:
    with LLM(folder, device="cpu", max_queued_requests=3, max_running_requests=2) as llm:
        results = llm.generate([f"prompt {i}" for i in range(20)], max_tokens=3, ignore_eos=True)
        assert len(results) == 20
        assert len(llm.generate("x", n=9, max_tokens=3, temperature=1.0).alternatives) == 8
        with pytest.raises(QueueFullError, match="9 choices are asked for and the queue has 3"):
            llm.stream("x", n=9)
        assert not llm.engine.has_work


def test_retracted_requests_may_overfill_the_queue(folder: Path) -> None:
    options: dict[str, Any] = {"page_size": 16, "kv_cache_gib": 7e-5, "max_queued_requests": 1}
    with LLM(folder, device="cpu", dtype="float64", max_running_requests=4, **options) as llm:
        prompts = [tokens_of(60, seed=i) for i in range(5)]
        results = llm.generate(prompts, max_tokens=40, ignore_eos=True)
        assert [len(result.token_ids) for result in results] == [40] * 5
        assert llm.engine.scheduler.stats.retractions > 0


def test_output_stops_at_the_context_length(folder: Path) -> None:
    with LLM(folder, device="cpu", context_length=20, page_size=4) as llm:
        result = llm.generate(tokens_of(15), max_tokens=100, ignore_eos=True)
        assert (len(result.token_ids), result.finish_reason) == (5, "length")
        assert llm.logprobs(tokens_of(20)).shape == (20, 256)


@pytest.mark.parametrize(
    ("prompt", "named"),
    [
        ("", "prompt is empty"),
        ([], "prompt is empty"),
        ([[]], "prompt is empty"),
        ([1, 256], "token id 256.*0 to 255"),
        ([-1], "token id -1"),
        ([1.5], "whole numbers"),
        ([2**70], "token id 1180591620717411303424; ids"),
        (3, "prompts is a int"),
        (b"bytes", "prompts is a bytes"),
        (["fine", 5], "a prompt is a int"),
        ("\ud800", "not valid Unicode"),
        (list(range(10)) * 60, r"600 tokens, at most 511.*context length is 512.*KV cache holds"),
    ],
)
def test_bad_prompts_are_refused_by_name(llm: LLM, prompt: Any, named: str) -> None:
    with pytest.raises(RequestError, match=named):
        llm.generate(prompt, max_tokens=4)
    assert not llm.engine.has_work


def test_a_prompt_larger_than_the_pool_is_refused_with_both_numbers(folder: Path) -> None:
    with LLM(folder, device="cpu", dtype="float32", page_size=16, kv_cache_gib=4e-5) as llm:
        holds = llm.engine.scheduler.cache.max_tokens
        assert 0 < holds < 200
        with pytest.raises(RequestError, match=rf"210 tokens.*context length is 512.*{holds}"):
            llm.generate(tokens_of(210))
        assert len(llm.generate(tokens_of(holds - 2), ignore_eos=True).token_ids) == 2


def test_one_bad_prompt_is_named_and_nothing_else_is_disturbed(llm: LLM) -> None:
    running = llm.stream("hello", max_tokens=10, ignore_eos=True)
    first = next(running)
    with pytest.raises(RequestError, match=r"prompts\[1\]: the prompt is empty"):
        llm.generate(["fine", "", "fine too"])
    tokens = first.token_ids + [t for chunk in running for t in chunk.token_ids]
    assert tokens == llm.generate("hello", max_tokens=10, ignore_eos=True).token_ids


def test_bad_sampling_fields_are_refused(llm: LLM) -> None:
    with pytest.raises(RequestError, match="unknown sampling field tempreature"):
        llm.generate("x", tempreature=1.0)
    with pytest.raises(RequestError, match="stop_token_ids holds token id 900"):
        llm.generate("x", stop_token_ids=[900])
    with pytest.raises(RequestError, match="not both"):
        llm.generate("x", SamplingParams(), max_tokens=3)
    with pytest.raises(RequestError, match="2 entries for 1 prompts"):
        llm.generate(["x"], [SamplingParams()] * 2)
    with pytest.raises(RequestError, match=r"logit_bias is \[\(1, 2.0\), .*each id once"):
        llm.generate("x", logit_bias=[(1, 2.0), (1, 3.0)])
    with pytest.raises(RequestError, match="cache_salt"):
        llm.generate("x", cache_salt=3)  # type: ignore[call-overload]
    with pytest.raises(RequestError, match="min_tokens is 9223372036854775808; it must be"):
        llm.generate("x", max_tokens=2**63, min_tokens=2**63)


def test_a_folder_without_tokenizer_works_with_ids(tmp_path: Path) -> None:
    write_model(tmp_path, TINY_LLAMA)
    with LLM(tmp_path, device="cpu") as llm:
        result = llm.generate([5, 6, 7], max_tokens=3, ignore_eos=True)
        assert result.text is None
        assert len(result.token_ids) == 3
        with pytest.raises(RequestError, match=r"a text prompt needs.*no tokenizer\.json"):
            llm.generate("text")
        with pytest.raises(RequestError, match=r"stop needs.*no tokenizer\.json"):
            llm.generate([5], stop="x")
        with pytest.raises(RequestError, match=r"chat needs.*no tokenizer\.json"):
            llm.chat([{"role": "user", "content": "x"}])


@pytest.mark.parametrize(
    ("options", "named"),
    [
        ({"page_sise": 16}, "unknown option page_sise"),
        ({"page_size": 0}, "page_size is 0"),
        ({"device": "tpu"}, "device is 'tpu'"),
        ({"device": "cuda", "dtype": "int4"}, "dtype is 'int4'"),
        ({"eviction": "random"}, "eviction is 'random'"),
        ({"attention_backend": "magic"}, "attention_backend is 'magic'"),
        ({"kv_cache_gib": 0}, "kv_cache_gib is 0"),
        ({"kv_cache_gib": 1e-9}, "holds no page"),
        ({"mem_fraction_static": 0.5}, "mem_fraction_static is for CUDA"),
        ({"mem_fraction_static": 2.0}, "mem_fraction_static is 2.0"),
        ({"mem_fraction_static": 0.5, "kv_cache_gib": 1.0}, "give one"),
        ({"max_step_ms": -1}, "max_step_ms is -1"),
        ({"context_length": 0}, "context_length is 0"),
        ({"chunked_prefill_size": 1.5}, "chunked_prefill_size is 1.5"),
        ({"max_queued_requests": 0}, "max_queued_requests is 0"),
        ({"seed": -1}, "seed is -1"),
        ({"seed": 2**70}, "seed is"),
        ({"kv_cache_gib": "1"}, "kv_cache_gib is '1'"),
        ({"kv_cache_gib": float("inf")}, "kv_cache_gib is inf"),
        ({"max_step_ms": "5"}, "max_step_ms is '5'"),
        ({"ignore_config_fields": ["a"]}, "ignore_config_fields is"),
        ({"context_length": 9999}, "context_length is 9999, the model's own limit is 512"),
        ({"quantization": "int2"}, "quantization is 'int2'"),
        ({"quantization": "int8", "dtype": "float64"}, "quantization=int8 is not possible here"),
        ({"model_impl": "magic"}, "model_impl is 'magic'"),
        ({"max_running_requests": 10**6}, "max_running_requests is 1000000; it must .* to 65536"),
        ({"eviction": "lfu", "disable_radix_cache": True}, "eviction is 'lfu' and disable_radix"),
    ],
)
def test_bad_options_are_refused_by_name(folder: Path, options: dict[str, Any], named: str) -> None:
    with pytest.raises(ConfigError, match=named):
        LLM(folder, **{"device": "cpu", **options})


def test_a_closed_llm_says_so(folder: Path) -> None:
    llm = LLM(folder, device="cpu")
    stream = llm.stream("hello", max_tokens=50)
    llm.close()
    assert list(stream)[-1].finish_reason == "abort"
    with pytest.raises(CairnError, match="closed"):
        llm.generate("hello")


def test_a_step_time_limit_still_serves_everything(folder: Path) -> None:
    with LLM(folder, device="cpu", max_step_ms=0.01, page_size=16) as llm:
        results = llm.generate([tokens_of(100, seed=i) for i in range(3)], max_tokens=3)
        assert all(result.finish_reason for result in results)
