"""The plan of one step: the scheduler makes it, the runner carries it out.

A plan is a plain value with everything the runner needs: tokens, table edits, and the sampling
parameters of new requests. It can be compared in a test, logged, or sent to another process.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal, NamedTuple

from cairn.engine.sampling_params import SamplingParams
from cairn.memory.copies import CopyEdits

PromptScores = Literal["none", "top", "whole", "mean", "last"]
"""What to return of the prompt: nothing; log-probabilities of its tokens and the top ones; the
whole distribution; or the last layer's hidden states: their mean, or that of the last token."""

ONLY_PROMPT: frozenset[PromptScores] = frozenset({"whole", "mean", "last"})
"""Requests with these generate nothing."""


UNKNOWN = -1
"""Stands for a token that only the device knows: the newest one of its slot, or a draft that the
model makes in the same step."""


class Allowed(NamedTuple):
    """The tokens that may follow a request's output, as bit masks, lowest bit first."""

    masks: tuple[bytes, ...]
    """Of the next token, and of the token after each of `drafts`."""
    drafts: tuple[int, ...] = ()
    """Drafts that are allowed, each after those before it."""


class TableEdit(NamedTuple):
    """Page ids to write into a slot's page table, starting at entry `first`."""

    group: int
    slot: int
    first: int
    page_ids: tuple[int, ...]
    generations: tuple[int, ...]  # of each page


class Admission(NamedTuple):
    """A request that takes a slot, with its sampling parameters."""

    slot: int
    params: SamplingParams
    seed: int
    stop_token_ids: frozenset[int]
    prompt_ids: tuple[int, ...]  # like output_ids, empty unless penalties need it
    output_ids: tuple[int, ...]


class Advance(NamedTuple):
    """One request computes its tokens [start, stop) in this step."""

    request_id: str
    slot: int
    start: int
    stop: int
    token_ids: array[int]
    """Tokens [start, stop), with UNKNOWN for one that the previous step is still sampling, and for
    the drafts that the model makes."""
    prompt_len: int
    samples: int
    """The step samples the token after each of its last `samples` tokens. 0 if it does not reach
    the newest token, 1 if it does, and one more for each drafted token behind that one."""
    prompt_scores: PromptScores = "none"
    next_ids: tuple[int, ...] = ()
    """The prompt token that follows each row, for "top" scores."""
    traced: bool = False
    """Report which pages were read to sample the token."""
    dense: bool = False
    """All rows of the request attend as rows of a prompt do: densely."""
    allowed: tuple[bytes, ...] = ()
    """For each sampled token, a bit mask of those that may be sampled, lowest bit first; empty if
    all may."""
    attempt: int = 0
    """Number of times the request had been retracted when the plan was made."""
    guesses: int = 0
    """Number of drafted tokens that the model makes itself, before the step checks them."""
    reached: int = 0
    """Number of tokens that earlier steps computed, if more than `start`. Those from `start` on
    were not kept."""
    guess: int = 0
    """For the part of a step that drafts: which draft it makes, from 1. What it computes is not
    kept."""
    room: int = 0
    """If the model may draft after this step: number of tokens that the request has pages for, and
    may reach with drafts."""

    @property
    def drafted(self) -> int:
        """Number of drafted tokens that the step checks."""
        return max(0, self.samples - 1)

    def guessing(self, guess: int, start: int, newest: int) -> Advance:
        """The part of a step in which the model makes this draft, from 1, if `newest` is the token
        at `start`."""
        start += guess - 1
        return self._replace(
            start=start,
            stop=start + 1,
            token_ids=array("q", [newest if guess == 1 else UNKNOWN]),
            samples=1,
            traced=False,
            dense=False,
            allowed=(),
            guesses=0,
            reached=0,
            guess=guess,
        )


@dataclass(frozen=True, slots=True)
class StepPlan:
    advances: tuple[Advance, ...] = ()
    admissions: tuple[Admission, ...] = ()
    """Applied before anything else."""
    edits: tuple[TableEdit, ...] = ()
    """Applied before the step's first row is computed."""
    retracted: tuple[str, ...] = ()
    copies: CopyEdits = field(default_factory=CopyEdits)
    """Changes of the pages' frames that take effect when this step begins."""
    rows: int = 0
    """Rows of the step. Like `pairs`, complete only if there is a limit on a step's time."""
    pairs: int = 0
    """(row, key) pairs that attention scores."""
    drafted: int = 0
    """Drafted tokens that the step checks, of all requests."""
    awaited: bool = False
    """Many drafts will probably come true, so the next step is planned when it is known which."""
    ahead: int = 0
    """When it is known, the model first drafts so many tokens more for each request with `room`,
    and the next step is planned meanwhile."""

    @property
    def num_tokens(self) -> int:
        return sum(advance.stop - advance.start for advance in self.advances)

    @property
    def only_decodes(self) -> bool:
        """Every request computes one token, and the drafted ones behind it."""
        return all(own.stop - own.start == 1 + own.drafted for own in self.advances)

    @property
    def has_prefill(self) -> bool:
        """A request computes rows of its prompt, or computes again what a retraction cost it."""
        prompt_rows = any(own.start < own.prompt_len for own in self.advances)
        return prompt_rows or not self.only_decodes

    def __bool__(self) -> bool:
        return bool(self.advances)


def right_drafts(sampled: Sequence[int], drafts: Sequence[int]) -> int:
    """How many drafts came true: those before the first that was not sampled in its place."""
    right = 0
    for draft in drafts:
        if sampled[right] != draft:
            break
        right += 1
    return right
