"""Drafts that the model makes: for which requests, and from which token on.

The model drafts within a step, before it checks the drafts. If drafts mostly come true, it goes on
right behind a step: the device drafts while the host plans the step that will check them. What the
plan then does not ask for was drafted in vain. From recorded steps these drafts are launched with
the step before them, so that the device does not wait for the host to see which of that step's own
drafts came true (`kernels/draft_rows.py`); otherwise when it is finished.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch

from cairn.attention.batch import to_device
from cairn.engine.plan import UNKNOWN, Advance, StepPlan, right_drafts
from cairn.kernels.interface import RowInputs
from cairn.kernels.packing import pack, unpack


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
    unseen: np.ndarray
    """[requests] number of drafts that the last step checks, of which only the device knows how
    many came true; 0 if `starts` are final."""

    @classmethod
    def _of(cls, rows: list[tuple[int, int, int, int, int]], advances: list[Advance]) -> Drafting:
        """`rows` have start, newest token, count, slot and unseen drafts of each request."""
        columns = np.array(rows, dtype=np.int64).reshape(len(rows), 5)
        order = np.argsort(-columns[:, 2], kind="stable")
        return cls([advances[i] for i in order.tolist()], *columns[order].T)

    @classmethod
    def within(cls, advances: Sequence[Advance]) -> Drafting:
        """The drafts that these advances ask for."""
        rows = [(own.start, own.token_ids[0], own.guesses, own.slot, 0) for own in advances]
        return cls._of(rows, list(advances))

    @classmethod
    def during(cls, plan: StepPlan) -> Drafting:
        """The drafts that follow a step whose tokens only the device knows: from where they begin
        if none of its own drafts comes true. All requests make equally many; those that go beyond
        the room of a request are made in vain."""
        rows, advances = [], []
        for own in plan.advances:
            start = own.stop - own.guesses
            if own.room > start + 1:
                rows.append((start, UNKNOWN, plan.ahead, own.slot, own.guesses))
                advances.append(own)
        return cls._of(rows, advances)

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
                rows.append((start, tokens[right], count, own.slot, 0))
                advances.append(own)
        return cls._of(rows, advances)

    @property
    def stops(self) -> np.ndarray:
        """[requests] position of the last draft at most."""
        stops: np.ndarray = self.starts + self.unseen + self.counts
        return stops

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
        return bool(((drafting.starts >= self.since) & (drafting.stops <= self.until)).all())


@dataclass(frozen=True, slots=True)
class Unseen:
    """What the device needs to draft on from tokens that the host has not seen, [requests]."""

    seeds: torch.Tensor  # int64, of the requests
    first: torch.Tensor  # index of the first token that a request sampled
    checked: torch.Tensor  # number of drafts that were checked
    places: torch.Tensor  # of the newest token of each slot
    room: torch.Tensor  # number of tokens that a request has pages for
    right: torch.Tensor  # number of drafts that came true, filled by `count_right`

    @classmethod
    def of(
        cls,
        device: torch.device,
        *,
        seeds: np.ndarray,
        first: np.ndarray,
        checked: np.ndarray,
        places: np.ndarray,
        room: np.ndarray,
    ) -> Unseen:
        arrays = (seeds.view(np.int32), first, checked, places, room, np.zeros_like(room))
        own, *rest = unpack(to_device(pack(arrays), device), [len(array) for array in arrays])
        return cls(own.view(torch.int64), *rest)

    def count_right(self, tokens: torch.Tensor, newest: torch.Tensor, most: int) -> None:
        """Count the drafts that came true with `tokens` [samples], at most `most` of a request, and
        store the token after them in `newest` [places]."""
        from cairn.kernels.draft_rows import keep_newest

        keep_newest(tokens, newest, self.first, self.checked, self.places, self.right, most)

    def move(self, rows: RowInputs, further: int, page_size: int, *, by_right: bool) -> None:
        """Move the inputs of a recorded step on by so many drafts, and by those that came true."""
        from cairn.kernels.draft_rows import move_rows

        right = self.right if by_right else None
        move_rows(rows, self.seeds, self.room, right, further, page_size)

    @classmethod
    def rehearse(cls, newest: torch.Tensor, groups: int, page_size: int) -> None:
        """Launch the kernels of this class, for nobody. The last of `newest` is spare."""
        device, none = newest.device, np.zeros(1, dtype=np.int64)
        spare = none + len(newest) - 1
        own = cls.of(
            device, seeds=none.astype(np.uint64), first=none, checked=none, places=spare, room=none
        )
        own.count_right(newest, newest, 1)
        row = torch.zeros(4, dtype=torch.int32, device=device)
        pages = tuple(torch.zeros(groups, 4, dtype=torch.int32, device=device))
        tables = torch.zeros(groups, 1, 4, dtype=torch.int32, device=device)
        seeds = torch.zeros(2, dtype=torch.int64, device=device)
        rows = RowInputs(seeds, row, row, row, row, row, pages, row, tables)
        own.move(rows, 0, page_size, by_right=True)
