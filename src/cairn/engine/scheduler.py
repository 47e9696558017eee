"""Decides which requests every step computes.

There is one rule: each request computes its known tokens that are not computed yet. A request with
one such token is decoding, one with many is prefilling, and both share a step. Running requests go
first, oldest first. Prefill gets the rest of the row budget. When pages run out, the youngest
running request is retracted. It resumes later from the part of its prefix that is still cached.

No request starves: decoding requests are in every step; prefill always gets at least one page of
rows; pages go to the oldest request first; waiting requests start in order unless they wait for a
page that is about to be published; and the oldest running request can always proceed.

With speculation a decoding request may compute drafted tokens too (see `speculation`). `computed`
counts only tokens that are known to be true, and so does the prefix cache. What was computed behind
them is computed again.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from types import MappingProxyType

from cairn.engine.limits import Limits, fits, outstanding_pages
from cairn.engine.plan import ONLY_PROMPT, Admission, Advance, StepPlan, right_drafts
from cairn.engine.request import FinishReason, Request, State
from cairn.engine.speculation import Speculation
from cairn.engine.step import Step
from cairn.engine.step_time import StepTimeModel
from cairn.errors import PageError, QueueFullError
from cairn.memory.cache import PagedCache, SequencePages
from cairn.memory.radix import PrefixMatch

_MAX_ADMISSIONS = 64
"""Waiting requests considered per step. Bounds planning time if the queue is long."""


@dataclass(slots=True)
class SchedulerStats:
    retractions: int = 0
    aborted: int = 0
    drafted: int = 0  # drafted tokens that were checked
    accepted: int = 0  # and came true


NO_GUESSES: Mapping[str, Sequence[int]] = MappingProxyType({})


def _in_vain(request: Request, advance: Advance) -> bool:
    """Whether the token that an advance samples is known already: it was planned while drafts were
    being checked, as if all were wrong, and some were right."""
    samples = advance.samples
    return samples > 0 and advance.stop - samples + 1 < len(request.token_ids)


class Scheduler:
    def __init__(
        self,
        cache: PagedCache,
        limits: Limits,
        clock: Callable[[], float],
        step_time: StepTimeModel | None = None,
        speculation: Speculation | None = None,
    ) -> None:
        self.cache = cache
        self.limits = limits
        self.stats = SchedulerStats()
        self.step_time = step_time or StepTimeModel()
        self.speculation = speculation
        self._clock = clock
        self._per_page = cache.geometry.tokens_per_page
        self._requests: dict[str, Request] = {}
        self._waiting: OrderedDict[str, Request] = OrderedDict()
        self._running: dict[str, Request] = {}  # oldest admission first
        self._free_slots = list(range(limits.max_running_requests - 1, -1, -1))

    # -- adding and ending requests -----------------------------------------------------------

    @property
    def num_waiting(self) -> int:
        return len(self._waiting)

    @property
    def num_running(self) -> int:
        return len(self._running)

    @property
    def has_work(self) -> bool:
        return bool(self._requests)

    @property
    def waits_for_masks(self) -> bool:
        """Some request waits to be told which tokens may come next."""
        return any(request.waits_for_mask for request in self._requests.values())

    def get(self, request_id: str) -> Request | None:
        return self._requests.get(request_id)

    def add(self, request: Request) -> None:
        if len(self._waiting) >= self.limits.max_queued_requests:
            raise QueueFullError(
                f"{len(self._waiting)} requests are waiting and max_queued_requests is "
                f"{self.limits.max_queued_requests}; send it again later or raise the limit"
            )
        if request.id in self._requests:
            raise ValueError(f"request id {request.id!r} is in use")
        request.times.arrival = self._clock()
        self._requests[request.id] = request
        self._waiting[request.id] = request

    def finish(self, request_id: str, reason: FinishReason) -> Request | None:
        """End a waiting or running request now and return it; None if unknown or already ended."""
        request = self._requests.get(request_id)
        if request is not None:
            self._end(request, reason)
        return request

    # -- planning -----------------------------------------------------------------------------

    def plan(self) -> StepPlan:
        """Choose the work of the next step and allocate its pages.

        Requests are planned strictly oldest first. A request that is retracted to make room is
        therefore not in the plan yet.

        If planning fails, as it may in a user's drafter, all running requests are retracted: the
        runner will not get to know which pages and slots they have been given.
        """
        step = Step(self.cache, self.limits, self.step_time, self.speculation, self._running)
        try:
            self._fill(step)
            return step.plan()
        except BaseException:
            for request in reversed(list(self._running.values())):
                self._retract(request)
            raise

    def _fill(self, step: Step) -> None:
        """Let running requests advance, then start waiting ones."""
        self.cache.poll()
        ready = [request for request in self._running.values() if request.can_advance]
        remaining = [request.remaining for request in ready]
        decoding = remaining.count(1)
        # Prefill must make progress however many requests decode.
        least = min(self.cache.geometry.page_size, self.limits.chunked_prefill_size)
        step.budget = max(self.limits.chunked_prefill_size - decoding, least)
        if self.speculation is not None:
            step.reserved = least if self._waiting or decoding < len(ready) else 0
            self.speculation.begin(len(ready))
        for request, left in zip(ready, remaining, strict=True):
            if request.state is not State.RUNNING:
                continue  # retracted to make room for an older request
            if left == 1:
                self._plan_decode(step, request)
            else:
                self._plan_prefill(step, request)
        if not step.retracted:
            self._admit(step)

    def undo(self, plan: StepPlan, *, launched: bool = False) -> None:
        """Retract the requests of a plan that failed. They resume from the prefix cache.

        Retraction is needed because their page tables and sampling state in the runner may be
        wrong.
        """
        planned = {advance.slot for advance in plan.advances}
        planned.update(admission.slot for admission in plan.admissions)
        for running in reversed(list(self._running.values())):
            if running.slot in planned:
                self._retract(running)
        self.cache.put_back(plan.copies)
        if launched:
            self.cache.clear()  # pages that the plan published may not have been written
            for advance in plan.advances:
                request = self._requests.get(advance.request_id)
                if request is not None and not _in_vain(request, advance):
                    request.pending -= advance.samples > 0  # this token will never arrive

    def _plan_decode(self, step: Step, request: Request) -> None:
        assert request.pages is not None
        start, held = request.computed, len(request.pages.tables[0])
        if start < self._per_page * held or self._make_room(step, request, start + 1):
            step.decode(request)

    def _plan_prefill(self, step: Step, request: Request) -> bool:
        """Advance by a chunk; False if there is no budget or no page for it."""
        tokens = step.chunk(request)
        if tokens <= 0 or not self._make_room(step, request, request.computed + 1):
            return False
        step.prefill(request, tokens)
        return True

    def _make_room(self, step: Step, request: Request, tokens: int) -> bool:
        """Retract younger requests until `request` can grow to `tokens` tokens; False if `request`
        itself had to be retracted."""
        while (new := self.cache.new_pages(request.pages, tokens)) and (
            new > self.cache.min_available()
        ):
            if self.cache.reclaim():
                continue
            victim = next(reversed(self._running.values()))
            self._retract(victim)
            step.retracted.append(victim.id)
            if victim is request:
                return False
        return True

    def _admit(self, step: Step) -> None:
        """Start waiting requests in order while there are slots, rows and pages.

        A request whose next page is about to be published waits for that page instead of computing
        it again.
        """
        if not (self._waiting and self._free_slots and step.budget > 0):
            return
        while not self._running and self.cache.reclaim():
            pass  # nothing runs: wait for pages that are about to be cached
        pending = self.cache.arriving()
        promised = [0] * len(self.cache.groups)

        def expect(request: Request) -> None:
            """Note what a running request will still take, and the next page it will publish."""
            for g in range(len(promised)):
                promised[g] += outstanding_pages(self.cache, self.limits, request, g)
            assert request.pages is not None
            page = self.cache.pending_page(request.pages, request.token_ids)
            if page is not None:
                pending.add(page)

        for request in self._running.values():
            expect(request)
        for request in list(islice(self._waiting.values(), _MAX_ADMISSIONS)):
            if not self._free_slots or step.budget <= 0:
                return
            if request.pending:
                return  # just retracted: its newest token is not known yet
            if request.waits_for_mask:
                continue
            match = request.match or PrefixMatch(request.namespace)
            if request.prompt_scores == "none":
                match = request.match = self.cache.match(match, request.token_ids)
                if self.cache.next_page(match, request.token_ids) in pending:
                    continue
            # A single request always fits: its length was checked against the pool.
            if self._running and not fits(self.cache, self.limits, request, match, promised):
                return
            step.admissions.append(self._start(request, match))
            if not self._plan_prefill(step, request):
                return
            expect(request)

    def _start(self, request: Request, match: PrefixMatch) -> Admission:
        request.pages = self.cache.open(
            match, len(request.token_ids), publish=request.prompt_scores == "none"
        )
        del self._waiting[request.id]
        self._running[request.id] = request
        request.state, request.match = State.RUNNING, None
        if request.shares_tokens:
            request.token_ids, request.shares_tokens = request.token_ids[:], False
        request.slot = self._free_slots.pop()
        request.computed = self.cache.geometry.tokens(match.num_pages)
        request.planned_pages = 0
        request.planned_live = [0] * len(self.cache.groups)
        if request.times.first_scheduled == 0.0:
            request.times.first_scheduled = self._clock()
            request.cached_tokens = request.computed
        counted = request.params.has_penalties
        return Admission(
            slot=request.slot,
            params=request.params,
            seed=request.seed,
            stop_token_ids=request.stop_token_ids,
            prompt_ids=tuple(request.token_ids[: request.prompt_len]) if counted else (),
            output_ids=tuple(request.output_ids) if counted else (),
        )

    # -- committing ---------------------------------------------------------------------------

    def launched(self, plan: StepPlan) -> None:
        """Record that a plan was launched. The next plan may build on it before its tokens are
        known.

        From now on, pages and slots of the step may go to other requests even while the step still
        writes to them: later steps run after it on the device.
        """
        due: list[tuple[SequencePages, Request]] = []
        for advance in plan.advances:
            request = self._requests[advance.request_id]
            pages = request.pages
            assert pages is not None
            stop, samples = advance.stop, advance.samples
            request.reached = stop
            request.checking = samples > 1
            request.left_out = plan.ahead > 0 and not advance.room
            request.computed = computed = stop - samples + 1 if samples else stop
            request.pending += samples > 0
            if computed >= pages.due:
                due.append((pages, request))
        for pages, request in due:
            self.cache.commit(pages, request.token_ids, request.computed)
        self.cache.launched()

    def commit(
        self,
        plan: StepPlan,
        sampled: Mapping[str, Sequence[int]],
        guesses: Mapping[str, Sequence[int]] = NO_GUESSES,
    ) -> dict[Request, Sequence[int]]:
        """Record a finished step, with the tokens that each request sampled, and the drafts that
        the model made. Returns the requests that got tokens or ended, with the tokens that they
        keep."""
        progressed: dict[Request, Sequence[int]] = {}
        now = self._clock()
        for advance in plan.advances:
            request = self._requests.get(advance.request_id)
            if request is None:
                continue  # ended after the plan was made
            if _in_vain(request, advance):
                continue
            samples, retracted = advance.samples, advance.attempt != request.retractions
            # A request that was retracted in the meantime scores its prompt again.
            if retracted and request.prompt_scores != "none":
                request.pending -= samples > 0
                continue
            reason: FinishReason | None = None
            if samples:
                request.pending -= 1
                tokens = sampled[request.id]
                if samples > 1:
                    drafts = guesses.get(request.id) or advance.token_ids[1 - samples :]
                    tokens = self._kept(request, tokens, drafts, retracted=retracted)
                progressed[request] = tokens
                reason = self._append(request, tokens, now)
            elif request.prompt_scores in ONLY_PROMPT and advance.stop == len(request.token_ids):
                progressed[request] = ()
                reason = "length"
            pages = request.pages
            if pages is not None and request.computed >= pages.due:
                # The new tokens may have completed a page.
                self.cache.commit(pages, request.token_ids, request.computed)
            if reason is not None:
                self._end(request, reason)
        return progressed

    def _kept(
        self, request: Request, sampled: Sequence[int], drafts: Sequence[int], *, retracted: bool
    ) -> Sequence[int]:
        """The tokens that a request keeps of those sampled after its newest token and after each of
        its drafts: up to the first one that is not the draft."""
        right = right_drafts(sampled, drafts)
        kept = sampled[: right + 1]
        for i in range(right):  # nothing follows the last one
            if kept[i] in request.stop_token_ids:
                kept = kept[: i + 1]
                break
        request.checking = False
        if request.pending:
            if right:
                request.pending = 0  # the step that was launched meanwhile is in vain
        elif not retracted:
            request.computed += min(right, len(kept))
        assert self.speculation is not None
        drafted, stats = len(drafts), self.stats
        self.speculation.checked(request, drafted, right)
        stats.drafted += drafted
        stats.accepted += right
        return kept

    def _append(self, request: Request, tokens: Sequence[int], now: float) -> FinishReason | None:
        """Add sampled tokens. Returns why they end the request, None if they do not."""
        token_ids = request.token_ids
        if len(token_ids) == request.prompt_len:
            request.times.first_token = now
        token_ids.extend(tokens)
        if tokens[-1] in request.stop_token_ids:
            request.stopped_by_token = True
            return "stop"
        return "length" if len(token_ids) >= request.end_len else None

    # -- leaving ------------------------------------------------------------------------------

    def _retract(self, request: Request) -> None:
        """Free a request's pages and requeue it first. It resumes from the prefix cache."""
        self._leave(request)
        request.state = State.WAITING
        request.computed = request.reached = 0
        request.retractions += 1
        self.stats.retractions += 1
        self._waiting[request.id] = request
        self._waiting.move_to_end(request.id, last=False)
        # The prompt is computed and scored again.
        request.prompt_logprobs.clear()
        request.distributions.clear()
        request.hidden_sums.clear()

    def _end(self, request: Request, reason: FinishReason) -> None:
        if request.state is State.RUNNING:
            self._leave(request)
        else:
            del self._waiting[request.id]
        del self._requests[request.id]
        request.state = State.FINISHED
        request.finish_reason = reason
        request.times.finished = self._clock()
        self.stats.aborted += reason == "abort"

    def _leave(self, request: Request) -> None:
        assert request.pages is not None
        self.cache.close(request.pages, request.token_ids, request.computed)
        request.pages = None
        del self._running[request.id]
        self._free_slots.append(request.slot)
        request.slot = -1

    # -- invariants ---------------------------------------------------------------------------

    def check(self) -> None:
        """Raise PageError if pages, slots or queues are inconsistent."""
        self.cache.check()
        slots = [request.slot for request in self._running.values()]
        if sorted(slots + self._free_slots) != list(range(self.limits.max_running_requests)):
            raise PageError("table slots are lost or shared")
        for request in self._requests.values():
            running = request.id in self._running
            if running == (request.id in self._waiting) or running != (request.pages is not None):
                raise PageError(f"request {request.id} is in no queue, or in two")
            if request.pages is None:
                if request.computed:
                    raise PageError(f"request {request.id} waits but claims computed tokens")
            else:
                held = self.cache.geometry.tokens(request.pages.num_pages)
                if not request.computed <= min(held, request.num_tokens):
                    raise PageError(f"request {request.id} computed more than it holds")
                if not request.computed <= request.reached <= held and request.reached:
                    raise PageError(f"request {request.id} drafted more than it holds")
            if not 0 <= request.pending <= 1:
                raise PageError(f"request {request.id} waits for {request.pending} tokens")
