"""Muon for matrices, AdamW for the rest. Lookups are learnt far sooner than with AdamW alone."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch

from training.model import Decoder

_NEWTON_SCHULZ = (3.4445, -4.7750, 2.0315)  # a quintic that drives singular values towards 1
_ROUNDS = 5


class Muon(torch.optim.Optimizer):
    """Steps along the orthogonal factor of the momentum. Matrices of one shape go together.

    Steps have the size of AdamW's, so that one learning rate serves both."""

    def __init__(
        self, params: Iterable[torch.nn.Parameter], lr: float, weight_decay: float
    ) -> None:
        shapes: dict[torch.Size, list[torch.nn.Parameter]] = {}
        for parameter in params:
            shapes.setdefault(parameter.shape, []).append(parameter)
        groups = [{"params": same} for same in shapes.values()]
        super().__init__(groups, {"lr": lr, "weight_decay": weight_decay, "momentum": 0.95})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            parameters = [p for p in group["params"] if p.grad is not None]
            if not parameters:
                continue
            gradient = torch.stack([p.grad for p in parameters])
            state = self.state[parameters[0]]  # one momentum for the whole group
            if "momentum" not in state:
                state["momentum"] = torch.zeros_like(gradient)
            momentum = state["momentum"]
            momentum.lerp_(gradient, 1 - group["momentum"])
            update = orthogonal(gradient.lerp(momentum, group["momentum"]))
            size = 0.2 * max(update.shape[-2:]) ** 0.5
            torch._foreach_mul_(parameters, 1 - group["lr"] * group["weight_decay"])
            torch._foreach_add_(parameters, update.unbind(), alpha=-group["lr"] * size)


def orthogonal(matrices: torch.Tensor) -> torch.Tensor:
    """[count, rows, columns]: nearly U V^T of the singular value decomposition U S V^T."""
    x: torch.Tensor = matrices / (matrices.norm(dim=(-2, -1), keepdim=True) + 1e-7)
    tall = x.shape[-2] > x.shape[-1]
    x = x.mT if tall else x
    a, b, c = _NEWTON_SCHULZ
    for _ in range(_ROUNDS):
        gram = x @ x.mT
        x = a * x + (b * gram + c * gram @ gram) @ x
    return x.mT if tall else x


def make_optimizers(model: Decoder) -> list[torch.optim.Optimizer]:
    """Weight decay for matrices only; the embedding is a table of vectors."""
    matrices: list[torch.nn.Parameter] = []
    rest: list[torch.nn.Parameter] = []
    for name, parameter in model.named_parameters():
        is_matrix = parameter.dim() == 2 and "embed_tokens" not in name
        (matrices if is_matrix else rest).append(parameter)
    fused = next(model.parameters()).is_cuda
    return [
        Muon(matrices, lr=1e-3, weight_decay=0.1),
        torch.optim.AdamW(rest, lr=1e-3, betas=(0.9, 0.95), weight_decay=0.0, fused=fused),
    ]
