"""HiLS attention of whole sequences, differentiable, computed over all pairs of rows.

A query gives each chunk it reads a share of its attention, and the window, which consists of whole
chunks, another share. Inside a chunk, or inside the window, attention is a plain softmax. So with z
the scores of all pairs,

    out_i = sum_j exp(z_ij + shift_ic) v_j,    c the chunk of j,

where shift_ic is the log of the share minus the log-sum-exp of that chunk or window. Only the
shifts have to be found. Rows are tokens and landmark rows; their number is a multiple of the chunk
size.
"""

from __future__ import annotations

import math

import torch

_MASKED = -1e30  # in place of minus infinity, whose differences and gradients would be NaN


def first_window_chunk(rows: torch.Tensor, window: int, chunk: int) -> torch.Tensor:
    """The chunk where each row's window begins; all chunks before it can be selected."""
    return torch.div(rows - window + 1, chunk, rounding_mode="floor").clamp(min=0)


def landmarks(
    prior: torch.Tensor, keys: torch.Tensor, chunk: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """The landmark of every chunk: the mean of its keys under the attention of its landmark row,
    [batch, heads, chunks, dim], and the entropy of that attention, [batch, heads, chunks]. `prior`
    [batch, heads, rows, dim] are the queries that weigh the keys.
    """
    pages = torch.unflatten(keys, 2, (-1, chunk))[
        :, :, :, :-1
    ]  # [batch, heads, chunks, chunk - 1, dim]
    queries = prior[:, :, chunk - 1 :: chunk]
    logits = torch.einsum("bhcd,bhcsd->bhcs", queries, pages) * keys.shape[-1] ** -0.5
    log_weights = logits.log_softmax(-1)
    weights = log_weights.exp()
    return torch.einsum("bhcs,bhcsd->bhcd", weights, pages), -(weights * log_weights).sum(-1)


def choose(
    scores: torch.Tensor, window_mass: torch.Tensor, eligible: torch.Tensor, group: int, top_k: int
) -> torch.Tensor:
    """Which chunks each row reads: bool [batch, heads, rows, chunks].

    The query heads of a group choose together, by the largest share that a chunk has for any."""
    if top_k >= eligible.shape[-1]:
        return eligible.expand_as(scores)
    total = torch.logaddexp(window_mass, scores.logsumexp(-1))
    share = torch.unflatten(scores - total[..., None], 1, (-1, group)).amax(2)
    best = share.masked_fill(~eligible, -math.inf).topk(top_k, -1).indices
    chosen = torch.zeros_like(share, dtype=torch.bool).scatter(-1, best, True) & eligible
    return chosen.repeat_interleave(group, 1)


def rival_scores(scoring: torch.Tensor, summary: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
    """How each row scores the chunks of the batch's other texts; its own are masked.
    -> [batch, heads, queries, batch * chunks]"""
    vectors, entropy = (t.transpose(0, 1).flatten(1, 2) for t in summary)
    scores = (scoring @ vectors.transpose(-1, -2)) * scoring.shape[-1] ** -0.5
    scores = scores + entropy[:, None]
    own = torch.eye(len(scoring), dtype=torch.bool, device=scoring.device)
    own = own.repeat_interleave(summary[1].shape[-1], 1)
    masked: torch.Tensor = scores.masked_fill(own[:, None, None], _MASKED)
    return masked


def attend(
    query: torch.Tensor,
    scoring: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    summary: tuple[torch.Tensor, torch.Tensor],
    rows: torch.Tensor,
    window_chunk: torch.Tensor,
    chunk: int,
    group: int,
    top_k: int,
    read_all: torch.Tensor,
    rivals_ahead: torch.Tensor | None = None,
) -> torch.Tensor:
    """Attention of some rows of a sequence.

    query, scoring [batch, heads, queries, dim]; keys, values [batch, heads, all rows, dim]; summary
    are the landmarks of `keys`. Where `read_all` is true every chunk is read, so that the scores of
    all chunks are trained. With `rivals_ahead` chunks of the batch's other texts compete, with
    scores raised by that much. A rival that is selected takes a place and its share of attention,
    and contributes nothing, as irrelevant chunks of a far longer text do.
    """
    scale = query.shape[-1] ** -0.5
    chunks = keys.shape[2] // chunk
    row = torch.arange(keys.shape[2], device=keys.device).view(chunks, chunk)
    number = torch.arange(chunks, device=keys.device)
    # No row sees a landmark row. [queries, chunks, chunk]
    seen = (row <= rows[:, None, None]) & (row % chunk != chunk - 1)
    eligible = number < window_chunk[:, None]  # [queries, chunks]
    z = torch.unflatten(query @ keys.transpose(-1, -2), -1, (chunks, chunk)) * scale
    z = z.masked_fill(~seen, _MASKED)
    mass = z.logsumexp(-1)  # [batch, heads, queries, chunks]
    window_mass = mass.masked_fill(eligible, _MASKED).logsumexp(-1)
    vectors, entropy = summary
    scores = (scoring @ vectors.transpose(-1, -2)) * scale + entropy[:, :, None]
    scores = scores.masked_fill(~eligible, _MASKED)
    competing, candidates = scores, eligible
    if rivals_ahead is not None:
        theirs = rival_scores(scoring, summary) + rivals_ahead
        competing = torch.cat((scores, theirs), -1)
        candidates = competing[:, :1] > _MASKED / 2  # the same for all heads
    with torch.no_grad():
        chosen = choose(competing, window_mass, candidates, group, top_k)
        chosen = chosen | (candidates & read_all)
    competing = competing.masked_fill(~chosen, _MASKED)
    # The null entry of the softmax has logit 0 and takes its share away from all others.
    total = torch.logaddexp(competing.logsumexp(-1), window_mass)
    total = torch.logaddexp(total, torch.zeros_like(total))
    scores = competing[..., :chunks]
    remote = scores - mass  # far below zero where nothing was chosen
    shift = torch.where(eligible, remote, torch.zeros_like(remote)) - total[..., None]
    weights = torch.exp(z + shift[..., None])
    return weights.flatten(-2).to(values.dtype) @ values
