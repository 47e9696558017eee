"""The limits of a scheduler, and whether they leave room for another request."""

from __future__ import annotations

from dataclasses import dataclass

from cairn.engine.request import Request
from cairn.memory.cache import PagedCache
from cairn.memory.radix import PrefixMatch


@dataclass(frozen=True, slots=True)
class Limits:
    chunked_prefill_size: int
    """Rows per step that running requests and prefill share."""
    max_running_requests: int
    max_queued_requests: int
    max_step_seconds: float | None = None
    reserved_output: int = 0
    """Output tokens that there must be room for to admit a request; its max_tokens if smaller."""
    cuts_at_prompt: bool = False
    """A chunk never has rows of both the prompt and the output."""


def fits(
    cache: PagedCache, limits: Limits, request: Request, match: PrefixMatch, promised: list[int]
) -> bool:
    """Whether there is room for the request's known tokens, the next token and the reserved output,
    in addition to the pages of each group that are promised to running requests.

    Admission with less room would only lead to retractions.
    """
    for g in range(len(cache.groups)):
        peak = _peak_pages(cache, limits, request, g, limits.chunked_prefill_size)
        if peak - cache.held_by(match, g) + promised[g] > cache.available_after(match, g):
            return False
    return True


def outstanding_pages(cache: PagedCache, limits: Limits, request: Request, group: int) -> int:
    """Number of pages that a running request still needs of those it was admitted with."""
    pages = request.pages
    assert pages is not None
    held = pages.num_pages - pages.live_from[group]
    # A decoding request takes one page at a time.
    chunk = limits.chunked_prefill_size if request.remaining > 1 else 1
    return max(0, _peak_pages(cache, limits, request, group, chunk) - held)


def _peak_pages(cache: PagedCache, limits: Limits, request: Request, group: int, chunk: int) -> int:
    output = min(request.params.max_tokens, limits.reserved_output)
    tokens = max(request.num_tokens + 1, request.prompt_len + output)
    tokens = min(tokens, request.max_total_tokens)
    return cache.groups[group].peak_pages(tokens, chunk, cache.geometry)
