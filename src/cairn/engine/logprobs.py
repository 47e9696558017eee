"""Log-probabilities of chosen tokens and of the most likely ones, from the raw logits."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:  # the server imports TokenLogprob and must not load torch
    import torch

_BLOCK = 256  # rows at a time: all rows of a long prompt would take too much memory


@dataclass(frozen=True, slots=True)
class TokenLogprob:
    token_id: int
    logprob: float
    top: tuple[tuple[int, float], ...] = ()
    """The most likely (token id, log-probability) pairs, most likely first."""


def token_logprobs(
    logits: torch.Tensor, tokens: torch.Tensor, most: Sequence[int]
) -> list[TokenLogprob]:
    """Log-probabilities of `tokens` [rows] under `logits` [rows, vocab].

    `most` is the number of top entries for each row.
    """
    result: list[TokenLogprob] = []
    for begin in range(0, len(most), _BLOCK):
        rows = slice(begin, begin + _BLOCK)
        result += _block(logits[rows], tokens[rows], most[rows])
    return result


def _block(logits: torch.Tensor, tokens: torch.Tensor, most: Sequence[int]) -> list[TokenLogprob]:
    wide = logits if logits.dtype.itemsize >= 4 else logits.float()
    logprobs = wide.log_softmax(-1)
    chosen = logprobs.gather(-1, tokens[:, None])[:, 0].tolist()
    values, ids = _top(logprobs, max(most))
    return [
        TokenLogprob(token, logprob, tuple(zip(row_ids[:k], row_values[:k], strict=True)))
        for token, logprob, k, row_ids, row_values in zip(
            tokens.tolist(), chosen, most, ids.tolist(), values.tolist(), strict=True
        )
    ]


def _top(logprobs: torch.Tensor, k: int) -> tuple[torch.Tensor, torch.Tensor]:
    """The k largest of each row. Ties go to the lower id, which `topk` does not guarantee."""
    vocab = logprobs.shape[-1]
    k = min(k, vocab)
    values, ids = logprobs.topk(min(k + 1, vocab), dim=-1)
    if k and bool((values[:, 1:] == values[:, :-1]).any()):
        values, ids = logprobs.sort(dim=-1, descending=True, stable=True)
    return values[:, :k], ids[:, :k]
