from __future__ import annotations

from array import array
from collections.abc import Hashable
from dataclasses import replace
from functools import partial
from random import Random
from zlib import crc32

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from cairn.engine.drafters.drafter import Drafter
from cairn.engine.limits import Limits
from cairn.engine.plan import ONLY_PROMPT, UNKNOWN, Advance, Allowed, PromptScores, StepPlan
from cairn.engine.request import Request, State
from cairn.engine.sampling_params import SamplingParams
from cairn.engine.scheduler import Scheduler
from cairn.engine.speculation import Speculation
from cairn.engine.step import attention_pairs
from cairn.engine.step_time import StepTimeModel, round_rows, step_sizes
from cairn.errors import QueueFullError
from cairn.memory.cache import PagedCache
from cairn.memory.geometry import PageGeometry
from cairn.memory.groups import group_layers
from cairn.memory.pages import NULL_PAGE
from tests.helpers import watch_frees

Row = tuple[tuple[Hashable, bool], tuple[int, ...]]
"""Namespace, whether a guess wrote it, and the tokens up to the row's own."""


def next_token(namespace: Hashable, tokens: tuple[int, ...]) -> int:
    """A model whose next token depends on the whole past, in the same way in every process."""
    return crc32(repr((namespace, tokens)).encode()) % 3


def reference(request: Request, prompt: list[int], most: int) -> list[int]:
    """What a request must generate, whatever the scheduler does."""
    tokens = list(prompt)
    while True:
        token = next_token(request.namespace, tuple(tokens))
        tokens.append(token)
        generated = len(tokens) - len(prompt)
        if (
            token in request.stop_token_ids
            or generated == request.params.max_tokens
            or len(tokens) == most
        ):
            return tokens[len(prompt) :]


class Liar(Drafter):
    """Drafts that begin with the truth and go on with anything, and sometimes are too many."""

    def __init__(self, seed: int, *, by_model: bool = False) -> None:
        self.random = Random(seed)
        self.by_model = by_model  # type: ignore[misc]

    def draft(self, token_ids: array[int], most: int) -> list[int]:
        tokens, count = list(token_ids), len(token_ids)
        for _ in range(self.random.randint(0, most)):
            tokens.append(next_token(self.random.randint(0, 1), tuple(tokens)))
        return tokens[count:] + [self.random.randint(0, 2)] * self.random.randint(0, 3)


class Masks:
    """Tells which tokens a request may sample, once the test says so. The mask of each token is its
    position."""

    def __init__(self) -> None:
        self.count = -1  # output tokens that the masks follow
        self.allowed: Allowed | None = None

    def __call__(self, count: int) -> Allowed | None:
        return self.allowed if count == self.count else None


