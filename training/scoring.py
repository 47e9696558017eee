"""Held-out questions, asked in the training form. An answer is right if each of its tokens is the
most likely one after the true tokens before it. Greedy generation would then write that answer."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch

from training.batches import collate
from training.model import Decoder
from training.samples import Kind
from training.tasks import Mixture, World, make_sample

SINGLE = Mixture(fill=(1.0, 1.0), few=1.0, few_limit=1, restated=0.0, at_end=1.0)
QUIZ = Mixture(fill=(1.0, 1.0), few=1.0, absent=0.3, silent=0.1, restated=0.0, at_end=1.0)


@dataclass(frozen=True, slots=True)
class Score:
    """Shares of answers that are right, and how many were asked."""

    known: float
    value: float
    """Share of known answers whose value is right, given the right words before it."""
    unknown: float
    asked: int

    def __str__(self) -> str:
        return (
            f"known {self.known:.3f} (value {self.value:.3f}), unknown {self.unknown:.3f}, "
            f"{self.asked} asked"
        )


@torch.no_grad()
def score(
    model: Decoder,
    world: World,
    length: int,
    *,
    samples: int,
    batch: int,
    seed: int,
    mixture: Mixture = QUIZ,
    block: int = 1024,
) -> Score:
    """`block` queries at a time, so that long samples fit."""
    device = next(model.parameters()).device
    rng = np.random.default_rng((seed, length))
    whole: list[torch.Tensor] = []
    values: list[torch.Tensor] = []
    absent: list[torch.Tensor] = []
    for start in range(0, samples, batch):
        count = min(batch, samples - start)
        part = collate([make_sample(rng, world, mixture, length) for _ in range(count)]).to(device)
        hidden = model(part.tokens, block=block).flatten(0, 1)[part.places]
        right = model.logits(hidden).argmax(-1) == part.targets
        in_answer = part.answers >= 0
        answer, kind, right = part.answers[in_answer], part.kinds[in_answer], right[in_answer]
        total = int(answer.max()) + 1 if len(answer) else 0
        wrong = torch.zeros(2, total, device=device)
        value = (kind == Kind.FIRST) | (kind == Kind.REST)
        wrong[0].index_add_(0, answer, (~right).float())
        wrong[1].index_add_(0, answer, (~right & value).float())
        says_unknown = torch.zeros(total, device=device, dtype=torch.bool)
        says_unknown[answer[kind == Kind.ABSENT]] = True
        whole.append((wrong[0] == 0).cpu())
        values.append((wrong[1] == 0).cpu())
        absent.append(says_unknown.cpu())
    right, value, unknown = torch.cat(whole), torch.cat(values), torch.cat(absent)
    return Score(
        known=_mean(right[~unknown]),
        value=_mean(value[~unknown]),
        unknown=_mean(right[unknown]),
        asked=len(right),
    )


def _mean(flags: torch.Tensor) -> float:
    return float(flags.float().mean()) if len(flags) else float("nan")
