"""A plan under construction: how much each request computes, and the pages it takes for that.

The scheduler says which requests, and in which order.
"""

from __future__ import annotations

from array import array
from collections.abc import Collection

from cairn.engine.limits import Limits
from cairn.engine.plan import ONLY_PROMPT, UNKNOWN, Admission, Advance, Allowed, StepPlan, TableEdit
from cairn.engine.request import Request
from cairn.engine.speculation import Speculation
from cairn.engine.step_time import StepTimeModel, round_rows
from cairn.memory.cache import PagedCache, SequencePages
from cairn.memory.copies import CopyEdits
from cairn.memory.pages import NULL_PAGE

_PENDING = array("q", [UNKNOWN])
_NONE = array("q")


def attention_pairs(rows: int, context: int) -> int:
    """Number of (row, key) pairs that `rows` new rows after `context` earlier ones score."""
    return rows * context + rows * (rows + 1) // 2


class Step:
    """What the plan has so far, and what is left for more."""

    def __init__(
        self,
        cache: PagedCache,
        limits: Limits,
        step_time: StepTimeModel,
        speculation: Speculation | None,
        running: Collection[str],
    ) -> None:
        """`running` are the ids of running requests, which change while the step is planned."""
        self._cache = cache
        self._geometry = cache.geometry
        self._limits = limits
        self._step_time = step_time
        self._speculation = speculation
        self._running = running
        # The model drafts, by reading less than everything; all else reads everything.
        self._dense = speculation is not None and speculation.drafter.by_model
        self._ahead = 0 if speculation is None else speculation.ahead
        self.budget = 0  # rows left for prefill and drafts
        self.reserved = 0  # of them, for prefill
        self.admissions: list[Admission] = []
        self.retracted: list[str] = []
        self._advances: list[Advance] = []
        self._edits: list[TableEdit] = []
        self._rows = 0
        self._pairs = 0
        self._prefill_rows = 0
        self._drafted = 0
        self._hopeful = 0  # requests whose drafts probably come true

    def plan(self) -> StepPlan:
        """The finished plan."""
        # What is planned beside a check is in vain where drafts come true. If the model drafts,
        # such a step holds up all requests for long.
        enough = 0 if self._dense else len(self._advances) // 2
        awaited = self._hopeful > enough
        return StepPlan(
            tuple(self._advances),
            tuple(self.admissions),
            tuple(self._edits),
            tuple(self.retracted),
            self._cache.take_edits() if self._advances else CopyEdits(),
            self._rows,
            self._pairs,
            self._drafted,
            awaited=awaited,
            ahead=self._ahead if awaited else 0,
        )

    # -- prefill ------------------------------------------------------------------------------

    def chunk(self, request: Request) -> int:
        """Number of tokens of a prefilling request that the row budget and time limit allow."""
        rows = self.budget
        if rows <= 0:
            return 0
        geometry = self._geometry
        context = geometry.rows(request.computed)
        limit = self._limits.max_step_seconds
        if limit is not None:
            fit = self._step_time.rows_within(limit, self._rows, self._pairs, context, rows)
            # At least one page per step, so that prefill does not starve.
            least = 0 if self._prefill_rows else min(rows, geometry.page_size)
            # Round to few distinct step sizes, since libraries set up for each new size.
            rows = max(round_rows(self._rows + fit) - self._rows, least)
            if rows <= 0:
                return 0
        # A token that completes a page may take more than one row.
        tokens = max(1, geometry.tokens_in(context + rows) - request.computed)
        if self._limits.cuts_at_prompt and request.computed < request.prompt_len:
            tokens = min(tokens, request.prompt_len - request.computed)
        return min(request.remaining, tokens)

    def prefill(self, request: Request, tokens: int) -> None:
        """Advance by at most `tokens` tokens, as far as there are pages."""
        assert request.pages is not None
        most = self._cache.reachable_tokens(request.pages) - request.computed
        self._advance(request, min(tokens, most), prefill=True)

    # -- decoding, with drafts ----------------------------------------------------------------

    def decode(self, request: Request) -> None:
        """Advance by the newest token and the drafts after it."""
        speculation = self._speculation
        if speculation is None or not speculation.ready(request):
            self._advance(request, 1, prefill=False)
            return
        count = speculation.count(request, self._most_drafts(request, speculation))
        drafts = _PENDING * count
        if request.allowed_tokens is not None:
            drafts = array("q", _allowed(request).drafts[:count])
        elif count and not speculation.drafter.by_model:
            drafts = array("q", speculation.propose(request, count))
        self._advance(request, 1, prefill=False, drafts=drafts)
        self._hopeful += bool(drafts) and speculation.expects(request)

    def _most_drafts(self, request: Request, speculation: Speculation) -> int:
        """Number of drafts that there is room for, without making room by retraction."""
        after = request.num_tokens  # tokens without drafts
        most = min(speculation.most, request.end_len - after - 1, self.budget - self.reserved)
        assert request.pages is not None
        if after + most > self._geometry.tokens(request.pages.num_pages):
            most = min(most, self._cache.reachable_tokens(request.pages) - after)
        return max(0, most)

    def _hold_ahead(self, request: Request, pages: SequencePages, wanted: int) -> int:
        """Allocate pages for this many tokens, the last of them drafts that the model may make
        after the step, while there are enough for all. Returns how far drafts may go."""
        wanted = min(wanted, request.end_len)
        new = self._cache.new_pages(pages, wanted)
        if new and self._cache.min_available() >= new + len(self._running):
            self._cache.grow(pages, wanted)
            self._collect_edits(request, pages)
        return min(self._geometry.tokens(pages.num_pages), request.end_len - 1)

    # -- both ---------------------------------------------------------------------------------

    def _advance(
        self, request: Request, tokens: int, *, prefill: bool, drafts: array[int] = _NONE
    ) -> None:
        """Add an advance by `tokens` tokens, and by the drafts that follow them."""
        pages, scores, pending = request.pages, request.prompt_scores, request.pending
        geometry, speculation = self._geometry, self._speculation
        start, drafted = request.computed, len(drafts)
        stop = start + tokens + drafted
        assert pages is not None
        held = len(pages.tables[0])
        if stop > held * geometry.tokens_per_page:
            held += self._cache.grow(pages, stop)
        if held > request.planned_pages or pages.live_from != request.planned_live:
            self._collect_edits(request, pages)
        if prefill or self._limits.max_step_seconds is not None:
            context = geometry.rows(start)
            self._spend(geometry.rows(stop) - context, context, prefill=prefill)
        token_ids = _PENDING if pending else request.token_ids[start : stop - drafted]
        reaches_newest = stop - drafted == len(request.token_ids) + pending
        samples = int(reaches_newest and scores not in ONLY_PROMPT)
        guesses = room = 0
        if drafted:
            token_ids = token_ids + drafts
            samples += drafted
            guesses = drafted if drafts[0] == UNKNOWN else 0
            self._drafted += drafted
            rows = geometry.rows(stop) - geometry.rows(stop - drafted)
            self.budget = max(self.budget - rows, self.reserved)
        if samples and self._ahead and speculation and speculation.wants(request):
            room = self._hold_ahead(request, pages, stop + 1 + self._ahead)
        next_ids: tuple[int, ...] = ()
        if scores == "top":
            next_ids = tuple(request.token_ids[start + 1 : min(stop + 1, request.prompt_len)])
        allowed: tuple[bytes, ...] = ()
        if samples and request.allowed_tokens is not None:
            allowed = _allowed(request).masks[:samples]
        self._advances.append(
            # By position, which is faster: every running request passes here in every step.
            Advance(
                request.id,
                request.slot,
                start,
                stop,
                token_ids,
                request.prompt_len,
                samples,
                scores,
                next_ids,
                request.traced,
                request.dense or self._dense,
                allowed,
                request.retractions,
                guesses,
                request.reached if request.reached > start else 0,
                0,
                room,
            )
        )

    def _spend(self, rows: int, context: int, *, prefill: bool) -> None:
        self._rows += rows
        self._pairs += attention_pairs(rows, context)
        if prefill:
            self._prefill_rows += rows
            self.budget -= rows

    def _collect_edits(self, request: Request, pages: SequencePages) -> None:
        """Add the edits that bring the runner's tables up to date with the request's tables."""
        for g, table in enumerate(pages.tables):
            before, now = request.planned_live[g], pages.live_from[g]
            dropped = min(now, request.planned_pages) - before
            if dropped > 0:
                none, zeros = (NULL_PAGE,) * dropped, (0,) * dropped
                self._edits.append(TableEdit(g, request.slot, before, none, zeros))
            request.planned_live[g] = now
            if len(table) > request.planned_pages:
                first = request.planned_pages
                own, generations = tuple(table[first:]), tuple(pages.generations[g][first:])
                self._edits.append(TableEdit(g, request.slot, first, own, generations))
        request.planned_pages = pages.num_pages


def _allowed(request: Request) -> Allowed:
    assert request.allowed_tokens is not None
    allowed = request.allowed_tokens(request.num_output)
    assert allowed is not None  # `can_advance` has made sure
    return allowed
