"""Page selection: the single definition that prefill, decode and every kernel follow."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, fields

import torch

from cairn.sparsity.policy import Strategy

_BLOCK = 4096  # pages scored at once; bounds memory and does not change the result


@dataclass(frozen=True, slots=True)
class Selection:
    """The pages that rows of a layer read, in ascending order, padded with -1 to k."""

    page_ids: torch.Tensor  # [rows, kv_heads, k]
    page_index: torch.Tensor  # [rows, kv_heads, k] place in the sequence
    scores: torch.Tensor  # [rows, heads, k] landmark scores, -inf for padding
    weights: torch.Tensor  # [rows, heads, k] share in the output
    window_lse: torch.Tensor  # [rows, heads]
    window_weight: torch.Tensor  # [rows, heads]

    @classmethod
    def window_only(cls, heads: int, kv_heads: int) -> Selection:
        """The selection of one row that read only its window."""
        pages = torch.empty(1, kv_heads, 0, dtype=torch.int64)
        none = torch.empty(1, heads, 0)
        return cls(pages, pages, none, none, torch.zeros(1, heads), torch.ones(1, heads))

    def row(self, index: int) -> Selection:
        """The selection of one row, on the host."""
        parts = (getattr(self, part.name)[index : index + 1].cpu() for part in fields(self))
        return Selection(*parts)


def select(
    score: Callable[[int, int], torch.Tensor],
    limits: torch.Tensor,
    num_pages: int,
    window_lse: torch.Tensor,
    *,
    kv_heads: int,
    topk: int,
    strategy: Strategy,
    sinks: int = 0,
    top_p: float | None = None,
    block: int = _BLOCK,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Select the best `topk` pages of each row and kv head. Ties go to the earlier page.

    With `top_p` a row takes no further page once every head of the group has this share of its
    attention, as the scores estimate it, in the window and the better pages. Sinks always stay.

    score(begin, end) returns [rows, heads, end - begin], -inf for pages that must not be read.
    Pages below limits [rows] are candidates. window_lse is [rows, heads]. num_pages is at least 1
    and at least the largest limit.

    Returns the places in the sequence [rows, kv_heads, k], ascending and padded with -1, and the
    scores [rows, heads, k], padded with -inf. Pages are scored in blocks, which affects only the
    rounding of the normalizer.
    """
    blocks = [(begin, min(begin + block, num_pages)) for begin in range(0, num_pages, block)]
    group = window_lse.shape[1] // kv_heads
    kept: torch.Tensor | None = None

    def masked(begin: int, end: int) -> torch.Tensor:
        pages = torch.arange(begin, end, device=limits.device)
        beyond = pages >= limits[:, None]  # [rows, pages]
        return score(begin, end).masked_fill(beyond[:, None], float("-inf"))

    normalizer = None
    if top_p is not None or (strategy == "softmax_head" and group > 1):
        # Compare pages by their share of each head's whole attention.
        normalizer = window_lse
        for begin, end in blocks:
            kept = masked(begin, end)
            normalizer = torch.logaddexp(normalizer, kept.logsumexp(-1))
    rows, heads = window_lse.shape
    index = limits.new_empty(rows, kv_heads, 0)
    best = window_lse.new_empty(rows, kv_heads, 0)
    chosen = window_lse.new_empty(rows, heads, 0)
    for begin, end in blocks:
        scores = kept if kept is not None and len(blocks) == 1 else masked(begin, end)
        shares = scores
        if normalizer is not None and strategy == "softmax_head" and group > 1:
            shares = scores - normalizer[..., None]
        grouped = shares.view(rows, kv_heads, group, end - begin)
        ranks = grouped.sum(2) if strategy == "group" else grouped.amax(2)  # [rows, kv_heads, n]
        if begin < sinks:
            first = ranks[..., : sinks - begin]
            first.masked_fill_(first > float("-inf"), float("inf"))
        found = torch.arange(begin, end, device=limits.device).expand(ranks.shape)
        # The best pages so far are earlier ones. They come first, so that they win ties.
        found, ranks = torch.cat((index, found), -1), torch.cat((best, ranks), -1)
        scores = torch.cat((chosen, scores), -1)
        place = top_positions(ranks, topk)
        index, best = _gather(found, place, -1), _gather(ranks, place, float("-inf"))
        chosen = _gather(scores, place.repeat_interleave(group, 1), float("-inf"))
    if top_p is None:
        return index, chosen
    assert normalizer is not None
    enough = _enough(best, chosen, window_lse, normalizer, top_p)
    enough &= (index >= sinks) | (index < 0)
    return _ascending(index, chosen, ~enough & (index >= 0))