class PagedMemory:
    """Stands in for the runner: follows table edits alone and stores what every slot holds."""

    def __init__(self, cache: PagedCache, slots: int) -> None:
        self.cache = cache
        self.tables = [[[NULL_PAGE] * 64 for _ in range(slots)] for _ in cache.groups]
        self.rows: list[dict[tuple[int, int], Row]] = [{} for _ in cache.groups]
        self.newest = [-1] * slots  # token last sampled, which the host may not know yet
        self.random = Random(0)  # for the model's guesses
        self.guesses: dict[str, list[int]] = {}  # of the step that ran last

    def freed(self, group: int, page: int) -> None:
        for offset in range(self.cache.geometry.page_size):
            self.rows[group].pop((page, offset), None)

    def run(self, plan: StepPlan, scheduler: Scheduler) -> dict[str, list[int]]:
        for edit in plan.edits:
            end = edit.first + len(edit.page_ids)
            self.tables[edit.group][edit.slot][edit.first : end] = edit.page_ids
        for advance in plan.advances:
            pages = scheduler._requests[advance.request_id].pages
            assert pages is not None
            for g, table in enumerate(pages.tables):
                assert self.tables[g][advance.slot][: len(table)] == table
        written: set[tuple[int, int, int]] = set()
        sampled: dict[str, list[int]] = {}
        self.guesses = {}
        for advance in plan.advances:
            owner = scheduler._requests[advance.request_id]
            known = (*owner.token_ids, *([self.newest[advance.slot]] * owner.pending))
            assert advance.stop - advance.drafted <= len(known)
            assert not (owner.pending and owner.host_tokens)
            # What is drafted after this step fits into pages that it has already.
            assert owner.pages is not None
            held = self.cache.geometry.tokens(owner.pages.num_pages)
            assert advance.room <= min(held, owner.end_len - 1)
            given = advance.token_ids[: len(advance.token_ids) - advance.drafted]
            assert all(t in (UNKNOWN, known[advance.start + i]) for i, t in enumerate(given))
            assert list(given).count(UNKNOWN) <= owner.pending
            drafts = list(advance.token_ids[len(given) :])
            if advance.guesses:
                assert drafts == [UNKNOWN] * advance.guesses
                assert scheduler.speculation is not None
                least = advance.stop - 1 if scheduler.speculation.ahead else 0
                assert least <= advance.room and (least or not advance.room)
                drafts = self.guesses[owner.id] = []
            tokens = known[: advance.stop - advance.drafted]
            for guess in range(1, 1 + advance.guesses):
                part = advance.guessing(guess, advance.start, given[-1])
                assert (part.start, part.stop) == (len(tokens) + guess - 2, len(tokens) + guess - 1)
                self.compute(part, (*tokens, *drafts), owner.namespace)
                lies = self.random.random() < 0.3
                salt = (owner.namespace, lies) if lies else owner.namespace
                drafts.append(next_token(salt, (*tokens, *drafts)))
            tokens += tuple(drafts)
            written_now = self.compute(advance, tokens, owner.namespace)
            assert written.isdisjoint(written_now)
            written |= written_now
            if owner.allowed_tokens is not None and advance.samples:
                places = range(advance.stop - advance.drafted, advance.stop + 1)
                assert advance.allowed == tuple(str(place).encode() for place in places)
            assert not (advance.samples and owner.prompt_scores in ONLY_PROMPT)
            if advance.samples:
                own = [
                    next_token(owner.namespace, tokens[:count])
                    for count in range(advance.stop - advance.drafted, advance.stop + 1)
                ]
                self.newest[advance.slot] = own[0]
                sampled[advance.request_id] = own
        scheduler.launched(plan)
        return sampled

    def compute(
        self, advance: Advance, tokens: tuple[int, ...], namespace: Hashable
    ) -> set[tuple[int, int, int]]:
        """Write the rows of an advance, whose `tokens` go up to its end, and check what they read.
        Returns where the rows are."""
        geometry = self.cache.geometry
        assert len(tokens) == advance.stop
        written = set()
        for g, group in enumerate(self.cache.groups):
            table = self.tables[g][advance.slot]

            def slot(token: int, table: list[int] = table) -> tuple[int, int]:
                page, offset = divmod(geometry.rows(token), geometry.page_size)
                return table[page], offset

            for token in range(advance.start, advance.stop):
                assert slot(token)[0] != NULL_PAGE
                written.add((g, *slot(token)))
                self.rows[g][slot(token)] = ((namespace, advance.guess > 0), tokens[: token + 1])
            for query in range(advance.start, advance.stop):
                row = geometry.rows(query)
                for key in range(query + 1):
                    if group.window is None or geometry.rows(key) > row - group.window:
                        (salt, guessed), known = self.rows[g][slot(key)]
                        assert (salt, known) == (namespace, tokens[: key + 1])
                        assert not guessed or advance.guess
        return written


