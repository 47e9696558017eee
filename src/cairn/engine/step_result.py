"""What comes out of a step."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch

from cairn.engine.logprobs import TokenLogprob
from cairn.engine.plan import Advance, StepPlan
from cairn.sparsity.selection import Selection


@dataclass(frozen=True, slots=True)
class StepResult:
    """The results of a step, by request id."""

    sampled: dict[str, Sequence[int]] = field(default_factory=dict)
    """For each request the token after its newest one, and after each draft."""
    guesses: dict[str, Sequence[int]] = field(default_factory=dict)
    """The drafts that the model made, for requests that have such."""
    logprobs: dict[str, list[TokenLogprob]] = field(default_factory=dict)
    """Likewise, of the sampled tokens."""
    prompt_logprobs: dict[str, list[TokenLogprob]] = field(default_factory=dict)
    distributions: dict[str, torch.Tensor] = field(default_factory=dict)
    """Log-probabilities [tokens of this step, vocab], float32 on the host."""
    hidden_sums: dict[str, torch.Tensor] = field(default_factory=dict)
    """Of the last layer's hidden states, over the tokens that are wanted, float32 on the host."""
    selections: dict[str, list[dict[int, Selection]]] = field(default_factory=dict)
    """For traced requests: the pages read to sample each token, by layer."""


@dataclass(frozen=True, slots=True)
class InFlight:
    """A launched step."""

    plan: StepPlan
    sampling: tuple[Advance, ...]
    tokens: torch.Tensor  # [samples + guesses] on the host, valid after `ready`
    ready: torch.cuda.Event | None
    result: StepResult  # without the tokens
