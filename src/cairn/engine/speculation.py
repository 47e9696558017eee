"""Speculation: when to draft tokens, how many, and whether it pays.

A drafter guesses tokens. The model computes them as further rows of the step that computes the
newest token, and samples the token after each row. A draft is kept while it equals the token that
was sampled in its place. Tokens are sampled with the random numbers of their positions, as without
drafts, so the text is the same with any drafter, good or bad; only the number of steps differs. A
drafter that is the model itself drafts within the step that checks its drafts.

Drafts that are wrong cost time. A request whose drafts fail several times in a row pauses, longer
each time. The engine also times itself with and without drafts, and drafts only while that is
faster and more than a few come true (`Pace`).
"""

from __future__ import annotations

from math import inf
from statistics import median
from typing import Literal

from cairn.engine.drafters.drafter import FIRST_DRAFTS, Drafter
from cairn.engine.plan import ONLY_PROMPT, StepPlan
from cairn.engine.request import Request

_MISSES = 4
"""Checks in a row without a right draft after which a request pauses. Each of them halves the
number of drafts, unless the model makes them. After a pause one is enough."""
_DOUBTS = 2
"""Checks in a row without a right draft after which the next step does not wait for a check."""
_SHORTEST_REST, _LONGEST_REST = 32, 1024
"""Tokens of a pause. It doubles each time, and starts again after a right draft."""


class Speculation:
    def __init__(
        self, drafter: Drafter, most: int, vocab_size: int, *, least: int = 0, ahead: bool = False
    ) -> None:
        """`least` is the number of tokens from which on drafts are worth their while. With `ahead`
        the model drafts after a step, while the next one is planned."""
        self.drafter = drafter
        self.most = most
        """Tokens to draft at most."""
        self.drafts_ahead = ahead
        self._vocab = vocab_size
        self._least = least
        self.pace = Pace(hasty=drafter.by_model)
        self._pays = True

    @property
    def ahead(self) -> int:
        """Tokens that the model drafts after a step; 0 if it drafts within steps only."""
        return self.most if self.drafts_ahead else 0

    def begin(self, requests: int) -> None:
        """Called before a step of so many requests is planned."""
        self._pays = self.pace.drafts(requests)

    def wants(self, request: Request) -> bool:
        """Whether to draft for this request now."""
        length = len(request.token_ids)
        return (  # what mostly fails comes first: every running request passes here in every step
            self._pays
            and length >= request.rests_until
            and length >= self._least
            and request.params.speculation
            and request.prompt_scores not in ONLY_PROMPT
            # Masks are made on the host, which does not know the model's drafts in time.
            and not (request.allowed_tokens is not None and self.drafter.by_model)
        )

    def ready(self, request: Request) -> bool:
        """Whether this request may have drafts in the next step. Not while drafts are being
        checked: nobody knows yet what they would follow. Nor if the model has drafted for other
        requests and not for this one: they would wait for its drafts."""
        return not (request.checking or request.left_out) and self.wants(request)

    def count(self, request: Request, most: int) -> int:
        """How many tokens to draft for a request that is ready, of at most `most`."""
        if most <= 0:
            return 0
        if self.drafter.by_model:
            # Requests draft together, and a step is as long as its longest drafts.
            return min(most, self.most)
        usual = self.most if request.all_right else min(self.most, FIRST_DRAFTS)
        return min(most, max(1, usual >> request.misses))

    def suggest(self, request: Request) -> list[int]:
        """Drafts of a request that takes allowed tokens only, before it is planned. Its masks are
        to be made for them too."""
        if self.drafter.by_model or not self.ready(request):
            return []
        count = self.count(request, min(self.most, request.end_len - request.num_tokens - 1))
        return self.propose(request, count) if count else []

    def expects(self, request: Request) -> bool:
        """Whether drafts of this request probably come true."""
        return request.misses < _DOUBTS

    def propose(self, request: Request, most: int) -> list[int]:
        """At most `most` drafts that would follow the request's newest token."""
        # The newest token may be unknown; then its draft is dropped.
        unknown, stops, vocab = request.pending, request.stop_token_ids, self._vocab
        made = self.drafter.draft(request.token_ids, most + unknown)
        drafts = list(made)[unknown : unknown + most]
        for i, token in enumerate(drafts):
            # Nothing follows a stop token, or what is no token of the model.
            if not 0 <= token < vocab or token in stops:
                return drafts[:i]
        return drafts

    def checked(self, request: Request, drafted: int, right: int) -> None:
        """Note that the first `right` of a request's drafts came true."""
        request.drafted_tokens += drafted
        request.accepted_tokens += right
        request.all_right = right == drafted
        if right:
            request.misses = request.rest = 0
            return
        request.misses += 1
        if request.misses >= _MISSES:
            request.misses = _MISSES - 1
            request.rest = min(max(2 * request.rest, _SHORTEST_REST), _LONGEST_REST)
            request.rests_until = len(request.token_ids) + request.rest