def make(
    pages: list[int],
    windows: list[int | None],
    *,
    page_size: int = 4,
    landmark: bool = False,
    chunk: int = 8,
    running: int = 3,
    queued: int = 50,
    max_step_seconds: float | None = None,
    caching: bool = True,
) -> tuple[Scheduler, PagedMemory]:
    memory: PagedMemory
    cache = PagedCache(
        PageGeometry(page_size, page_size - landmark),
        group_layers(windows),
        pages,
        prefix_caching=caching,
    )
    memory = PagedMemory(cache, running)
    for g, allocator in enumerate(cache.allocators):
        watch_frees(allocator, partial(memory.freed, g))
    ticks = iter(range(1, 10**9))
    limits = Limits(chunk, running, queued, max_step_seconds)
    return Scheduler(cache, limits, lambda: float(next(ticks))), memory


def request(
    name: str, prompt: list[int], max_tokens: int = 4, most: int = 40, salt: Hashable = None
) -> Request:
    return Request(
        id=name,
        token_ids=array("q", prompt),
        params=SamplingParams(max_tokens=max_tokens),
        seed=0,
        max_total_tokens=most,
        namespace=salt,
    )


def drain(scheduler: Scheduler, memory: PagedMemory, most_steps: int = 1000) -> list[Request]:
    finished: list[Request] = []
    for _ in range(most_steps):
        if not scheduler.has_work:
            return finished
        plan = scheduler.plan()
        progressed = scheduler.commit(plan, memory.run(plan, scheduler))
        scheduler.check()
        finished += [r for r in progressed if r.finish_reason]
    raise AssertionError("work was left undone")


def test_decode_and_prefill_ride_in_one_step() -> None:
    scheduler, memory = make([40], [None], chunk=8)
    scheduler.add(request("a", [1, 2, 3]))
    plan = scheduler.plan()
    scheduler.commit(plan, memory.run(plan, scheduler))
    scheduler.add(request("b", list(range(20))))
    plan = scheduler.plan()
    # One row decodes, seven of the budget of eight prefill.
    assert [(a.request_id, a.start, a.stop, a.samples) for a in plan.advances] == [
        ("a", 3, 4, True),
        ("b", 0, 7, False),
    ]


def test_a_plan_is_a_value() -> None:
    plans = []
    for _ in range(2):
        scheduler, _memory = make([40], [None, 6][:1])
        scheduler.add(request("a", list(range(11))))
        scheduler.add(request("b", list(range(5))))
        plans.append(scheduler.plan())
    assert plans[0] == plans[1]


def test_prefill_is_not_starved_by_more_decodes_than_budget() -> None:
    scheduler, memory = make([60], [None], chunk=2, running=4, page_size=4)
    for name in "abc":
        scheduler.add(request(name, [1, 2], max_tokens=30))
    for _ in range(6):
        plan = scheduler.plan()
        scheduler.commit(plan, memory.run(plan, scheduler))
    scheduler.add(request("late", [1] * 7))
    plan = scheduler.plan()
    assert {a.request_id for a in plan.advances} == {"a", "b", "c", "late"}


def test_the_youngest_is_retracted_and_resumes_from_its_prefix() -> None:
    scheduler, memory = make([6], [None], chunk=16, running=2)
    prompts = {"old": [0, 1, 2, 0, 1, 2, 0], "young": [2, 2, 2, 2, 1, 1, 1]}
    for name, prompt in prompts.items():
        scheduler.add(request(name, prompt, max_tokens=12, most=24))
    finished = {r.id: r for r in drain(scheduler, memory)}
    assert finished["old"].retractions == 0
    assert finished["young"].retractions > 0
    for name, done in finished.items():
        assert done.output_ids == reference(done, prompts[name], 24)


def test_a_shared_prefix_is_waited_for_instead_of_computed_twice() -> None:
    scheduler, memory = make([40], [None], chunk=12, running=4)
    shared = [1, 2, 0, 1, 2, 0, 1, 2]
    scheduler.add(request("a", [*shared, 0]))
    scheduler.add(request("b", [*shared, 1]))
    scheduler.add(request("c", [2, 2, 2]))
    plan = scheduler.plan()
    # "b" would repeat pages that "a" is computing; "c" has nothing to wait for.
    assert [a.request_id for a in plan.advances] == ["a", "c"]
    scheduler.commit(plan, memory.run(plan, scheduler))
    starts = {a.request_id: a.start for a in scheduler.plan().advances}
    assert starts["b"] == 8


