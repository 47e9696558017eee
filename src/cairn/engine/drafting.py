"""Drafts that the model makes: for which requests, and from which token on.

The model drafts within a step, before it checks the drafts. If drafts mostly come true, it goes on
as soon as a step is finished: the device drafts while the host plans the step that will check them.
What the plan then does not ask for was drafted in vain.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from cairn.engine.plan import Advance, StepPlan, right_drafts


class Made(NamedTuple):
    """Drafts that a request has on the device."""

    request_id: str
    attempt: int
    start: int
    """Position of the token before the first draft."""
    number: int

    def serves(self, advance: Advance) -> bool:
        """Whether these are the drafts that an advance checks, and perhaps more."""
        return (
            self.request_id == advance.request_id
            and self.attempt == advance.attempt
            and self.start == advance.start
            and self.number >= advance.guesses
        )


@dataclass(frozen=True, slots=True)
class Drafting:
    """Requests that the model drafts for, those with most drafts first, so that the others keep
    their places when these have enough."""

    advances: Sequence[Advance]
    """The advance of each request that asks for the drafts, or the one before it."""
    starts: np.ndarray
    """[requests] position of the newest token: the drafts follow it."""
    newest: np.ndarray  # [requests] this token; UNKNOWN if only the device knows it
    counts: np.ndarray  # [requests] number of drafts
    slots: np.ndarray  # [requests]

    @classmethod
    def _of(cls, rows: list[tuple[int, int, int, int]], advances: list[Advance]) -> Drafting:
        """`rows` have start, newest token, count and slot of each request."""
        columns = np.array(rows, dtype=np.int64).reshape(len(rows), 4)
        order = np.argsort(-columns[:, 2], kind="stable")
        return cls([advances[i] for i in order.tolist()], *columns[order].T)

    @classmethod
    def within(cls, advances: Sequence[Advance]) -> Drafting:
        """The drafts that these advances ask for."""
        rows = [(own.start, own.token_ids[0], own.guesses, own.slot) for own in advances]
        return cls._of(rows, list(advances))

    @classmethod
    def after(
        cls,
        plan: StepPlan,
        sampled: Mapping[str, Sequence[int]],
        guesses: Mapping[str, Sequence[int]],
    ) -> Drafting:
        """The drafts that follow a finished step, for the requests that have room for them."""
        rows, advances = [], []
        for own in plan.advances:
            if not own.room:
                continue
            tokens = sampled[own.request_id]
            right = right_drafts(tokens, guesses.get(own.request_id, ()))
            start = own.stop - own.guesses + right
            count = min(plan.ahead, own.room - start - 1)
            if count > 0:
                rows.append((start, tokens[right], count, own.slot))
                advances.append(own)
        return cls._of(rows, advances)

    @property
    def requests(self) -> list[tuple[str, int]]:
        """Id and attempt of each request."""
        return [(own.request_id, own.attempt) for own in self.advances]

    def parts(self, later: int) -> list[Advance]:
        """The parts of a step in which the model makes the draft after `later` others, for the
        requests that have so many."""
        count = int((self.counts > later).sum())
        given = zip(self.advances[:count], self.starts.tolist(), self.newest.tolist(), strict=False)
        return [own.guessing(1 + later, start, newest) for own, start, newest in given]

    def made(self) -> dict[int, Made]:
        """The drafts, by slot."""
        given = zip(self.advances, self.starts.tolist(), self.counts.tolist(), strict=True)
        return {
            own.slot: Made(own.request_id, own.attempt, start, count) for own, start, count in given
        }


class Selected(NamedTuple):
    """The requests whose pages a recorded step selected, for drafts from then on."""

    requests: list[tuple[str, int]]  # id and attempt
    since: np.ndarray  # [requests] position of the token before the first draft
    until: np.ndarray  # [requests] token from which on pages are selected anew

    @classmethod
    def by(cls, drafting: Drafting, tokens: int) -> Selected:
        """Selected by the first drafts, for so many tokens."""
        return cls(drafting.requests, drafting.starts, drafting.starts + tokens)

    def serves(self, drafting: Drafting) -> bool:
        """Whether drafts can read these pages: they are those of the same requests, in order."""
        if drafting.requests != self.requests:
            return False
        stops = drafting.starts + drafting.counts
        return bool(((drafting.starts >= self.since) & (stops <= self.until)).all())
