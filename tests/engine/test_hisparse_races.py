"""Races that host tiers have had, each one scripted: the order that loses, and ours.

The device lags behind the host as far as overlap scheduling lets it (see `lanes`). Every test runs
twice: as Cairn orders things, where the outcome must be right, and in the order that looks as good
and is wrong, where the test must notice.

Two more that are known elsewhere cannot occur here. Ranks that disagree about finished copies or
tied scores: there is one rank, and ties go to the lower page. Rows of speculative tokens that are
freed twice: no row is ever written that has no token.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from cairn import LLM, SamplingParams
from cairn.engine.plan import UNKNOWN, StepPlan
from cairn.engine.request import Request
from cairn.engine.step_result import InFlight
from cairn.memory.cache import PagedCache, SequencePages
from cairn.memory.copies import CopyEdits, Transfer
from tests.engine.lanes import LaggingRunner, Lane, ScriptedMover, tier_of
from tests.engine.tiered import MODELS, check, check_clean, expected, tiered
from tests.helpers import poison_free_memory, tokens_of, write_model


@pytest.fixture(scope="module", params=["many", "dense", "rows"])
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp(request.param), MODELS[request.param][0])


ORDERS = pytest.mark.parametrize("naive", [False, True], ids=["ours", "naive"])


class Lagging:
    """An engine whose device lags, and whose copies end when told."""

    def __init__(self, folder: Path, *, late: bool = False, **options: Any) -> None:
        self.folder = folder
        self.llm: LLM = tiered(folder, overlap=True, **{"chunked_prefill_size": 64, **options})
        self.engine = self.llm.engine
        self.lane = Lane()
        self.runner = LaggingRunner(self.engine, self.lane)
        poison_free_memory(self.engine, self.lane.add)
        self.mover = ScriptedMover(self.engine, self.lane, late=late, rng=random.Random(0))

    def add(self, prompt: Sequence[int], most: int = 24) -> Request:
        params = SamplingParams(max_tokens=most, ignore_eos=True)
        (request,) = self.engine.make_requests(prompt, params)
        self.engine.submit(request)
        return request

    def drain(self, ending: int = 100) -> None:
        while self.engine.has_work:
            self.engine.step()
            self.mover.finish(ending)
        self.engine.step()
        self.lane.run(self.lane.end)

    def is_right(self, request: Request) -> bool:
        prompt = tuple(request.token_ids[: request.prompt_len])
        return request.output_ids == expected(self.folder, prompt, request.params)


def outcome(naive: bool, run: Callable[[], None]) -> None:
    """Ours must go through; the naive order must be noticed."""
    if not naive:
        run()
        return
    with pytest.raises((AssertionError, KeyError, IndexError)):
        run()


def evict_frames(device: Lagging) -> None:
    tree = device.engine.scheduler.cache.tree
    while tree.evictable_pages(1):
        tree.evict_one(1)


@ORDERS
def test_a_a_backup_reads_pages_before_the_step_has_written_them(folder: Path, naive: bool) -> None:
    device = Lagging(folder, frames=10)
    if naive:  # the copy does not wait for the lane

        def back_up(transfers: Sequence[Transfer]) -> None:
            device.mover._copy(transfers)
            device.mover.moving.extend((transfer, 0) for transfer in transfers)

        device.mover.back_up = back_up  # type: ignore[method-assign]

    def run() -> None:
        request = device.add(tokens_of(200))
        device.drain()
        assert device.is_right(request)
        check_clean(device.engine)

    outcome(naive, run)


@ORDERS
def test_a_the_next_step_writes_over_a_page_that_is_being_copied(folder: Path, naive: bool) -> None:
    """Long before a copy ends, the room of its page would be wanted for new rows."""
    device = Lagging(folder, frames=10, late=True)
    if naive:  # a copy counts as done when it is started
        started = device.mover.back_up

        def back_up(transfers: Sequence[Transfer]) -> None:
            started(transfers)
            device.mover.done += transfers

        finish = device.mover.finish
        device.mover.back_up = back_up  # type: ignore[method-assign]

        def late(count: int) -> None:
            known = list(device.mover.done)
            finish(count)
            device.mover.done[:] = known

        device.mover.finish = late  # type: ignore[method-assign]

    def run() -> None:
        request = device.add(tokens_of(200))
        device.drain(ending=0)  # copies end only when somebody waits for them
        assert device.is_right(request)
        assert tier_of(device.engine).stats.stall_seconds > 0
        check_clean(device.engine)

    outcome(naive, run)


NO_FETCH = "single rows are read where they are, no page is fetched: this order loses nothing"


@ORDERS
def test_b_a_step_still_runs_for_a_request_that_has_ended(folder: Path, naive: bool) -> None:
    """Its last row is written while its frame is already another page's, that is fetched."""
    if naive and "rows" in folder.name:
        pytest.skip(NO_FETCH)
    device = Lagging(folder, frames=20)
    begin = tier_of(device.engine).begin_step
    if naive:  # pages are fetched when the plan is made, not at the head of the step
        tier_of(device.engine).begin_step = lambda edits: begin(  # type: ignore[method-assign]
            CopyEdits(edits.frames)
        )
        launch = device.runner.launch

        def early(plan: StepPlan) -> InFlight:
            begin(CopyEdits((), plan.copies.fetches))
            return launch(plan)

        device.runner.launch = early  # type: ignore[method-assign]

    def run() -> None:
        first = device.add(tokens_of(130, seed=1))
        device.drain()
        evict_frames(device)  # the prefix is in host memory alone
        runs = device.add(tokens_of(40, seed=2), most=60)
        while runs.num_output < 5:
            device.engine.step()
            device.mover.finish(100)
        again = device.add([*tokens_of(130, seed=1), *first.output_ids[:10]], most=8)
        device.engine.abort(runs.id)  # a step of it is in the lane
        device.drain()
        assert again.cached_tokens > 0 and device.is_right(again)
        check_clean(device.engine)

    outcome(naive, run)