def test_whoever_is_retracted_for_an_older_prefill_has_not_been_planned() -> None:
    """A long prefill runs out of pages beside young decoding requests."""
    for pages in range(16, 26):
        scheduler, memory = make([pages], [None], chunk=4, running=6)
        scheduler.add(request("long", [1] * 40, max_tokens=4, most=60))
        for i in range(5):
            scheduler.add(request(f"short{i}", [2, i % 3], max_tokens=20, most=60))
        for _ in range(400):
            if not scheduler.has_work:
                break
            plan = scheduler.plan()
            assert set(plan.retracted).isdisjoint(a.request_id for a in plan.advances)
            scheduler.commit(plan, memory.run(plan, scheduler))
            scheduler.check()
        assert not scheduler.has_work


def test_a_plan_that_was_not_carried_out_leaves_nothing_half_done() -> None:
    scheduler, memory = make([40, 40], [None, 6], chunk=8)
    prompts = {"a": [1, 2, 3, 1, 2], "b": [2] * 12}
    for name, prompt in prompts.items():
        scheduler.add(request(name, prompt))
    for failing in range(12):
        plan = scheduler.plan()
        if failing % 3 == 1:
            scheduler.undo(plan)  # the runner never saw its edits
        else:
            scheduler.commit(plan, memory.run(plan, scheduler))
        scheduler.check()
    finished = {r.id: r for r in drain(scheduler, memory)}
    for name, done in finished.items():
        assert done.output_ids == reference(done, prompts[name], 40)


@pytest.mark.parametrize("failing", [1, 3, 6])
def test_a_plan_that_a_drafter_breaks_off_leaves_nothing_half_done(failing: int) -> None:
    """Others had been planned before: their new pages would be in no table."""

    class Failing(Drafter):
        fails = False

        def draft(self, token_ids: array[int], most: int) -> list[int]:
            if self.fails and token_ids[0] == 2:
                raise ZeroDivisionError
            return []

    scheduler, memory = make([40, 40], [None, 6])
    drafter = Failing()
    scheduler.speculation = Speculation(drafter, 3, 3)
    prompts = {"a": [1, 2, 3], "b": [2] * 4}
    for name, prompt in prompts.items():
        scheduler.add(request(name, prompt, 12))
    for _ in range(failing):
        plan = scheduler.plan()
        scheduler.commit(plan, memory.run(plan, scheduler))
    drafter.fails = True
    with pytest.raises(ZeroDivisionError):
        scheduler.plan()
    scheduler.check()
    assert scheduler.num_running == 0
    drafter.fails = False
    finished = drain(scheduler, memory)
    assert len(finished) == 2
    for done in finished:
        assert done.output_ids == reference(done, prompts[done.id], 40)


def test_the_queue_has_a_limit() -> None:
    scheduler, _ = make([8], [None], queued=2)
    scheduler.add(request("a", [1]))
    scheduler.add(request("b", [1]))
    with pytest.raises(QueueFullError, match="max_queued_requests is 2"):
        scheduler.add(request("c", [1]))
    assert scheduler.num_waiting == 2


def test_results_of_an_ended_request_are_dropped() -> None:
    scheduler, memory = make([8], [None])
    scheduler.add(request("a", [1, 2]))
    scheduler.add(request("b", [1, 1]))
    plan = scheduler.plan()
    sampled = memory.run(plan, scheduler)
    aborted = scheduler.finish("a", "abort")
    assert aborted is not None and aborted.output_ids == []
    assert [r.id for r in scheduler.commit(plan, sampled)] == ["b"]
    scheduler.check()
    assert scheduler.finish("a", "abort") is None