def _enough(
    best: torch.Tensor,
    chosen: torch.Tensor,
    window_lse: torch.Tensor,
    normalizer: torch.Tensor,
    top_p: float,
) -> torch.Tensor:
    """Whether the window and the better pages already hold `top_p`, for pages [rows, kv_heads, k]
    with ranks `best` and scores `chosen` [rows, heads, k]."""
    order = best.sort(dim=-1, descending=True, stable=True).indices
    group = chosen.shape[1] // best.shape[1]
    shares = (chosen - normalizer[..., None]).exp()
    ranked = shares.gather(-1, order.repeat_interleave(group, 1))
    window = (window_lse - normalizer).exp()[..., None]
    held = window + ranked.cumsum(-1) - ranked  # before each page
    every = torch.unflatten(held >= top_p, 1, (-1, group)).all(2)
    return torch.zeros_like(every).scatter(-1, order, every)


def _ascending(
    index: torch.Tensor, chosen: torch.Tensor, keep: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """The pages to keep, ascending and padded, and their scores."""
    order = (~keep).to(torch.int8).sort(dim=-1, stable=True).indices
    kept = keep.gather(-1, order)
    group = chosen.shape[1] // index.shape[1]
    scores = chosen.gather(-1, order.repeat_interleave(group, 1))
    scores = scores.masked_fill(~kept.repeat_interleave(group, 1), float("-inf"))
    return index.gather(-1, order).masked_fill(~kept, -1), scores


def top_positions(ranks: torch.Tensor, k: int) -> torch.Tensor:
    """Positions of the k largest ranks above -inf, ascending and padded with -1.

    Of equal ranks the earlier position wins, which torch.topk does not guarantee.
    """
    n = ranks.shape[-1]
    keep = _largest(ranks, min(k, n))
    # Earlier positions get larger keys, so that topk returns ascending positions, then padding.
    keys = torch.where(keep, torch.arange(n, 0, -1, device=ranks.device), 0)
    keys = keys.topk(min(k, n), dim=-1).values
    places = torch.where(keys > 0, n - keys, -1)
    if k > n:
        places = torch.cat((places, places.new_full((*places.shape[:-1], k - n), -1)), -1)
    return places


def top_rows(scores: torch.Tensor, k: int) -> torch.Tensor:
    """Positions of the k largest of scores [rows, n], ascending, [rows, k]. At least k of each row
    are above -inf. Of equal scores the earlier position wins.

    NaN is the lowest score. A step that was launched behind one that failed may read rows that were
    never written; its result is dropped.
    """
    lowest = torch.finfo(scores.dtype).min
    scores = scores.nan_to_num(lowest, posinf=float("inf"), neginf=float("-inf"))
    if scores.device.type != "cpu":
        return top_positions(scores, k)  # `nonzero` would wait for the device
    return _largest(scores, k).nonzero()[:, 1].view(len(scores), k)


def _largest(ranks: torch.Tensor, k: int) -> torch.Tensor:
    """Whether each rank is one of the k largest along the last dimension, and above -inf."""
    least = ranks.topk(k, dim=-1).values[..., -1:]
    above = ranks > least
    equal = (ranks == least) & (ranks > float("-inf"))
    room = k - above.sum(-1, keepdim=True)
    return above | (equal & (equal.cumsum(-1) <= room))


def _gather(values: torch.Tensor, places: torch.Tensor, missing: float) -> torch.Tensor:
    """The values at `places` along the last dimension; `missing` where the place is -1."""
    return values.gather(-1, places.clamp(min=0)).masked_fill(places < 0, missing)