class _HoldsNothing(PagedCache):
    """Copies under way do not hold what they copy."""

    def _complete(self, pages: SequencePages, computed: int) -> None:
        assert self.copies is not None
        for index in range(pages.completed, self.geometry.complete_pages(computed)):
            page, frame = (
                pages.tables[self._page_group][index],
                pages.tables[self._frame_group][index],
            )
            self.copies._to_start.append(Transfer(page, frame))
            self.copies._backing[page] = frame
            pages.completed = index + 1

    def _settle(self, done: Sequence[Transfer]) -> None:
        pass


@ORDERS
def test_c_abort_during_a_backup(folder: Path, naive: bool) -> None:
    """The next request gets the aborted one's pages while they are still being copied."""
    device = Lagging(folder, frames=14, pages=28, late=True, disable_radix_cache=True)
    if naive:
        device.engine.scheduler.cache.__class__ = _HoldsNothing

    def run() -> None:
        other = device.add(tokens_of(10, seed=8), most=60)
        aborted = device.add(tokens_of(100, seed=3))
        for _ in range(3):
            device.engine.step()
        assert device.mover.moving
        device.engine.abort(aborted.id)
        request = device.add(tokens_of(200, seed=4))
        device.drain(ending=1)
        assert device.is_right(request) and device.is_right(other)
        check_clean(device.engine)

    outcome(naive, run)


@ORDERS
def test_d_tables_change_under_a_step_that_reads_them(folder: Path, naive: bool) -> None:
    """Pages move while an earlier step, which knows them where they were, has yet to run."""
    if naive and "rows" in folder.name:
        pytest.skip(NO_FETCH)
    device = Lagging(folder, frames=20)
    tier = tier_of(device.engine)
    if naive:  # the table is edited when the plan is made
        launch, begin = device.runner.launch, tier.begin_step

        def early(plan: StepPlan) -> InFlight:
            begin(CopyEdits(plan.copies.frames))
            return launch(plan)

        device.runner.launch = early  # type: ignore[method-assign]
        tier.begin_step = lambda edits: begin(  # type: ignore[method-assign]
            CopyEdits((), edits.fetches)
        )

    def run() -> None:
        first = device.add(tokens_of(130, seed=1), most=60)
        while first.num_output < 5:
            device.engine.step()
            device.mover.finish(100)
        evict_frames(device)  # it reads its prompt from host memory
        for _ in range(3):
            device.engine.step()
        second = device.add(tokens_of(130, seed=1)[:100], most=8)  # brings some of it back
        device.drain()
        assert second.cached_tokens > 0
        assert device.is_right(first) and device.is_right(second)
        check_clean(device.engine)

    outcome(naive, run)


@ORDERS
def test_e_the_newest_token_of_a_slot_is_written_for_its_last_owner(
    folder: Path, naive: bool
) -> None:
    """A slot changes hands while a step of its last owner, that will leave a token there, is in
    the lane."""
    device = Lagging(folder, frames=12, max_running_requests=1)
    if naive:  # known tokens are left in the slot when the step is planned, and read there
        launch, real = device.runner.launch, device.runner.real

        def early(plan: StepPlan) -> InFlight:
            advances = []
            for advance in plan.advances:
                known = advance.token_ids[:]
                if known[-1] != UNKNOWN:
                    real.stepper.newest[advance.slot] = known[-1]
                    known[-1] = UNKNOWN
                advances.append(advance._replace(token_ids=known))
            return launch(replace(plan, advances=tuple(advances)))

        device.runner.launch = early  # type: ignore[method-assign]

    def run() -> None:
        first = device.add(tokens_of(40, seed=6), most=60)
        while first.num_output < 5:
            device.engine.step()
        second = device.add(tokens_of(30, seed=8))
        device.engine.abort(first.id)
        device.drain()
        assert device.is_right(second)
        check_clean(device.engine)

    outcome(naive, run)


@ORDERS
def test_h_what_a_copy_was_told_is_gone_before_it_reads_it(folder: Path, naive: bool) -> None:
    """The list of pages to copy belongs to the copy until that has ended."""
    device = Lagging(folder, frames=10, late=True)
    handed: list[tuple[Sequence[Transfer], list[Transfer]]] = []
    started = device.mover.back_up
    reused: list[Transfer] = []

    def back_up(transfers: Sequence[Transfer]) -> None:
        if naive:  # one list for all steps
            reused[:] = transfers
            transfers = reused
        handed.append((transfers, list(transfers)))
        started(transfers)

    device.mover.back_up = back_up  # type: ignore[method-assign]

    def run() -> None:
        request = device.add(tokens_of(200))
        device.drain(ending=1)
        assert device.is_right(request)
        assert len(handed) > 2
        assert all(list(later) == then for later, then in handed)
        check(device.engine)

    outcome(naive, run)