def test_a_step_time_limit_shrinks_prefill_but_never_to_nothing() -> None:
    model = StepTimeModel()
    for rows in (1, 64, 128, 512):
        model.observe(rows, attention_pairs(rows, 0), 0.001 + rows * 1e-4)
    scheduler, _ = make([400], [None], chunk=1000, page_size=4, max_step_seconds=0.02)
    scheduler.step_time = model
    scheduler.add(request("a", [1] * 900, most=1000))
    (advance,) = scheduler.plan().advances
    # 0.75 * 20 ms - 1 ms leaves 14 ms: 140 rows at 0.1 ms each, rounded down
    assert advance.stop == 128
    scheduler, _ = make([400], [None], chunk=1000, page_size=4, max_step_seconds=1e-6)
    scheduler.step_time = model
    scheduler.add(request("a", [1] * 900, most=1000))
    (advance,) = scheduler.plan().advances
    assert advance.stop == 4


def test_step_time_model_recovers_a_machine_with_costly_context() -> None:
    model = StepTimeModel()
    for rows, context in [(1, 100), (64, 0), (64, 4096), (512, 0), (512, 8192), (32, 16384)]:
        pairs = attention_pairs(rows, context)
        model.observe(rows, pairs, 2e-3 + 1e-5 * rows + 2e-9 * pairs)
    assert model.predict(256, attention_pairs(256, 4096)) == pytest.approx(
        2e-3 + 1e-5 * 256 + 2e-9 * attention_pairs(256, 4096), rel=1e-3
    )
    few = model.rows_within(0.02, 0, 0, 65536, 4096)
    many = model.rows_within(0.02, 0, 0, 0, 4096)
    assert 0 < few < many
    assert model.predict(few, attention_pairs(few, 65536)) <= 0.02


@pytest.mark.parametrize("fails", [False, True])
@pytest.mark.parametrize("right", [0, 1, 3])
def test_a_step_beside_a_check_is_in_vain_if_drafts_come_true(right: int, fails: bool) -> None:
    """It was planned as if all drafts were wrong; then its token is known already."""

    class Told(Drafter):
        def draft(self, token_ids: array[int], most: int) -> list[int]:
            tokens = tuple(token_ids)
            for i in range(3):
                token = next_token(None, tokens)
                tokens += (token if i < right else (token + 1) % 3,)
            return list(tokens[len(token_ids) :])

    scheduler, memory = make([20], [None])
    scheduler.speculation = Speculation(Told(), 3, 3)
    own = request("a", [0, 1, 2], 12)
    expected = reference(own, [0, 1, 2], 40)
    scheduler.add(own)
    prompt = scheduler.plan()
    scheduler.commit(prompt, memory.run(prompt, scheduler))
    check = scheduler.plan()
    assert check.drafted == 3 and check.awaited
    checked = memory.run(check, scheduler)
    beside = scheduler.plan()
    assert not beside.drafted and beside.num_tokens == 1
    sampled = memory.run(beside, scheduler)
    scheduler.commit(check, checked)
    assert own.output_ids == expected[: 2 + right]
    assert own.pending == (0 if right else 1)
    if fails:
        scheduler.undo(beside, launched=True)
    else:
        after = scheduler.plan()
        later = memory.run(after, scheduler)
        kept = scheduler.commit(beside, sampled)
        assert bool(kept) == (right == 0)
        scheduler.check()
        scheduler.commit(after, later)
    scheduler.check()
    while scheduler.has_work:
        plan = scheduler.plan()
        scheduler.commit(plan, memory.run(plan, scheduler))
        scheduler.check()
    assert own.output_ids == expected


