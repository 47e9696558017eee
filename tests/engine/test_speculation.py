"""Drafts change no token: whatever a drafter says, a request gets what it would get without one.

Models are tiny and in float64, and free memory is NaN. Drafters lie in every way, requests leave
and are retracted at any time, and all invariants are checked after every step.
"""

from __future__ import annotations

import random
from array import array
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cairn import LLM, SamplingParams
from cairn.engine.drafters.drafter import Drafter
from cairn.engine.drafters.ngram import NgramDrafter
from cairn.engine.drafting import Drafting, Selected
from cairn.engine.plan import Advance, StepPlan
from cairn.engine.request import Request, State
from cairn.engine.scheduler import Scheduler
from cairn.engine.speculation import Pace, Speculation
from cairn.errors import ConfigError
from tests.engine.test_equality import PAGE, SPARSE, kv_gib
from tests.helpers import (
    TINY_HILS,
    TINY_LATENT,
    TINY_LLAMA,
    TINY_OLMO3,
    byte_tokenizer,
    poison_free_memory,
    tokens_of,
    write_model,
)

INDEXED = {
    **TINY_LATENT,
    "architectures": ["DeepseekV32ForCausalLM"],
    "index_n_heads": 4,
    "index_head_dim": 32,
    "index_topk": 24,
}
"""An index selects the rows that each query reads."""
KINDS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "llama": (TINY_LLAMA, {}),
    "olmo3": (TINY_OLMO3, {}),
    "hils": (TINY_HILS, {}),
    "latents": (TINY_LATENT, {}),
    "indexed": (INDEXED, {}),
    "prompts": (TINY_LLAMA, SPARSE),
    "sparse": (
        TINY_LLAMA,
        {
            **{"speculative": "sparse", "hsa_topk": 2, "hsa_window": 20, "hsa_dense_below": 0},
            "hsa_unit_size": 4,
        },
    ),
}
PARAMS = [
    SamplingParams(max_tokens=40, ignore_eos=True),
    SamplingParams(max_tokens=25, temperature=0.9, seed=3),
    SamplingParams(max_tokens=30, ignore_eos=True, temperature=1.3, top_k=9, top_p=0.9, seed=1),
    SamplingParams(
        max_tokens=30,
        ignore_eos=True,
        repetition_penalty=1.3,
        presence_penalty=0.5,
        frequency_penalty=0.4,
    ),
    SamplingParams(
        max_tokens=20,
        temperature=0.7,
        seed=8,
        frequency_penalty=0.6,
        min_tokens=9,
        logit_bias={5: 2.0, 7: -3.0},
        stop_token_ids=(11, 12, 13, 14),
    ),
    SamplingParams(max_tokens=12, ignore_eos=True, logprobs=3),
]


class Always(Pace):
    """Does not mind how long steps take."""

    def drafts(self, requests: int) -> bool:
        return True


class Silent(Drafter):
    tokens = 0


class Liar(Drafter):
    """Knows the truth, and tells it for a while: then a wrong token, any tokens, or too many."""

    def __init__(self, truth: list[tuple[int, ...]], seed: int, *, honest: float) -> None:
        self.truth = truth
        self.random = random.Random(seed)
        self.honest = honest

    def draft(self, token_ids: array[int], most: int) -> list[int]:
        known = tuple(token_ids)
        right: list[int] = []
        for told in self.truth:
            if told[: len(known)] == known:
                right = list(told[len(known) :])
        drafts = []
        for i in range(self.random.randint(0, most + 2)):
            tell = i < len(right) and self.random.random() < self.honest
            drafts.append(right[i] if tell else self.random.randint(-2, 70))
        return drafts


def load(folder: Path, **options: Any) -> LLM:
    options = {"page_size": PAGE, "max_running_requests": 4, **options}
    llm = LLM(folder, dtype="float64", device="cpu", **options)
    poison_free_memory(llm.engine)
    return llm


