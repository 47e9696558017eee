"""Loss and accuracy by kind of token. Each kind's loss is a mean of its own, so that a few lookups
weigh as much as thousands of words."""

from __future__ import annotations

from collections.abc import Mapping

import torch
import torch.nn.functional as F

from training.batches import Batch
from training.model import Decoder
from training.samples import Kind

KINDS = len(Kind)


class Tally:
    """Sums by kind, kept on the device until they are read."""

    def __init__(self, device: torch.device) -> None:
        self._sums = torch.zeros(3, KINDS, device=device)  # loss, right, count

    def add(self, losses: torch.Tensor, right: torch.Tensor, kinds: torch.Tensor) -> None:
        for row, values in enumerate((losses, right.float(), torch.ones_like(losses))):
            self._sums[row].index_add_(0, kinds, values)

    def read(self) -> dict[str, float]:
        """Means since the last call, of the kinds that occurred."""
        losses, right, count = self._sums.tolist()
        self._sums.zero_()
        found = {}
        for kind in Kind:
            if count[kind]:
                found[f"loss/{kind.name.lower()}"] = losses[kind] / count[kind]
                found[f"right/{kind.name.lower()}"] = right[kind] / count[kind]
        return found


def batch_loss(
    model: Decoder, batch: Batch, weights: Mapping[Kind, float], tally: Tally
) -> torch.Tensor:
    hidden = model(batch.tokens).flatten(0, 1)[batch.places]
    logits = model.logits(hidden).float()
    losses = F.cross_entropy(logits, batch.targets, reduction="none")
    device = losses.device
    sums = torch.zeros(KINDS, device=device).index_add(0, batch.kinds, losses)
    counts = torch.zeros(KINDS, device=device).index_add(0, batch.kinds, torch.ones_like(losses))
    weight = torch.tensor([weights.get(kind, 0.0) for kind in Kind], device=device)
    with torch.no_grad():
        tally.add(losses.detach(), logits.argmax(-1) == batch.targets, batch.kinds)
    return (weight * sums / counts.clamp(min=1)).sum()