class SchedulerMachine(RuleBasedStateMachine):
    """Any interleaving of arrivals, steps and departures yields what each request would alone."""

    @initialize(
        page_size=st.integers(2, 4),
        landmark=st.booleans(),
        windows=st.sampled_from([(None,), (None, 5), (3, None, 9)]),
        chunk=st.integers(1, 12),
        running=st.integers(1, 4),
        caching=st.sampled_from([True, True, False]),
        limited=st.booleans(),
        overlap=st.booleans(),
        drafts=st.sampled_from([None, "drafter", "model", "model, ahead"]),
        most_drafts=st.integers(1, 7),
    )
    def setup(
        self,
        page_size: int,
        landmark: bool,
        windows: tuple[int | None, ...],
        chunk: int,
        running: int,
        caching: bool,
        limited: bool,
        overlap: bool,
        drafts: str | None,
        most_drafts: int,
    ) -> None:
        self.overlap = overlap
        self.in_flight: tuple[StepPlan, dict[str, list[int]], dict[str, list[int]]] | None = None
        groups = group_layers(windows)
        geometry = PageGeometry(page_size, page_size - landmark)
        pages = [
            7 if group.window is None else min(7, group.peak_pages(999, 1, geometry))
            for group in groups
        ]
        self.scheduler, self.memory = make(
            pages,
            list(windows),
            page_size=page_size,
            landmark=landmark,
            chunk=chunk,
            running=running,
            caching=caching,
            max_step_seconds=1e-3 if limited else None,
        )
        if drafts is not None:
            liar = Liar(most_drafts, by_model=drafts != "drafter")
            ahead = drafts == "model, ahead"
            self.scheduler.speculation = Speculation(liar, most_drafts, 3, ahead=ahead)
        self.most = self.scheduler.cache.max_tokens
        self.prompts: dict[str, list[int]] = {}
        self.all: dict[str, Request] = {}
        self.masks: dict[str, Masks] = {}

    @rule(
        prompt=st.lists(st.integers(0, 2), min_size=1, max_size=12),
        shared=st.booleans(),
        max_tokens=st.integers(1, 10),
        stop=st.sampled_from([frozenset(), frozenset({0})]),
        salt=st.integers(0, 1),
        tokens=st.sampled_from(["anywhere", "anywhere", "on the host", "masked"]),
        speculation=st.sampled_from([True, True, False]),
        scores=st.sampled_from(["none", "none", "none", "top", "whole"]),
    )
    def add(
        self,
        prompt: list[int],
        shared: bool,
        max_tokens: int,
        stop: frozenset[int],
        salt: int,
        tokens: str,
        speculation: bool,
        scores: PromptScores,
    ) -> None:
        if shared and self.prompts:
            prompt = (list(self.prompts.values())[-1] + prompt)[:12]
        prompt = prompt[: self.most - 1]
        name = str(len(self.all))
        new = request(name, prompt, max_tokens, self.most, salt)
        new.stop_token_ids = stop
        new.host_tokens = tokens != "anywhere"
        new.prompt_scores = scores
        new.params = replace(new.params, speculation=speculation)
        if tokens == "masked":
            new.allowed_tokens = self.masks[name] = Masks()
        self.prompts[name], self.all[name] = prompt, new
        self.scheduler.add(new)

    @rule(
        seconds=st.floats(1e-5, 1e-2),
        waits=st.booleans(),
        fails=st.sampled_from([None, None, None, None, "launch", "finish"]),
    )
    def step(self, seconds: float, waits: bool = False, fails: str | None = None) -> None:
        if waits and self.in_flight is not None and self.in_flight[0].drafted:
            self.land()  # as if drafts were likely to come true; they may do so all the same
        tables = {
            name: [list(table) for table in r.pages.tables]
            for name, r in self.all.items()
            if r.pages is not None
        }
        running = self.scheduler._running.items()
        decoding = {name for name, r in running if r.can_advance and r.remaining == 1}
        plan = self.scheduler.plan()
        if not plan:
            idle = not self.scheduler.has_work or self.scheduler.waits_for_masks
            assert idle or plan.retracted or self.in_flight
            self.land()
            return
        if fails == "launch":
            self.scheduler.undo(plan)  # the step in flight goes on
            return
        assert set(plan.retracted).isdisjoint(a.request_id for a in plan.advances)
        self.check_budget(plan, decoding)
        self.check_append_only(plan, tables)
        self.scheduler.step_time.observe(plan.num_tokens, plan.num_tokens, seconds)
        launched = plan, self.memory.run(plan, self.scheduler), self.memory.guesses
        if fails == "finish":  # of the first step that is out: the second builds on it
            for out in (self.in_flight, launched):
                if out is not None:
                    self.scheduler.undo(out[0], launched=True)
            self.in_flight = None
        elif self.overlap:
            self.land()
            self.in_flight = launched
        else:
            self.in_flight = launched
            self.land()

    def land(self) -> None:
        """The step in flight comes to its end."""
        if self.in_flight is None:
            return
        (plan, sampled, guesses), self.in_flight = self.in_flight, None
        for done in self.scheduler.commit(plan, sampled, guesses):
            if done.prompt_scores in ONLY_PROMPT:
                assert done.num_output == 0 and done.finish_reason == "length"
                continue
            expected = reference(done, self.prompts[done.id], self.most)
            assert done.output_ids == expected[: done.num_output]
            if done.finish_reason is not None:
                assert done.output_ids == expected

    @rule()
    def masks_arrive(self) -> None:
        for name, masks in self.masks.items():
            own = self.all[name]
            if masks.count < own.num_output and own.state is not State.FINISHED:
                speculation = self.scheduler.speculation
                drafts = [] if speculation is None else speculation.suggest(own)
                first = len(own.token_ids)
                places = range(first, first + 1 + len(drafts))
                masks.allowed = Allowed(tuple(str(p).encode() for p in places), tuple(drafts))
                masks.count = own.num_output

    @precondition(lambda self: self.scheduler.has_work)
    @rule(data=st.data(), reason=st.sampled_from(["abort", "stop"]))
    def leave(self, data: st.DataObject, reason: str) -> None:
        name = data.draw(st.sampled_from(sorted(self.scheduler._requests)))
        ended = self.scheduler.finish(name, "abort" if reason == "abort" else "stop")
        assert ended is self.all[name]
        assert ended.state is State.FINISHED

    def check_budget(self, plan: StepPlan, decoding: set[str]) -> None:
        geometry = self.scheduler.cache.geometry
        chunk = self.scheduler.limits.chunked_prefill_size
        decode = prefill = 0
        for advance in plan.advances:
            rows = geometry.rows(advance.stop) - geometry.rows(advance.start)
            if advance.request_id in decoding:
                decode += rows
            else:
                prefill += rows
        allowed = max(chunk - decode, min(chunk, geometry.page_size))
        # A token that completes a page brings its landmark row along.
        assert prefill <= allowed + geometry.has_landmark_row

    def check_append_only(self, plan: StepPlan, before: dict[str, list[list[int]]]) -> None:
        for name, tables in before.items():
            pages = self.all[name].pages
            if pages is None or name in plan.retracted:
                continue
            for old, new in zip(tables, pages.tables, strict=True):
                assert new[: len(old)] == old

    @invariant()
    def books_balance(self) -> None:
        if hasattr(self, "scheduler"):
            self.scheduler.check()

    def teardown(self) -> None:
        if not hasattr(self, "scheduler"):
            return
        # Everyone finishes within the steps it takes to compute everything one token at a time.
        work = sum(len(p) + self.all[n].params.max_tokens for n, p in self.prompts.items())
        for _ in range(20 + 8 * work):
            if not self.scheduler.has_work:
                break
            self.masks_arrive()
            self.step(1e-4)
        self.land()
        assert not self.scheduler.has_work
        assert all(r.finish_reason for r in self.all.values())
        self.scheduler.cache.tree.clear()
        self.scheduler.check()
        assert all(a.used_pages == 0 for a in self.scheduler.cache.allocators)


TestSchedulerMachine = SchedulerMachine.TestCase


def test_steps_under_a_time_limit_come_in_few_sizes() -> None:
    sizes = step_sizes(8192)
    assert sizes[:4] == [8192, 6144, 4096, 3072] and sizes[-1] == 64
    for rows in range(64, 8193):
        rounded = round_rows(rows)
        assert rounded in sizes and rounded <= rows < 1.5 * rounded + 1
