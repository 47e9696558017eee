"""What one step does, as a value: the scheduler makes it, the runner carries it out.

A plan holds everything the runner needs (tokens, table edits, sampling parameters of those who
join), so it can be compared in a test, logged, or sent to another process.
"""

from __future__ import annotations

from array import array
from dataclasses import dataclass, field
from typing import Literal, NamedTuple

from cairn.engine.sampling_params import SamplingParams
from cairn.memory.copies import CopyEdits

PromptScores = Literal["none", "top", "whole"]
"""Log-probabilities of the prompt: none, those of its tokens and the top ones, or all."""


class TableEdit(NamedTuple):
    """Page ids to write into a slot's page table, starting at entry `first`."""

    group: int
    slot: int
    first: int
    page_ids: tuple[int, ...]
    generations: tuple[int, ...]  # the life each page is in


class Admission(NamedTuple):
    """A request takes a slot: how it is sampled from now on."""

    slot: int
    params: SamplingParams
    seed: int
    stop_token_ids: frozenset[int]
    prompt_ids: tuple[int, ...]  # this and the next are empty unless penalties need them
    output_ids: tuple[int, ...]


class Advance(NamedTuple):
    """One request computes its tokens [start, stop) in this step."""

    request_id: str
    slot: int
    start: int
    stop: int
    token_ids: array[int]
    """Tokens start..stop, but for the last where the step before this one is still sampling it."""
    prompt_len: int
    samples: bool
    """The last token is the newest known one: sample what follows it."""
    prompt_scores: PromptScores = "none"
    next_ids: tuple[int, ...] = ()
    """The prompt tokens that follow each row, for scores of the "top" kind."""
    traced: bool = False
    """Report which pages the sampled token was read from."""
    allowed: bytes | None = None
    """Tokens that may be sampled, a bit each, the lowest first; None for all."""
    attempt: int = 0
    """How often the request had been retracted before."""


@dataclass(frozen=True, slots=True)
class StepPlan:
    advances: tuple[Advance, ...] = ()
    admissions: tuple[Admission, ...] = ()
    """Carried out before anything else."""
    edits: tuple[TableEdit, ...] = ()
    """Applied before the step's first row is computed."""
    retracted: tuple[str, ...] = ()
    copies: CopyEdits = field(default_factory=CopyEdits)
    """Where pages are on the device, from the head of this step on."""

    @property
    def num_tokens(self) -> int:
        return sum(advance.stop - advance.start for advance in self.advances)

    def __bool__(self) -> bool:
        return bool(self.advances)
