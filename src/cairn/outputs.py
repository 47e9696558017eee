"""What `LLM` and `AsyncLLM` return."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import NamedTuple

from cairn.engine.logprobs import TokenLogprob
from cairn.engine.request import FinishReason, Request
from cairn.trace import Trace


@dataclass(frozen=True, slots=True)
class Usage:
    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int
    """Prompt tokens whose KV was found in the prefix cache."""
    drafted_tokens: int = 0
    """Drafted tokens that were checked."""
    accepted_tokens: int = 0
    """Drafted tokens that were right, which are part of the completion."""

    @property
    def total_tokens(self) -> int:
        return self.prompt_tokens + self.completion_tokens


@dataclass(frozen=True, slots=True)
class Timings:
    """Seconds since the request was submitted, None for what did not happen."""

    queued: float | None
    first_token: float | None
    total: float


@dataclass(frozen=True, slots=True)
class Generation:
    """A finished request."""

    request_id: str
    text: str | None
    """None without a tokenizer. Stop strings and stop tokens are not part of it."""
    token_ids: list[int]
    """All generated ids, the one that ended the text included."""
    finish_reason: FinishReason
    usage: Usage
    timings: Timings
    logprobs: list[TokenLogprob] | None = None
    """One entry per generated token, if asked for."""
    prompt_logprobs: list[TokenLogprob | None] | None = None
    """One entry per prompt token, if asked for; None for the first one."""
    trace: Trace | None = None
    """Which pages each generated token was read from, if asked for."""
    alternatives: tuple[Generation, ...] = ()
    """The other n - 1 answers to the same prompt."""

    def with_alternatives(self, others: Iterable[Generation]) -> Generation:
        return replace(self, alternatives=tuple(others))


class Chunk(NamedTuple):
    """A piece of a stream. The last one of each choice has a finish reason and its result."""

    request_id: str
    text: str
    token_ids: list[int]
    logprobs: tuple[TokenLogprob, ...] = ()
    choice: int = 0
    finish_reason: FinishReason | None = None
    result: Generation | None = None


def summarize(
    request: Request, text: str | None, reason: FinishReason, trace: Trace | None = None
) -> Generation:
    times = request.times

    def since_arrival(moment: float) -> float | None:
        return moment - times.arrival if moment else None

    return Generation(
        request_id=request.id,
        text=text,
        token_ids=request.output_ids,
        finish_reason=reason,
        usage=Usage(
            request.prompt_len,
            request.num_output,
            request.cached_tokens,
            request.drafted_tokens,
            request.accepted_tokens,
        ),
        timings=Timings(
            queued=since_arrival(times.first_scheduled),
            first_token=since_arrival(times.first_token),
            total=times.finished - times.arrival,
        ),
        logprobs=None if request.params.logprobs is None else list(request.logprobs),
        prompt_logprobs=[None, *request.prompt_logprobs]
        if request.prompt_scores == "top"
        else None,
        trace=trace,
    )
