"""The few modules decoders are made of. Each knows how its weights are named in a checkpoint."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import nn


@dataclass(frozen=True, slots=True)
class Factory:
    """Where and in which type parameters are made."""

    dtype: torch.dtype
    device: torch.device

    def empty(self, *shape: int) -> nn.Parameter:
        tensor = torch.empty(shape, dtype=self.dtype, device=self.device)
        return nn.Parameter(tensor, requires_grad=False)


@dataclass(frozen=True, slots=True)
class TensorSlot:
    """A place that one checkpoint tensor fills."""

    shape: tuple[int, ...]
    write: Callable[[torch.Tensor], None]
    is_norm: bool = False


class WeightModule(nn.Module):
    """A leaf with weights. `slots(name)` yields them under their checkpoint names."""

    def slots(self, name: str) -> Iterator[tuple[str, TensorSlot]]:
        raise NotImplementedError


class Embedding(WeightModule):
    def __init__(self, rows: int, dim: int, factory: Factory) -> None:
        super().__init__()
        self.weight = factory.empty(rows, dim)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return F.embedding(ids, self.weight)

    def slots(self, name: str) -> Iterator[tuple[str, TensorSlot]]:
        yield f"{name}.weight", TensorSlot(tuple(self.weight.shape), _copier(self.weight))


class RMSNorm(WeightModule):
    """`round_last`: the weight is applied before rounding to the model's type, not after it."""

    def __init__(self, dim: int, eps: float, factory: Factory, *, round_last: bool = False) -> None:
        super().__init__()
        self.weight = factory.empty(dim)
        self._eps = eps
        self._round_last = round_last

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        wide = x.to(torch.promote_types(x.dtype, torch.float32))
        scaled = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + self._eps)
        if self._round_last:
            return (self.weight * scaled).to(x.dtype)
        return self.weight * scaled.to(x.dtype)

    def slots(self, name: str) -> Iterator[tuple[str, TensorSlot]]:
        shape = tuple(self.weight.shape)
        yield f"{name}.weight", TensorSlot(shape, _copier(self.weight), is_norm=True)


class Linear(WeightModule):
    """x @ W.T + b, where W may be several checkpoint matrices stacked at load.

    `parts` maps the name of each matrix to its rows. Parts of a fused layer stand in the
    checkpoint beside it (q_proj, k_proj, v_proj for qkv_proj); a lone part is the layer itself.
    """

    def __init__(
        self, in_features: int, parts: Mapping[str, int], factory: Factory, *, bias: bool = False
    ) -> None:
        super().__init__()
        self.parts = dict(parts)
        out_features = sum(self.parts.values())
        self.weight = factory.empty(out_features, in_features)
        self.bias = factory.empty(out_features) if bias else None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return F.linear(x, self.weight, self.bias)

    def slots(self, name: str) -> Iterator[tuple[str, TensorSlot]]:
        parent = name.rpartition(".")[0]
        begin = 0
        for part, rows in self.parts.items():
            target = name if len(self.parts) == 1 else f"{parent}.{part}"
            weight = self.weight[begin : begin + rows]
            yield f"{target}.weight", TensorSlot(tuple(weight.shape), _copier(weight))
            if self.bias is not None:
                bias = self.bias[begin : begin + rows]
                yield f"{target}.bias", TensorSlot(tuple(bias.shape), _copier(bias))
            begin += rows


def named_slots(model: nn.Module) -> dict[str, TensorSlot]:
    """Every checkpoint tensor the model needs, by name."""
    return dict(
        slot
        for name, module in model.named_modules()
        if isinstance(module, WeightModule)
        for slot in module.slots(name)
    )


def _copier(target: torch.Tensor) -> Callable[[torch.Tensor], None]:
    data = target.detach()

    def copy(source: torch.Tensor) -> None:
        data.copy_(source)

    return copy
