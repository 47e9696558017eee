"""A request: its tokens, its parameters and its progress."""

from __future__ import annotations

import functools
import operator
from array import array
from collections.abc import Callable, Hashable
from dataclasses import dataclass, field
from enum import Enum, auto
from typing import Literal

import torch

from cairn.engine.logprobs import TokenLogprob
from cairn.engine.plan import Allowed, PromptScores
from cairn.engine.sampling_params import SamplingParams
from cairn.memory.cache import SequencePages
from cairn.memory.radix import PrefixMatch
from cairn.sparsity.selection import Selection

FinishReason = Literal["stop", "length", "abort"]


class State(Enum):
    WAITING = auto()
    RUNNING = auto()
    FINISHED = auto()


@dataclass(slots=True)
class RequestTimes:
    """Seconds on the engine's clock; 0 where the event has not happened."""

    arrival: float = 0.0
    first_scheduled: float = 0.0
    first_token: float = 0.0
    finished: float = 0.0


@dataclass(slots=True, eq=False)
class Request:
    id: str
    token_ids: array[int]  # int64: prompt, then output
    params: SamplingParams
    seed: int
    max_total_tokens: int
    """Limit on prompt and output together; the request ends with "length" when it reaches it."""
    stop_token_ids: frozenset[int] = frozenset()
    namespace: Hashable = None
    """Requests share cached prefixes only within a namespace."""
    prompt_scores: PromptScores = "none"
    """With scores the whole prompt is computed, even if it is cached. Those in
    `ONLY_PROMPT` generate nothing."""
    host_tokens: bool = False
    """Each step needs the previous token on the host, so this request's steps do not overlap."""
    allowed_tokens: Callable[[int], Allowed | None] | None = None
    """Takes the number of output tokens. Returns which tokens may follow them, and drafts to check;
    None if that is not known yet, and the request has to wait. Needs `host_tokens`."""
    shares_tokens: bool = False
    """`token_ids` are also those of other choices of the prompt, and are copied before it runs."""
    traced: bool = False
    """Record which pages were read for each generated token."""
    dense: bool = False
    """Read every page for generated tokens too, as for the prompt."""
    choice: int = 0
    """Index among the choices of its prompt."""

    # set by the scheduler
    state: State = State.WAITING
    computed: int = 0
    pending: int = 0
    """1 while a step is in flight that samples the next token, else 0. If it checks drafts, it may
    bring several. A step that was planned meanwhile, for one, is then in vain."""
    checking: bool = False
    """The step in flight checks drafts."""
    reached: int = 0
    """Number of tokens whose rows were launched, kept or not."""
    match: PrefixMatch | None = None
    """While it waits: the part of its tokens that was cached when it was last looked up."""
    pages: SequencePages | None = None
    slot: int = -1
    planned_pages: int = 0  # length of the page tables in the last plan
    planned_live: list[int] = field(default_factory=list)  # SequencePages.live_from in it
    cached_tokens: int = 0
    retractions: int = 0
    finish_reason: FinishReason | None = None
    stopped_by_token: bool = False
    drafted_tokens: int = 0  # drafts that were checked
    accepted_tokens: int = 0  # and came true
    all_right: bool = False  # all drafts of the last check came true
    misses: int = 0  # checks in a row of which no draft came true
    rest: int = 0  # tokens of the last pause without drafts
    rests_until: int = 0  # no drafts before this many tokens are known
    left_out: bool = False
    """The model drafted behind the last step, but not for this request."""
    times: RequestTimes = field(default_factory=RequestTimes)
    # set by the engine
    logprobs: list[TokenLogprob] = field(default_factory=list)  # one per output token, if requested
    prompt_logprobs: list[TokenLogprob] = field(default_factory=list)  # from the second token on
    distributions: list[torch.Tensor] = field(default_factory=list)  # for "whole" prompt scores
    hidden_sums: list[torch.Tensor] = field(default_factory=list)
    """For "mean" and "last": float32 [hidden size], one for each step that computed the prompt."""
    selections: list[dict[int, Selection]] = field(default_factory=list)
    """By layer, one entry per output token, if traced."""
    # fixed at creation
    prompt_len: int = field(init=False)
    end_len: int = field(init=False)
    """Length of prompt and output at which the request ends with "length"."""

    def __post_init__(self) -> None:
        self.prompt_len = len(self.token_ids)
        self.end_len = min(self.prompt_len + self.params.max_tokens, self.max_total_tokens)

    def embedding(self) -> torch.Tensor:
        """float32 [hidden size] of length 1, from "mean" or "last" when the prompt is computed. The
        direction of a mean is that of the sum."""
        total = functools.reduce(operator.add, self.hidden_sums)
        length: torch.Tensor = total.norm()
        return total / length.clamp(min=1e-12)

    @property
    def num_tokens(self) -> int:
        """Number of tokens, including one that is being sampled."""
        return len(self.token_ids) + self.pending

    @property
    def remaining(self) -> int:
        """Number of tokens whose KV is not computed yet."""
        return len(self.token_ids) + self.pending - self.computed

    @property
    def waits_for_mask(self) -> bool:
        return self.allowed_tokens is not None and self.allowed_tokens(self.num_output) is None

    @property
    def can_advance(self) -> bool:
        """Whether the next step can compute tokens of this request.

        A token that the step in flight is sampling can be computed too, unless the request has
        `host_tokens`, or the token is its last one: the KV of the last token is never computed. If
        that step checks drafts, this one may be in vain, and penalties would count its token twice.
        """
        if self.allowed_tokens is not None and self.waits_for_mask:
            return False
        known = len(self.token_ids)
        if not self.pending:
            return known > self.computed
        waits = self.host_tokens or (self.checking and self.params.has_penalties)
        return not waits and self.computed <= known < self.end_len - 1

    @property
    def output_ids(self) -> list[int]:
        return self.token_ids[self.prompt_len :].tolist()

    @property
    def num_output(self) -> int:
        return len(self.token_ids) - self.prompt_len
