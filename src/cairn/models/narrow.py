"""Matrices of floats that stay as a file has them: float32, float16, bfloat16, FP8; int8, too.

All FP8 formats are read this way: scales of blocks, outputs or whole matrices are repeated for the
outputs that share them. `kernels/fp8.py` multiplies FP8 on a GPU, the classes here on a CPU.

A weight is its value, or value * scale where several columns of an output share a scale. Inputs are
float32 and are not rounded. The kernel adds up each output's columns in a fixed order, so a row's
result does not depend on the other rows.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from math import gcd

import torch
import torch.nn.functional as F

from cairn.kernels.cpu import FLOAT_KINDS, CpuKernels, FloatsPlace

_LANES = 16  # outputs of a group, one for each lane of the kernel's vectors
_SPAN = 128  # columns that the kernel adds up at once where there are no scales


@dataclass(frozen=True, slots=True)
class Narrow:
    """A matrix as a checkpoint has it."""

    values: torch.Tensor  # [outputs, columns], of a type in FLOAT_KINDS
    scale: torch.Tensor | None = None  # [outputs, spans] float32
    span: int = _SPAN
    """Columns that share a scale; the last ones may be fewer."""

    @classmethod
    def of(cls, floats: torch.Tensor) -> Narrow:
        """A float matrix without scales. float64 becomes float32."""
        return cls(floats if floats.dtype in FLOAT_KINDS else floats.float())

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(self.values.shape)

    @property
    def nbytes(self) -> int:
        return self.values.nbytes + (0 if self.scale is None else self.scale.nbytes)

    @property
    def form(self) -> tuple[object, ...]:
        """Matrices of the same form can be stacked."""
        return self.values.dtype, self.scale is None, self.span

    def dense(self) -> torch.Tensor:
        """[outputs, columns] float32"""
        values = self.values.float()
        if self.scale is None:
            return values
        return values * self.scale.repeat_interleave(self.span, 1)[:, : values.shape[1]]

    def with_rows(self, order: torch.Tensor) -> Narrow:
        """The same matrix with its outputs in another order."""
        return self._each([self], lambda own: own[0][order])

    def narrow(self, dim: int, begin: int, count: int) -> Narrow:
        """Some of the outputs (dim 0) or of the columns (dim 1)."""
        values, scale = self.values.narrow(dim, begin, count), self.scale
        if scale is None or (dim == 1 and scale.shape[1] == 1):
            return replace(self, values=values)
        if dim == 0:
            return replace(self, values=values, scale=scale.narrow(0, begin, count))
        # Spans that end where the share ends.
        span = gcd(self.span, begin, count)
        finer = scale.repeat_interleave(self.span // span, 1)
        return Narrow(values, finer[:, begin // span : (begin + count) // span], span)

    def to(self, device: torch.device) -> Narrow:
        scale = None if self.scale is None else self.scale.to(device)
        return replace(self, values=self.values.to(device), scale=scale)

    def clone(self) -> Narrow:
        scale = None if self.scale is None else self.scale.clone()
        return replace(self, values=self.values.clone(), scale=scale)

    @classmethod
    def stacked(cls, parts: Sequence[Narrow]) -> Narrow:
        """Matrices of the same form, one above the other."""
        return parts[0]._each(parts, lambda tensors: torch.cat(list(tensors)))

    def _each(
        self, parts: Sequence[Narrow], change: Callable[[Sequence[torch.Tensor]], torch.Tensor]
    ) -> Narrow:
        # torch moves bytes of any type about, but not FP8.
        values = change([_as_whole(part.values) for part in parts]).view(self.values.dtype)
        scales = [part.scale for part in parts if part.scale is not None]
        return replace(self, values=values, scale=change(scales) if scales else None)


class NarrowMatrix:
    """A matrix in the order in which the kernel reads it: [groups of 16 outputs, columns, 16]."""

    def __init__(self, given: Narrow, kernels: CpuKernels | None) -> None:
        """Without `kernels` torch widens the matrix for every product, which is slow."""
        self.outputs, self._columns = given.shape
        self._kernels, self._dtype, self._span = kernels, given.values.dtype, given.span
        self._values = _interleaved(_as_whole(given.values))
        self._scale = None if given.scale is None else _interleaved(given.scale)
        self.place = FloatsPlace(
            *(self._values.data_ptr(), None if self._scale is None else self._scale.data_ptr()),
            *(self.outputs, self._columns, self._span, FLOAT_KINDS.index(self._dtype)),
        )

    @property
    def nbytes(self) -> int:
        return self._values.nbytes + (0 if self._scale is None else self._scale.nbytes)

    def product(
        self,
        x: torch.Tensor,
        out: torch.Tensor | None = None,
        *,
        norm: tuple[torch.Tensor, float] | None = None,
        silu: bool = False,
        add: bool = False,
    ) -> torch.Tensor:
        """float32 x [rows, columns] -> [rows, outputs]. `CpuKernels.product` has the options."""
        if out is None:
            out = x.new_empty(x.shape[0], self.outputs)
        if self._kernels is not None:
            x = x if x.stride(-1) == 1 else x.contiguous()
            self._kernels.product(self.place, x, out, norm=norm, silu=silu, add=add)
            return out
        result = F.linear(prepared(x, norm, silu=silu), self.dense())
        return out.add_(result) if add else out.copy_(result)

    def rows(self, ids: torch.Tensor, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        """Rows by number: an embedding lookup."""
        group, lane = ids // _LANES, ids % _LANES
        values = self._values[group, :, lane].view(self._dtype)
        scale = None if self._scale is None else self._scale[group, :, lane]
        return Narrow(values, scale, self._span).dense().to(dtype)

    def dense(self) -> torch.Tensor:
        return self.rows(torch.arange(self.outputs))


def prepared(
    x: torch.Tensor, norm: tuple[torch.Tensor, float] | None, *, silu: bool
) -> torch.Tensor:
    """What the options of a product do to its input."""
    if silu:
        gate, up = x.chunk(2, dim=-1)
        x = F.silu(gate) * up
    if norm is not None:
        x = x * torch.rsqrt(x.square().mean(-1, keepdim=True) + norm[1]) * norm[0]
    return x


def _as_whole(values: torch.Tensor) -> torch.Tensor:
    return values.view(torch.int8) if values.dtype == torch.float8_e4m3fn else values


def _interleaved(tensor: torch.Tensor) -> torch.Tensor:
    """[outputs, n] -> [groups, n, 16], with zeros for outputs that do not exist."""
    padded = F.pad(tensor, (0, 0, 0, -len(tensor) % _LANES))
    return torch.unflatten(padded, 0, (-1, _LANES)).transpose(1, 2).contiguous()
