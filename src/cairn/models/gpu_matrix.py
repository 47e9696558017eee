"""Quantised matrices on a GPU, which the kernels read as they are stored."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Hashable, Sequence
from itertools import groupby
from typing import Protocol

import torch

from cairn.kernels.interface import Norm
from cairn.models.blocks import Codes, Kept, stacked
from cairn.models.fp8 import readable
from cairn.models.narrow import Narrow


class FewRows(Protocol):
    """A matrix as kernels in CUDA C++ read it, which multiply few rows."""

    def serves(self, x: torch.Tensor) -> bool:
        """Whether there is a kernel for these rows."""

    def product(
        self, x: torch.Tensor, *, norm: Norm | None = None, add_to: torch.Tensor | None = None
    ) -> torch.Tensor: ...

    def gated(self) -> FewRows | None:
        """The same matrix of gate and up, for silu(gate) * up; None if it cannot be."""


def can_store(weight: Kept) -> bool:
    """Whether the kernels can read it: codes, and FP8 with scales. Other floats are converted."""
    return isinstance(weight, Codes) or readable(weight)


class GpuMatrix(ABC):
    outputs: int
    for_few_rows: FewRows | None
    """None if no kernel in CUDA C++ can read it."""

    @property
    @abstractmethod
    def form(self) -> Hashable:
        """What decides which compiled kernels it needs."""

    @property
    @abstractmethod
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
        from cairn.kernels.activation import silu_and_mul

        x = x.contiguous()
        own = self.for_few_rows
        if own is None or not own.serves(x):
            return self._by_triton(x, norm, silu, add_to)
        return own.product(silu_and_mul(x) if silu else x, norm=norm, add_to=add_to)

    def gated(self, x: torch.Tensor, norm: Norm | None) -> torch.Tensor | None:
        """silu(first half of the outputs) * second half, in one kernel; None if there is none."""
        own = None if self.for_few_rows is None else self.for_few_rows.gated()
        return own.product(x.contiguous(), norm=norm) if own and own.serves(x) else None

    @abstractmethod
    def _by_triton(
        self, x: torch.Tensor, norm: Norm | None, silu: bool, add_to: torch.Tensor | None
    ) -> torch.Tensor: ...

    @abstractmethod
    def rows(self, ids: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        """Rows by number, in float: an embedding lookup."""

    @abstractmethod
    def dense(self) -> torch.Tensor: ...


class Fp8Matrix(GpuMatrix):
    def __init__(self, given: Narrow) -> None:
        from cairn.kernels.few_rows import Fp8FewRows
        from cairn.kernels.fp8_many import prepare

        assert given.scale is not None
        self.outputs, columns = given.shape
        self._given, self._numbers, self._scale = given, given.values, given.scale.contiguous()
        self._group = 0 if given.span >= columns else given.span
        self.for_few_rows = Fp8FewRows.of(self._numbers, self._scale, self._group)
        self._prepared = prepare(self._numbers, self._scale, self._group)

    @property
    def form(self) -> Hashable:
        return "fp8", self._group, self._prepared.form

    @property
    def nbytes(self) -> int:
        own = self._prepared.some, self._prepared.many, self._scale  # may share memory
        scales = {scale.data_ptr(): scale.nbytes for scale in own if scale is not None}
        return self._numbers.nbytes + sum(scales.values())

    def _by_triton(
        self, x: torch.Tensor, norm: Norm | None, silu: bool, add_to: torch.Tensor | None
    ) -> torch.Tensor:
        from cairn.kernels import fp8

        given = self._numbers, self._scale, self._group, self._prepared
        return fp8.product(x, *given, norm=norm, silu=silu, add_to=add_to)

    def rows(self, ids: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        return self._given.with_rows(ids).dense().to(dtype)

    def dense(self) -> torch.Tensor:
        return self._given.dense()


class PackedMatrix(GpuMatrix):
    def __init__(self, given: Codes) -> None:
        from cairn.kernels.code_rows import CodeMatrix
        from cairn.kernels.packed_layout import packed

        self.outputs = given.shape[0]
        self.packed = packed(
            given.codes,
            given.scale,
            given.minimum,
            given.sub_scale,
            given.sub_minimum,
            given.offset,
            given.bits,
        )
        self.for_few_rows = None
        # The kernels have weights in float16, eight times as large.
        weight = _largest(given.scale) * _largest(given.sub_scale) * 2**given.bits
        if given.minimum is not None:
            weight += _largest(given.minimum) * _largest(given.sub_minimum)
        if 8 * weight < torch.finfo(torch.float16).max:
            self.for_few_rows = CodeMatrix.of(self.packed)

    @property
    def form(self) -> Hashable:
        return self.for_few_rows is not None, *self.packed.constants.items()

    @property
    def nbytes(self) -> int:
        return sum(own.nbytes for own in self.packed.tensors)

    def _by_triton(
        self, x: torch.Tensor, norm: Norm | None, silu: bool, add_to: torch.Tensor | None
    ) -> torch.Tensor:
        from cairn.kernels import packed

        return packed.product(x, self.packed, norm=norm, silu=silu, add_to=add_to)

    def rows(self, ids: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        from cairn.kernels import packed

        return packed.widened(self.packed, dtype, ids=ids.long())

    def dense(self) -> torch.Tensor:
        from cairn.kernels.packed_layout import unpacked

        return Codes(*unpacked(self.packed), self.packed.offset, self.packed.bits).dense()


def _largest(scales: torch.Tensor | None) -> float:
    return 1.0 if scales is None else scales.float().abs().max().item()


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

    @property
    def is_slow(self) -> bool:
        """Whether Triton's kernels multiply few rows on all GPUs."""
        return any(matrix.for_few_rows is None for matrix in self._matrices)

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

    def gated(self, x: torch.Tensor, norm: Norm | None) -> torch.Tensor | None:
        """As `GpuMatrix.gated`."""
        return self._matrices[0].gated(x, norm) if len(self._matrices) == 1 else None

    def dense(self) -> torch.Tensor:
        return torch.cat([matrix.dense() for matrix in self._matrices])