_WITH, _WITHOUT = 32, 6
"""Steps that are timed together, with drafts and without."""
_HICCUP = 2.0
"""A step without drafts that takes longer than this many median steps waited for the system, or
compiled a kernel. It counts as this many."""
_LEAST_GAIN = 1.02
"""Drafts stop if steps with drafts bring fewer tokens than this for each request. They never take
less time than steps without, so this needs no clock."""
_FIRST_WITH = 4
"""Steps with drafts that are timed first, if the model drafts. Such steps take about equally long,
and drafts of all requests are about equally good, so a few show whether drafts are far too slow."""
_WORSE, _MUCH_WORSE = 0.98, 0.85
"""Drafts stop if they bring less than this share of the tokens per second without them, as found by
many steps and by few."""
_BETWEEN = 1024
"""Steps with drafts before steps without are timed again."""
_SHORTEST_PAUSE, _LONGEST_PAUSE = 256, 8192
"""Steps without drafts before drafts are tried again. Doubles each time they do not pay."""


class Pace:
    """Measures tokens per second with and without drafts, and says whether to draft.

    Only steps that decode count. Batches are told apart by size, in powers of two.
    """

    def __init__(self, *, hasty: bool = False) -> None:
        """`hasty`: drafts may stop after the first few steps."""
        self._hasty = hasty
        self._trials: dict[int, _Trial] = {}

    def drafts(self, requests: int) -> bool:
        """Whether drafts pay in a batch of so many requests, as far as is known."""
        return self._of(requests).phase == "drafts"

    def told(self, requests: int) -> str:
        """What was found for batches of so many requests, in words."""
        return str(self._of(requests))

    def observe(self, plan: StepPlan, tokens: int, seconds: float) -> None:
        """Note that a step brought this many tokens, this long after the step before it."""
        if plan.only_decodes:
            count = len(plan.advances)
            self._of(count).observe(count, tokens, seconds, drafts=plan.drafted > 0)

    def _of(self, requests: int) -> _Trial:
        return self._trials.setdefault(requests.bit_length(), _Trial(self._hasty))


class _Speed:
    """Tokens per second of steps of one kind."""

    def __init__(self) -> None:
        self.value: float | None = None
        self.gain = 0.0
        """Tokens for each request and step, when the value was taken last."""
        self._requests = self._tokens = 0  # of all steps since
        self._seconds: list[float] = []  # of each step since

    @property
    def steps(self) -> int:
        """Number of steps since the value was taken."""
        return len(self._seconds)

    def add(self, requests: int, tokens: int, seconds: float) -> None:
        self._requests += requests
        self._tokens += tokens
        self._seconds.append(seconds)

    def take(self, most: float) -> None:
        """The value is now half that of the steps since, and half the old one. A step counts as at
        most `most` median steps."""
        longest = most * median(self._seconds)
        new = self._tokens / max(sum(min(own, longest) for own in self._seconds), 1e-9)
        self.value = new if self.value is None else (self.value + new) / 2
        self.gain = self._tokens / self._requests
        self._requests = self._tokens = 0
        self._seconds.clear()


class _Trial:
    """Drafts while steps with drafts bring more tokens per second than steps without. From time to
    time it tries the other way again."""

    def __init__(self, hasty: bool) -> None:
        self.phase: Literal["drafts", "timing", "pause"] = "drafts"
        self._hasty = hasty
        self._few = hasty  # few steps with drafts were timed so far
        self._with, self._without = _Speed(), _Speed()
        self._drafting = 0  # steps with drafts since steps without were timed
        self._pause = self._left = 0  # steps of the last pause, and those that are left
        self._drafted_before = False

    def observe(self, requests: int, tokens: int, seconds: float, *, drafts: bool) -> None:
        # A step after a check may have waited for it, or be in vain.
        drafts, self._drafted_before = drafts or self._drafted_before, drafts
        if self.phase == "pause":
            self._left -= 1
            if self._left <= 0:
                self.phase, self._with, self._few = "drafts", _Speed(), self._hasty
        if drafts:
            self._drafting += 1
            self._with.add(requests, tokens, seconds)
            if self._with.steps >= (_FIRST_WITH if self._few else _WITH):
                self._with.take(inf)
                self._decide()
        else:
            self._without.add(requests, tokens, seconds)
            if self._without.steps >= _WITHOUT:
                self._without.take(_HICCUP)
                self._drafting = 0
                if self.phase == "timing":
                    self._decide()

    def __str__(self) -> str:
        found = (
            f"{round(speed.value):,} tok/s {how}"
            for speed, how in ((self._with, "with"), (self._without, "without"))
            if speed.value is not None
        )
        return ", ".join((self.phase, *found))

    def _decide(self) -> None:
        on, off, few = self._with.value, self._without.value, self._few
        if on is not None and not few and self._with.gain < _LEAST_GAIN:
            self._stop()
        elif off is None or self._drafting >= _BETWEEN:
            self.phase = "timing"
        elif on is None or on >= (_MUCH_WORSE if few else _WORSE) * off:
            self.phase, self._few = "drafts", False
            if few:  # these steps must not count as much as those that follow
                self._with = _Speed()
            else:
                self._pause = 0
        else:
            self._stop()

    def _stop(self) -> None:
        self.phase = "pause"
        self._pause = self._left = min(max(2 * self._pause, _SHORTEST_PAUSE), _LONGEST_PAUSE)
