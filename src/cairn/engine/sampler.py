"""From logits to tokens, all rows at once.

Randomness is one number per token, made from the request's seed and the token's index alone, so a
request draws the same tokens whatever else is in its batch. Ties go to the lower id.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from cairn.engine.sampling_params import SamplingParams

_MASK = 2**64 - 1


@dataclass(frozen=True, slots=True)
class Draw:
    """One row to sample: the parameters, and the request's seed and token index."""

    params: SamplingParams
    seed: int
    index: int


def sample(logits: torch.Tensor, draws: Sequence[Draw]) -> torch.Tensor:
    """logits [rows, vocab] -> token ids [rows]"""
    tokens = logits.argmax(-1)
    # The way a row is sampled may depend on its own parameters only, never on its neighbours'.
    plain: list[int] = []
    filtered: list[int] = []
    for row, draw in enumerate(draws):
        if draw.params.temperature > 0:
            keeps_all = draw.params.top_k == -1 and draw.params.top_p == 1
            (plain if keeps_all else filtered).append(row)
    for rows, method in ((plain, _sample_plain), (filtered, _sample_filtered)):
        if rows:
            index = torch.tensor(rows, device=logits.device)
            tokens[index] = method(logits[index], [draws[row] for row in rows])
    return tokens


def _sample_plain(logits: torch.Tensor, draws: Sequence[Draw]) -> torch.Tensor:
    return _invert(_tempered(logits, draws).softmax(-1), draws)


def _sample_filtered(logits: torch.Tensor, draws: Sequence[Draw]) -> torch.Tensor:
    """Within the top_k most likely tokens, and of those within top_p."""
    vocab = logits.shape[-1]
    tempered, order = _tempered(logits, draws).sort(dim=-1, descending=True, stable=True)
    ranks = torch.arange(vocab, device=logits.device)[None, :]
    top_k = [draw.params.top_k if draw.params.top_k > 0 else vocab for draw in draws]
    top_p = _column([draw.params.top_p for draw in draws], tempered)
    beyond = ranks >= torch.tensor(top_k, device=logits.device)[:, None]
    probabilities = tempered.masked_fill(beyond, float("-inf")).softmax(-1)
    # A token stays while what is more likely has not reached top_p.
    before = probabilities.cumsum(-1) - probabilities
    outside = (before >= top_p) & (ranks > 0)
    choice = _invert(probabilities.masked_fill(outside, 0), draws)
    return order.gather(-1, choice[:, None]).squeeze(-1)


def _tempered(logits: torch.Tensor, draws: Sequence[Draw]) -> torch.Tensor:
    wide = logits.to(torch.promote_types(logits.dtype, torch.float32))
    # Subtracting the maximum first keeps tiny temperatures finite.
    shifted = wide - wide.amax(-1, keepdim=True)
    return shifted / _column([draw.params.temperature for draw in draws], shifted)


def _column(values: list[float], like: torch.Tensor) -> torch.Tensor:
    return torch.tensor(values, dtype=like.dtype, device=like.device)[:, None]


def _invert(weights: torch.Tensor, draws: Sequence[Draw]) -> torch.Tensor:
    """First index whose cumulative weight exceeds a uniform share of the total.

    Never one of weight zero.
    """
    uniform = _column([uniform_number(draw.seed, draw.index) for draw in draws], weights)
    cumulative = weights.cumsum(-1)
    target = uniform * cumulative[:, -1:]
    index = (cumulative <= target).sum(-1)
    # Rounding can put the target on the total: fall back to the last index with weight.
    last = weights.shape[-1] - 1 - (weights.flip(-1) > 0).to(torch.uint8).argmax(-1)
    return torch.minimum(index, last)


def uniform_number(seed: int, index: int) -> float:
    """A number in [0, 1) from (seed, index): splitmix64, 24 bits, exact in float32."""
    value = (_mix(seed & _MASK) + index * 0x9E3779B97F4A7C15) & _MASK
    return (_mix(value) >> 40) / 2**24


def _mix(value: int) -> int:
    value = (value + 0x9E3779B97F4A7C15) & _MASK
    value = ((value ^ (value >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    value = ((value ^ (value >> 27)) * 0x94D049BB133111EB) & _MASK
    return value ^ (value >> 31)
