"""The index of a layer with DeepSeek sparse attention: it scores rows for a query to read."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

import torch
import torch.nn.functional as F

from cairn.attention.batch import IndexQuery
from cairn.kernels.interface import NARROW_ROWS, Normed
from cairn.models.layers import Linear
from cairn.models.module import Factory, Module, TensorSlot
from cairn.models.rope import CosSin, rotate, rotation_order

_NORM_EPS = 1e-6


@dataclass(frozen=True, slots=True)
class IndexDims:
    heads: int
    width: int  # of a head, and of the key
    rope: int  # the first ones of these, rotated
    topk: int  # rows that a query reads
    interleaved: bool
    """Dimensions 2j and 2j + 1 form a pair of the rotation, not j and j + rope / 2."""
    full: tuple[bool, ...]
    """Whether each layer has an index; others read what the one before them selected."""

    def order(self, count: int) -> torch.Tensor:
        """The checkpoint's row for each row of a projection to `count` heads."""
        rotated = rotation_order(self.rope, interleaved=self.interleaved)
        head = torch.cat((rotated, torch.arange(self.rope, self.width)))
        return (torch.arange(count)[:, None] * self.width + head).flatten()


class LayerNorm(Module):
    """Norm with mean and bias; `order` names the checkpoint's element for each of its own."""

    def __init__(self, order: torch.Tensor, factory: Factory) -> None:
        self.weight = factory.empty(len(order))
        self.bias = factory.empty(len(order))
        self._order = order

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return F.layer_norm(x, x.shape[-1:], self.weight, self.bias, _NORM_EPS)

    def slots(self, name: str) -> Iterator[tuple[str, TensorSlot]]:
        for part, tensor in (("weight", self.weight), ("bias", self.bias)):
            write = lambda given, own=tensor: own.copy_(given[self._order])  # noqa: E731
            yield f"{name}.{part}", TensorSlot(tuple(tensor.shape), write, part == "weight")


class Indexer(Module):
    """Every rank has all of it, so that all select the same rows."""

    def __init__(self, hidden: int, query_latent: int, dims: IndexDims, factory: Factory) -> None:
        self._dims = dims
        orders = {"wq_b": dims.order(dims.heads)}
        size = dims.heads * dims.width
        self.wq_b = Linear(query_latent, {"wq_b": size}, factory, orders=orders)
        self.k_norm = LayerNorm(dims.order(1), factory)
        wide = replace(factory, dtype=torch.promote_types(factory.dtype, torch.float32))
        self.weights_proj = Float(wide.empty(dims.heads, hidden), fused=factory.fused)

    def __call__(
        self,
        x: torch.Tensor,
        query_latent: torch.Tensor,
        keys: torch.Tensor,
        cos_sin: CosSin,
        store: Callable[[torch.Tensor, Normed], None] | None,
    ) -> IndexQuery:
        """x [rows, hidden], the layer's normed input, its normed query latents, and keys
        [rows, width] as projected by `wk`. `store` rotates the query's heads and stores keys; None
        if torch rotates, and attention stores."""
        dims = self._dims
        query = self.wq_b(query_latent).view(len(x), dims.heads, dims.width)
        weights = self.weights_proj(x, (dims.heads * dims.width) ** -0.5)
        norm = self.k_norm
        if store is not None:
            store(query, Normed(keys, norm.weight, _NORM_EPS, bias=norm.bias))
            return IndexQuery(query, weights, None)
        keys = norm(keys)[:, None]
        query, keys = (
            torch.cat((rotate(part[..., : dims.rope], *cos_sin), part[..., dims.rope :]), -1)
            for part in (query, keys)
        )
        return IndexQuery(query, weights, keys[:, 0])


class Float(Module):
    """A small matrix that is multiplied in at least float32 and never rounded to int8."""

    def __init__(self, weight: torch.Tensor, *, fused: bool) -> None:
        self.weight = weight
        self._fused = fused

    def __call__(self, x: torch.Tensor, scale: float) -> torch.Tensor:
        """The scaled product with x."""
        if self._fused and 0 < len(x) <= NARROW_ROWS:
            from cairn.kernels.gemv import narrow_product

            return narrow_product(x.contiguous(), self.weight, scale)
        return F.linear(x.to(self.weight.dtype), self.weight) * scale

    def slots(self, name: str) -> Iterator[tuple[str, TensorSlot]]:
        yield f"{name}.weight", TensorSlot(tuple(self.weight.shape), self.weight.copy_)
