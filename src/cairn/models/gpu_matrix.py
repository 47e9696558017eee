"""Quantised matrices on a GPU, which the kernels read as they are stored."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from itertools import groupby
from typing import Protocol

import torch

from cairn.models.blocks import Codes, Kept, stacked
from cairn.models.fp8 import readable
from cairn.models.narrow import Narrow

Norm = tuple[torch.Tensor, float]
"""Weight and epsilon of an RMS norm."""


def can_store(weight: Kept) -> bool:
    """Whether the kernels can read it: codes, and FP8 with scales. Other floats are converted."""
    return isinstance(weight, Codes) or readable(weight)


class GpuMatrix(Protocol):
    outputs: int

    @property
    def form(self) -> Hashable:
        """What decides which compiled kernels it needs."""
        ...

    @property
    def nbytes(self) -> int: ...

    def product(
        self,
        x: torch.Tensor,
        *,
        norm: Norm | None = None,
        silu: bool = False,
        add_to: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """x [rows, columns] -> [rows, outputs]. With `silu`, x is twice as wide, and silu(first
        half) * second half is multiplied."""
        ...

    def rows(self, ids: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        """Rows by number, in float: an embedding lookup."""
        ...

    def dense(self) -> torch.Tensor: ...


class Fp8Matrix:
    def __init__(self, given: Narrow) -> None:
        assert given.scale is not None
        self.outputs, columns = given.shape
        self._given, self._numbers, self._scale = given, given.values, given.scale.contiguous()
        self._group = 0 if given.span >= columns else given.span

    @property
    def form(self) -> Hashable:
        return "fp8", self._group

    @property
    def nbytes(self) -> int:
        return self._given.nbytes

    def product(
        self,
        x: torch.Tensor,
        *,
        norm: Norm | None = None,
        silu: bool = False,
        add_to: torch.Tensor | None = None,
    ) -> torch.Tensor:
        from cairn.kernels import fp8

        given = self._numbers, self._scale, self._group
        return fp8.product(x.contiguous(), *given, norm=norm, silu=silu, add_to=add_to)

    def rows(self, ids: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        return self._given.with_rows(ids).dense().to(dtype)

    def dense(self) -> torch.Tensor:
        return self._given.dense()


class PackedMatrix:
    def __init__(self, given: Codes) -> None:
        from cairn.kernels.packed import Packed, pack

        def laid_out(own: torch.Tensor | None) -> torch.Tensor | None:
            return None if own is None else own.contiguous()

        self.outputs = given.shape[0]
        self.packed = Packed(
            pack(given.codes, given.bits),
            given.scale.contiguous(),
            laid_out(given.minimum),
            laid_out(given.sub_scale),
            laid_out(given.sub_minimum),
            given.offset,
            given.bits,
        )

    @property
    def form(self) -> Hashable:
        return tuple(self.packed.constants.items())

    @property
    def nbytes(self) -> int:
        return sum(own.nbytes for own in self.packed if isinstance(own, torch.Tensor))

    def product(
        self,
        x: torch.Tensor,
        *,
        norm: Norm | None = None,
        silu: bool = False,
        add_to: torch.Tensor | None = None,
    ) -> torch.Tensor:
        from cairn.kernels import packed

        return packed.product(x.contiguous(), self.packed, norm=norm, silu=silu, add_to=add_to)

    def rows(self, ids: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        from cairn.kernels import packed

        return packed.widened(self.packed, dtype, ids=ids.long())

    def dense(self) -> torch.Tensor:
        from cairn.kernels.packed import unpack

        own = self.packed
        codes = unpack(own.words, own.bits)
        return Codes(codes, *own[1:5], own.offset, own.bits).dense()


def gpu_matrix(given: Kept) -> GpuMatrix:
    return Fp8Matrix(given) if isinstance(given, Narrow) else PackedMatrix(given)


class GpuStack:
    """Quantised matrices of one width, of any forms, one above the other."""

    def __init__(self, parts: Sequence[Kept], device: torch.device) -> None:
        self._matrices = [
            gpu_matrix(stacked([part.to(device) for part in same]))
            for _, same in groupby(parts, key=lambda part: (type(part), part.form))
        ]

    @property
    def form(self) -> Hashable:
        return tuple((matrix.form, matrix.outputs) for matrix in self._matrices)

    @property
    def nbytes(self) -> int:
        return sum(matrix.nbytes for matrix in self._matrices)

    def product(
        self,
        x: torch.Tensor,
        out: torch.Tensor | None = None,
        *,
        norm: Norm | None = None,
        silu: bool = False,
        add: bool = False,
    ) -> torch.Tensor:
        """As `GpuMatrix.product`; the result is added to `out` if `add`, which must be set with
        it."""
        assert add == (out is not None)
        if len(self._matrices) == 1:
            return self._matrices[0].product(x, norm=norm, silu=silu, add_to=out)
        parts = [matrix.product(x, norm=norm, silu=silu) for matrix in self._matrices]
        result = torch.cat(parts, dim=-1)
        return result if out is None else out.add_(result)

    def dense(self) -> torch.Tensor:
        return torch.cat([matrix.dense() for matrix in self._matrices])