@pytest.fixture(scope="module", params=KINDS)
def engine(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[tuple[LLM, dict[Any, Any]]]:
    """An engine with drafts, and what plain decoding gives, by prompt and parameters."""
    config, options = KINDS[request.param]
    name = "llama" if request.param == "sparse" else request.param
    folder = write_model(tmp_path_factory.mktemp(name), config)
    options = {"speculative": "ngram", "speculative_tokens": 5, **options}
    drafts = ("speculative", "hsa_") if request.param == "sparse" else ("speculative",)
    plain_options = {key: own for key, own in options.items() if not key.startswith(drafts)}
    plain: dict[Any, Any] = {}
    with load(folder, **plain_options) as llm:
        for length in (1, 47, 90):
            for params in PARAMS:
                prompt = tokens_of(length, seed=length % 3)
                plain[length, params] = prompt, llm.generate(prompt, params)
    # Fewer pages than four requests need; latents are not keys and values.
    budget = 1e-3 if name in ("latents", "indexed") else kv_gib(folder, 16)
    with load(folder, kv_cache_gib=budget, **options) as llm:
        yield llm, plain


def run(llm: LLM, jobs: list[Request], events: st.DataObject | None = None) -> None:
    """Step until all is done, with a check after every step, and events in between."""
    scheduler = llm.engine.scheduler
    outputs = llm.frontend.submit(jobs)
    try:
        while llm.engine.has_work:
            if events is not None:
                event = events.draw(st.sampled_from(["", "", "", "", "retract", "abort"]))
                running = [own for own in jobs if own.state is State.RUNNING]
                if event and running:
                    chosen = events.draw(st.sampled_from(running))
                    if event == "abort":
                        llm.abort(chosen.id)
                    else:
                        scheduler._retract(chosen)
            llm.frontend.step()
            scheduler.check()
    finally:  # an example that has drawn too much ends in the middle
        llm.frontend.abort_all()
        llm.frontend.step()
    scheduler.check()
    assert all(output.result is not None for output in outputs)


@settings(max_examples=settings().max_examples // 25)  # 4, and 200 where tests are thorough
@given(data=st.data())
def test_liars_change_no_token(engine: tuple[LLM, dict[Any, Any]], data: st.DataObject) -> None:
    llm, plain = engine
    speculation = llm.engine.scheduler.speculation
    assert speculation is not None
    speculation.pace = Always()
    chosen = data.draw(st.lists(st.sampled_from(sorted(plain, key=str)), min_size=1, max_size=5))
    if not speculation.drafter.by_model:
        truth = [(*prompt, *result.token_ids) for prompt, result in plain.values()]
        honest = data.draw(st.sampled_from([0.0, 0.8, 1.0]))
        speculation.drafter = Liar(truth, data.draw(st.integers(0, 99)), honest=honest)
    else:
        speculation.drafts_ahead = data.draw(st.booleans())
    llm.engine.overlap = data.draw(st.booleans())
    llm.engine.scheduler.cache.clear()  # examples do not depend on each other
    events = data if data.draw(st.booleans()) else None
    jobs = [llm.frontend.prepare(plain[own][0], own[1])[0] for own in chosen]
    run(llm, jobs, events)
    for own, job in zip(chosen, jobs, strict=True):
        expected = plain[own][1]
        if job.finish_reason == "abort":
            assert job.output_ids == expected.token_ids[: job.num_output]
        else:
            assert job.output_ids == expected.token_ids
            assert job.finish_reason == expected.finish_reason
        if expected.logprobs is not None:
            scores = [score.logprob for score in expected.logprobs][: job.num_output]
            np.testing.assert_allclose([own.logprob for own in job.logprobs], scores, atol=1e-9)
        assert job.accepted_tokens <= job.drafted_tokens


def test_right_drafts_save_steps(engine: tuple[LLM, dict[Any, Any]]) -> None:
    llm, plain = engine
    speculation = llm.engine.scheduler.speculation
    assert speculation is not None
    speculation.pace = Always()
    if speculation.drafter.by_model:
        pytest.skip("the model drafts as well as it can")
    prompt, expected = plain[47, PARAMS[0]]
    speculation.drafter = Liar([(*prompt, *expected.token_ids)], 0, honest=1.0)
    llm.engine.overlap = False
    before = llm.engine.stats.steps
    result = llm.generate(prompt, PARAMS[0], cache_salt="anew")
    assert result.token_ids == expected.token_ids
    assert llm.engine.stats.steps - before < 25  # for 40 tokens
    usage = result.usage
    assert 15 < usage.accepted_tokens <= usage.drafted_tokens
    off = llm.generate(prompt, max_tokens=40, ignore_eos=True, speculation=False)
    assert off.token_ids == expected.token_ids and off.usage.drafted_tokens == 0


def test_the_model_drafts_on_before_the_next_step_is_planned(
    engine: tuple[LLM, dict[Any, Any]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also if requests come at different times."""
    llm, plain = engine
    speculation, runner = llm.engine.scheduler.speculation, llm.engine.runner
    assert speculation is not None
    if not speculation.drafter.by_model:
        pytest.skip("another drafts")
    speculation.pace = Always()
    speculation.drafts_ahead = True  # as on a GPU
    within: list[int] = []
    draft = Drafting.within

    def watched(advances: list[Advance]) -> Drafting:
        within.append(len(advances))
        return draft(advances)

    monkeypatch.setattr(Drafting, "within", watched)
    llm.engine.overlap = True
    llm.engine.scheduler.cache.clear()
    before = llm.engine.stats.steps
    keys = [(90, PARAMS[0]), (90, PARAMS[1]), (47, PARAMS[0])]
    jobs = [llm.frontend.prepare(plain[key][0], key[1])[0] for key in keys]
    llm.frontend.submit(jobs[:2])
    while jobs[0].num_output < 8:
        llm.frontend.step()
    run(llm, jobs[2:])
    for key, job in zip(keys, jobs, strict=True):
        assert job.output_ids == plain[key][1].token_ids and job.drafted_tokens > 10
    # All else was drafted ahead, except after pauses.
    assert runner.drafts._ahead == {} and 1 <= len(within) < (llm.engine.stats.steps - before) / 3


def test_drafts_after_a_pause_do_not_hold_up_other_requests(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They are made ahead, with those of the others, when the request has got one more token."""
    config, options = KINDS["sparse"]
    monkeypatch.setattr(Speculation, "expects", lambda *_: True)
    monkeypatch.setattr("cairn.engine.speculation._MISSES", 1000)
    with load(write_model(tmp_path, config), **options) as llm:
        speculation = llm.engine.scheduler.speculation
        assert speculation is not None
        prompts = [tokens_of(90), tokens_of(47)]
        expected = llm.generate(prompts, replace(PARAMS[0], speculation=False))
        speculation.pace, speculation.drafts_ahead, llm.engine.overlap = Always(), True, True
        jobs = [llm.frontend.prepare(prompt, PARAMS[0])[0] for prompt in prompts]
        llm.frontend.submit(jobs)
        while min(own.num_output for own in jobs) < 4:
            llm.frontend.step()
        resting = jobs[1]
        resting.rests_until, drafted = len(resting.token_ids) + 5, resting.drafted_tokens
        within: list[Any] = []
        monkeypatch.setattr(Drafting, "within", within.append)
        run(llm, [])
        assert [own.output_ids for own in jobs] == [list(own.token_ids) for own in expected]
        assert not within and resting.drafted_tokens > drafted + 10


def test_a_cpu_drafts_within_steps_only(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """And holds no pages for more."""
    plans: list[StepPlan] = []
    plan = Scheduler.plan

    def watched(scheduler: Scheduler) -> StepPlan:
        plans.append(plan(scheduler))
        return plans[-1]

    monkeypatch.setattr(Scheduler, "plan", watched)
    config, options = KINDS["sparse"]
    with load(write_model(tmp_path, config), **options) as llm:
        llm.generate(tokens_of(47), PARAMS[0])
    assert any(own.awaited and own.drafted for own in plans)
    assert not any(own.ahead or any(each.room for each in own.advances) for own in plans)


def test_drafts_after_a_step_follow_what_it_kept() -> None:
    drafted = [
        Advance(str(i), 2 + i, 10, 14, array("q", [1, -1, -1, -1]), 9, 4, guesses=3, room=room)
        for i, room in enumerate((40, 40, 13, 12, 40))
    ]
    plain = Advance("plain", 9, 5, 6, array("q", [1]), 5, 1)
    prompt = Advance("prompt", 8, 5, 20, array("q", [1] * 15), 20, 1, room=40)
    plan = StepPlan((*drafted, plain, prompt), drafted=15, awaited=True, ahead=2)
    sampled = {"0": [7, 8, 9, 6], "1": [7, 8, 9, 6], "2": [7, 8, 9, 6], "3": [7, 8, 9, 6]}
    sampled |= {"4": [7, 8, 9, 6], "plain": [3], "prompt": [4]}
    guesses = {"0": [7, 8, 9], "1": [7, 5, 9], "2": [5, 8, 9], "3": [7, 5, 9], "4": [5, 5, 5]}
    drafting = Drafting.after(plan, sampled, guesses)
    # "2" has room for one draft, "3" for none.
    assert [own.request_id for own in drafting.advances] == ["0", "1", "4", "prompt", "2"]
    assert drafting.starts.tolist() == [14, 12, 11, 20, 11]
    assert drafting.newest.tolist() == [6, 8, 7, 4, 7]
    assert drafting.counts.tolist() == [2, 2, 2, 2, 1]
    assert drafting.slots.tolist() == [2, 3, 6, 8, 4]
    made = drafting.made()
    asked = plan.advances[0]._replace(start=14, stop=17, guesses=2)
    assert made[2].serves(asked)
    for other in ({"start": 13}, {"guesses": 3}, {"attempt": 1}, {"request_id": "x"}):
        assert not made[2].serves(asked._replace(**other))
    selected = Selected.by(drafting, 4)
    assert selected.serves(drafting)
    assert selected.serves(replace(drafting, starts=drafting.starts + 2))
    assert not selected.serves(replace(drafting, starts=drafting.starts + 3))
    assert not selected.serves(replace(drafting, starts=drafting.starts - 1))
    assert not selected.serves(replace(drafting, advances=drafting.advances[::-1]))
    again = [own._replace(attempt=1) for own in drafting.advances]
    assert not selected.serves(replace(drafting, advances=again))


def test_the_prefix_cache_holds_what_came_true(engine: tuple[LLM, dict[Any, Any]]) -> None:
    """The next turn finds the answer in the cache, and pages of wrong drafts nowhere."""
    llm, plain = engine
    speculation = llm.engine.scheduler.speculation
    assert speculation is not None
    if not speculation.drafter.by_model:
        speculation.drafter = Liar([], 1, honest=0.0)
    prompt, expected = plain[47, PARAMS[0]]
    following = [*prompt, *expected.token_ids, 4]
    turns = [
        llm.generate(ids, replace(PARAMS[0], speculation=drafts), cache_salt=f"turns, {drafts}")
        for drafts in (True, False)
        for ids in (prompt, following)
    ]
    assert turns[1].usage.cached_tokens >= 75
    assert [own.token_ids for own in turns[:2]] == [own.token_ids for own in turns[2:]]


def test_a_stop_string_ends_the_text_at_its_token(tmp_path: Path) -> None:
    folder = write_model(tmp_path / "llama", {**TINY_LLAMA, "vocab_size": 256})
    byte_tokenizer().save(str(folder / "tokenizer.json"))
    params = SamplingParams(max_tokens=40, ignore_eos=True)
    with load(folder) as llm:
        whole = llm.generate(tokens_of(20), params)
        assert whole.text is not None
        stop = SamplingParams(max_tokens=40, ignore_eos=True, stop=whole.text[9:11], logprobs=0)
        expected = llm.generate(tokens_of(20), stop)
        assert len(expected.token_ids) < 30
    with load(folder, speculative="ngram", speculative_tokens=7) as llm:
        assert llm.engine.scheduler.speculation is not None
        truth = [(*tokens_of(20), *whole.token_ids)]
        llm.engine.scheduler.speculation.drafter = Liar(truth, 5, honest=1.0)
        for llm.engine.overlap in (False, True):
            result = llm.generate(tokens_of(20), stop)
            assert (result.text, result.token_ids) == (expected.text, expected.token_ids)
            assert result.finish_reason == "stop" and result.usage.accepted_tokens
            assert result.logprobs is not None
            assert len(result.logprobs) == len(result.token_ids)


@pytest.mark.parametrize(
    ("tokens", "most", "drafts"),
    [
        ([1, 2, 3, 4, 5, 6, 1, 2, 3], 4, [4, 5, 6, 1]),
        ([1, 2, 3, 4, 1, 2, 3, 5, 1, 2, 3], 2, [5, 1]),  # the latest
        ([9, 1, 2, 3, 4, 7, 1, 2, 3, 5, 9, 1, 2, 3], 1, [4]),  # the longest run
        ([1, 2, 1, 2, 1, 2], 5, [1, 2, 1, 2, 1]),  # a loop goes on
        ([7, 7, 7, 7], 3, [7, 7, 7]),
        ([2, 3, 4, 9, 3, 4], 3, []),  # two tokens are too few
        ([5], 3, []),
        ([], 3, []),
    ],
)
def test_ngram_copies_what_followed(tokens: list[int], most: int, drafts: list[int]) -> None:
    assert list(NgramDrafter().draft(array("q", tokens), most)) == drafts


def test_what_cannot_go_together_is_refused(tmp_path: Path) -> None:
    llama, hils = (
        write_model(tmp_path / name, own)
        for name, own in (("llama", TINY_LLAMA), ("hils", TINY_HILS))
    )
    for folder, options, message in (
        (llama, {"speculative_tokens": 3}, "speculative is not"),
        (llama, {"speculative": "magic"}, "ngram"),
        (llama, {"speculative": f"{__name__}:Silent"}, r"drafts 0 tokens at most, .* from 1 to 64"),
        (llama, {"speculative": "ngram", "enable_hisparse": True}, "host tier"),
        (llama, {"speculative": "sparse", "attention_backend": "hsa"}, "sparse already"),
        (llama, {"speculative": "sparse", "hsa_prefill": "sparse"}, "read densely"),
        (hils, {"speculative": "sparse"}, "sparse already"),
    ):
        with pytest.raises(ConfigError, match=message):
            LLM(folder, device="cpu", **options)


def test_drafts_can_read_the_sinks_and_the_window_only(tmp_path: Path) -> None:
    folder = write_model(tmp_path, TINY_LLAMA)
    drafts: dict[str, Any] = {"speculative": "sparse", "hsa_policy": "streaming", "hsa_window": 20}
    texts = []
    for options in ({}, drafts):
        with load(folder, **options) as llm:
            made = llm.generate(tokens_of(90), max_tokens=20, ignore_eos=True)
            texts.append(made.token_ids)
    assert made.usage.drafted_tokens > 0
    assert texts[0] == texts[1]


def step(count: int, *, drafted: int = 0) -> StepPlan:
    """A step of so many requests, one of which has drafts."""
    advances = [Advance(str(i), i, 5, 6, array("q", [1]), 5, 1) for i in range(count)]
    first = advances[0]._replace(stop=6 + drafted, samples=1 + drafted)
    return StepPlan((first, *advances[1:]), drafted=drafted)


def drive(pace: Pace, steps: int, kept: int, slower: float, count: int = 4) -> int:
    """Make steps whose drafts bring `kept` more tokens and take `slower` times as long. Returns the
    number of steps with drafts."""
    drafting = 0
    for _ in range(steps):
        drafts = pace.drafts(count)
        drafting += drafts
        plan = step(count, drafted=3 if drafts else 0)
        pace.observe(plan, count + kept * drafts, 0.01 * (slower if drafts else 1))
    return drafting


def test_drafts_stop_where_they_make_the_engine_slower() -> None:
    assert drive(Pace(), 5000, kept=1, slower=1.5) < 300
    assert drive(Pace(), 5000, kept=1, slower=1.1) > 4900
    pace = Pace()
    drive(pace, 500, kept=0, slower=1.2)
    assert not pace.drafts(4) and pace.drafts(1)  # other batches are other trials
    assert drive(pace, 20_000, kept=4, slower=1.2) > 18_000  # times change


def test_drafts_of_the_model_stop_early_where_they_are_far_too_slow() -> None:
    assert drive(Pace(hasty=True), 250, kept=11, slower=6.3) == 4  # 0.59 of the speed without
    pace = Pace(hasty=True)
    assert 30 < drive(pace, 250, kept=1, slower=1.3) < 40  # 0.94: many steps must show it
    tried = drive(pace, 20_000, kept=1, slower=1.3)
    assert tried < 300  # pauses get longer
    assert drive(Pace(hasty=True), 1000, kept=3, slower=1.3) > 980


def test_drafts_that_are_never_right_stop_whatever_the_clock_says() -> None:
    pace = Pace()
    for _ in range(200):  # steps without drafts were slow, by chance
        pace.observe(step(64), 64, 0.02)
    assert 30 < drive(pace, 250, kept=1, slower=1.0, count=64) < 40  # 1 of 64 is as good as none
    assert drive(Pace(), 250, kept=3, slower=1.0, count=64) > 240


def test_a_hiccup_does_not_decide() -> None:
    """One of the six steps without drafts takes twenty times as long as the others."""
    pace = Pace()
    for i in range(600):
        drafts = pace.drafts(4)
        hiccup = 20 if i % 6 == 3 and not drafts else 1
        tokens, slower = (5, 1.6) if drafts else (4, 1)
        pace.observe(step(4, drafted=3 * drafts), tokens, 0.01 * slower * hiccup)
    assert not pace.drafts(4)


@pytest.mark.parametrize(("first", "then", "pauses"), [(0.86, 1.1, False), (1.3, 0.95, True)])
def test_the_first_steps_with_drafts_do_not_outweigh_the_rest(
    first: float, then: float, pauses: bool
) -> None:
    """Speeds with drafts, relative to those without."""
    pace, drafting = Pace(hasty=True), 0
    for _ in range(120):
        drafts = pace.drafts(4)
        drafting += drafts
        speed = (first if drafting <= 4 else then) if drafts else 1
        tokens = 8 if drafts else 4
        pace.observe(step(4, drafted=3 if drafts else 0), tokens, 0.0025 * tokens / speed)
    assert (drafting < 60) == pauses


def test_more_is_drafted_while_all_drafts_come_true() -> None:
    speculation = Speculation(NgramDrafter(), 15, 61)
    own = Request("a", array("q", [1, 2, 3, 4] * 4), SamplingParams(max_tokens=99), 0, 999)
    counts = []
    for right in (7, 15, 14, 0, 3, 7):
        counts.append(speculation.count(own, 20))
        speculation.checked(own, counts[-1], right)
    assert counts == [7, 15, 15, 7, 3, 15] and speculation.ready(own)
    assert speculation.count(own, 20) == 7 and speculation.count(own, 5) == 5


def test_a_request_whose_drafts_fail_pauses() -> None:
    speculation = Speculation(NgramDrafter(), 3, 61)
    prompt = [1, 2, 3, 4] * 4
    own = Request("a", array("q", prompt), SamplingParams(), 0, 999)
    pauses = []
    for _ in range(3):
        while speculation.ready(own):
            count = speculation.count(own, 3)
            speculation.checked(own, len(speculation.propose(own, count)), 0)
        pauses.append(own.rests_until - len(own.token_ids))
        own.token_ids.extend(prompt * 20)
    assert pauses == [32, 64, 128]
    speculation.checked(own, 3, 1)
    assert own.rest == 0 and speculation.propose(own, speculation.count(own, 2)) == [1, 2]
    assert speculation.ready(own) and speculation.count(own, 0) == 0
    own.checking = True
    assert not speculation.ready(own)
