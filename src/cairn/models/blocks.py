"""Matrices that stay quantised: codes of 4 or 8 bits, with a scale for every few of them.

A weight is `scale * sub_scale * (code - offset) + minimum * sub_minimum`. Formats without a minimum
or without a second level of scales leave these out. Codes of fewer than 4 bits take 4 bits here,
and those of 5 or 6 bits take 8.

The product rounds each input row to whole numbers of 15 bits, for every 32 columns by their largest
value, so that it changes a model's output no more than the order of float32 sums does. (With 8
bits, as llama.cpp rounds, perplexity rises by 0.3 %.) The sums inside 32 columns are whole numbers,
and float32 sums have a fixed order. So a row's result does not depend on the other rows, and the
kernel and the torch code here give the same bits.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields, replace
from itertools import groupby
from typing import Any

import torch

from cairn.errors import ConfigError
from cairn.kernels.cpu import CpuKernels, MatrixPlace
from cairn.models.narrow import Narrow, NarrowMatrix, prepared

BLOCK = 32
"""Columns for which an input row has one scale."""
_LARGEST = 127 * 128  # of the whole numbers to which an input is rounded
_LANES = 16  # outputs of a group, one for each lane of the kernel's vectors


@dataclass(frozen=True, slots=True)
class Codes:
    """A quantised matrix, with a byte for each code."""

    codes: torch.Tensor  # [outputs, columns] uint8
    scale: torch.Tensor  # [outputs, supers] float16
    minimum: torch.Tensor | None = None  # [outputs, supers] float16
    sub_scale: torch.Tensor | None = None  # [outputs, blocks, subs] int8
    sub_minimum: torch.Tensor | None = None  # [outputs, blocks, subs] int8
    offset: int = 0
    bits: int = 4  # of the largest code: 4 or 8

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(self.codes.shape)

    @property
    def form(self) -> tuple[object, ...]:
        """Matrices of the same form can be stacked."""
        values = (getattr(self, field.name) for field in fields(self))
        return tuple(v.shape[1:] if isinstance(v, torch.Tensor) else v for v in values)

    def dense(self) -> torch.Tensor:
        """[outputs, columns] float32"""
        values = (self.codes.float() - self.offset) * self._wide(self.scale, self.sub_scale)
        if self.minimum is not None:
            values += self._wide(self.minimum, self.sub_minimum)
        return values

    def _wide(self, outer: torch.Tensor, inner: torch.Tensor | None) -> torch.Tensor:
        """Both levels of scales multiplied, with one for each code."""
        columns = self.codes.shape[1]
        wide = outer.float().repeat_interleave(columns // outer.shape[1], 1)
        if inner is None:
            return wide
        flat = inner.flatten(1).float()
        return wide * flat.repeat_interleave(columns // flat.shape[1], 1)

    def with_rows(self, order: torch.Tensor) -> Codes:
        """The same matrix with its outputs in another order."""
        return self._each([self], lambda own: own[0][order])

    def narrow(self, dim: int, begin: int, count: int) -> Codes:
        """Some of the outputs (dim 0) or of the columns (dim 1), if that divides no scale."""
        if dim == 0:
            return self._each([self], lambda own: own[0].narrow(0, begin, count))
        columns = self.shape[1]
        per_scale = columns // self.scale.shape[1]
        if begin % per_scale or count % per_scale:
            raise ConfigError(
                f"tp divides a matrix of {columns} columns into shares of {count}, and {per_scale} "
                "columns have one scale; use another tp, or quantization=none"
            )

        def cut(own: Sequence[torch.Tensor]) -> torch.Tensor:
            size = own[0].shape[1]
            return own[0].narrow(1, begin * size // columns, count * size // columns)

        return self._each([self], cut)

    def to(self, device: torch.device) -> Codes:
        return self._each([self], lambda own: own[0].to(device))

    def clone(self) -> Codes:
        return self._each([self], lambda own: own[0].clone())

    @classmethod
    def stacked(cls, parts: Sequence[Codes]) -> Codes:
        """Matrices of the same form, one above the other."""
        return parts[0]._each(parts, lambda tensors: torch.cat(list(tensors)))

    def _each(
        self, parts: Sequence[Codes], change: Callable[[Sequence[torch.Tensor]], torch.Tensor]
    ) -> Codes:
        new: dict[str, Any] = {}
        for field in fields(self):
            if isinstance(getattr(self, field.name), torch.Tensor):
                new[field.name] = change([getattr(part, field.name) for part in parts])
        return replace(self, **new)


Kept = Codes | Narrow
"""A matrix that can stay as its file has it."""
Weight = torch.Tensor | Kept
"""What a checkpoint holds."""


def dense(weight: Weight) -> torch.Tensor:
    return weight if isinstance(weight, torch.Tensor) else weight.dense()


class BlockMatrix:
    """A quantised matrix in the order in which the kernel reads it.

    Groups of 16 outputs are interleaved: `codes` is [groups, blocks, bits, 16, 4], where four codes
    of 8 bits or eight of 4 bits are neighbouring columns of one output. With 4 bits, columns 0 to
    15 of a block are in the low halves of the bytes, 16 to 31 in the high ones. All scales are
    [groups, ..., 16].
    """

    def __init__(self, given: Codes, kernels: CpuKernels | None) -> None:
        """Without `kernels` torch computes the products, slowly."""
        self.outputs, columns = given.shape
        self._bits, self._offset, self._kernels = given.bits, given.offset, kernels
        padding = -self.outputs % _LANES
        blocks = columns // BLOCK
        codes = _grouped(given.codes, padding).view(-1, _LANES, blocks, BLOCK)
        if self._bits == 4:
            codes = codes[..., : BLOCK // 2] | codes[..., BLOCK // 2 :] << 4
        codes = torch.unflatten(codes, -1, (-1, 4)).permute(0, 2, 3, 1, 4)
        self._codes = codes.contiguous()  # [groups, blocks, bits, 16, 4]
        self._scale = _lanes_last(given.scale, padding)  # [groups, supers, 16]
        self._minimum, self._sub_scale, self._sub_minimum = (
            None if tensor is None else _lanes_last(tensor, padding)
            for tensor in (given.minimum, given.sub_scale, given.sub_minimum)
        )
        self._subs = 1 if given.sub_scale is None else given.sub_scale.shape[2]
        self._place = MatrixPlace(
            *(_pointer(tensor) for tensor in self._tensors()),
            *(self.outputs, blocks, self._bits, self._subs),
            *(blocks // given.scale.shape[1], self._offset),
        )

    def _tensors(self) -> tuple[torch.Tensor | None, ...]:
        return self._codes, self._scale, self._minimum, self._sub_scale, self._sub_minimum

    @property
    def nbytes(self) -> int:
        return sum(tensor.nbytes for tensor in self._tensors() if tensor is not None)

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
            self._kernels.product(self._place, x, out, norm=norm, silu=silu, add=add)
            return out
        result = self._reference(prepared(x, norm, silu=silu))
        return out.add_(result) if add else out.copy_(result)

    def _reference(self, x: torch.Tensor) -> torch.Tensor:
        blocks = torch.unflatten(x, -1, (-1, BLOCK))  # [rows, blocks, 32]
        most = blocks.abs().amax(-1)
        largest = torch.tensor(_LARGEST, dtype=x.dtype)  # with a number torch does not divide
        x_scale = most / largest + (blocks * 0).sum(-1)  # NaN if the input is not finite
        inverse = torch.where(most > 0, largest / most, 0)
        x_codes = (blocks * inverse[..., None]).round().nan_to_num().double()
        x_codes = torch.unflatten(x_codes, -1, (self._subs, -1))
        own = self._unpacked()
        codes = own.codes.double() - own.offset
        codes = codes.view(self.outputs, *x_codes.shape[1:])  # [outputs, blocks, subs, columns]
        scale, minimum = (
            None if outer is None else self._for_subs(outer, inner, blocks.shape[1])
            for outer, inner in ((own.scale, own.sub_scale), (own.minimum, own.sub_minimum))
        )
        assert scale is not None
        out = x.new_zeros(x.shape[0], self.outputs)
        for block in range(blocks.shape[1]):
            for sub in range(self._subs):
                given = x_codes[:, block, sub]
                factor = x_scale[:, block, None]
                dots = (given @ codes[:, block, sub].t()).float()  # rounded once: exact in float64
                out += scale[:, block, sub] * factor * dots
                if minimum is not None:
                    out += minimum[:, block, sub] * (factor * given.sum(-1, keepdim=True).float())
        return out

    def _for_subs(
        self, outer: torch.Tensor, inner: torch.Tensor | None, blocks: int
    ) -> torch.Tensor:
        """[outputs, blocks, subs]"""
        wide = outer.float().repeat_interleave(blocks // outer.shape[1], 1)[..., None]
        return wide.expand(-1, -1, self._subs) if inner is None else wide * inner.float()

    def rows(self, ids: torch.Tensor, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        """Rows by number, dequantised: an embedding lookup."""
        return self._unpacked(ids).dense().to(dtype)

    def dense(self) -> torch.Tensor:
        return self._unpacked().dense()

    def _unpacked(self, ids: torch.Tensor | None = None) -> Codes:
        if ids is None:
            ids = torch.arange(self.outputs)
        group, lane = ids // _LANES, ids % _LANES
        codes = self._codes[group, :, :, lane]  # [ids, blocks, bits, 4]
        if self._bits == 4:
            codes = torch.cat((codes & 15, codes >> 4), 2)
        scale, minimum, sub_scale, sub_minimum = (
            None if tensor is None else tensor[group, ..., lane] for tensor in self._tensors()[1:]
        )
        assert scale is not None
        codes = codes.flatten(1)
        return Codes(codes, scale, minimum, sub_scale, sub_minimum, self._offset, self._bits)


def stacked(parts: Sequence[Kept]) -> Kept:
    """Matrices of the same form, one above the other."""
    if isinstance(parts[0], Narrow):
        return Narrow.stacked([part for part in parts if isinstance(part, Narrow)])
    return Codes.stacked([part for part in parts if isinstance(part, Codes)])


def stored(parts: Sequence[Kept], kernels: CpuKernels | None) -> BlockMatrix | NarrowMatrix:
    """Matrices of the same form, one above the other, in the order in which a kernel reads them."""
    whole = stacked(parts)
    if isinstance(whole, Narrow):
        return NarrowMatrix(whole, kernels)
    return BlockMatrix(whole, kernels)


class Stack:
    """Matrices of one width, of any forms, one above the other."""

    def __init__(self, parts: Sequence[Kept], kernels: CpuKernels | None) -> None:
        self._matrices = [
            stored(list(same), kernels)
            for _, same in groupby(parts, key=lambda part: (type(part), part.form))
        ]
        self._outputs = sum(matrix.outputs for matrix in self._matrices)

    @property
    def single(self) -> BlockMatrix | NarrowMatrix | None:
        """The only matrix, if there are not several."""
        return self._matrices[0] if len(self._matrices) == 1 else None

    def product(
        self,
        x: torch.Tensor,
        out: torch.Tensor | None = None,
        *,
        norm: tuple[torch.Tensor, float] | None = None,
        silu: bool = False,
        add: bool = False,
    ) -> torch.Tensor:
        if len(self._matrices) == 1:
            return self._matrices[0].product(x, out, norm=norm, silu=silu, add=add)
        if out is None:
            out = x.new_empty(x.shape[0], self._outputs)
        begin = 0
        for matrix in self._matrices:
            own = out.narrow(1, begin, matrix.outputs)
            matrix.product(x, own, norm=norm, silu=silu, add=add)
            begin += matrix.outputs
        return out

    @property
    def nbytes(self) -> int:
        return sum(matrix.nbytes for matrix in self._matrices)

    def dense(self) -> torch.Tensor:
        return torch.cat([matrix.dense() for matrix in self._matrices])


def _grouped(tensor: torch.Tensor, padding: int) -> torch.Tensor:
    """[outputs, ...] -> [groups, 16, ...], with zeros for outputs that do not exist."""
    if padding:
        tensor = torch.cat((tensor, tensor.new_zeros(padding, *tensor.shape[1:])))
    return torch.unflatten(tensor, 0, (-1, _LANES))


def _lanes_last(tensor: torch.Tensor, padding: int) -> torch.Tensor:
    return _grouped(tensor, padding).movedim(1, -1).contiguous()


def _pointer(tensor: torch.Tensor | None) -> int | None:
    return None if tensor is None else tensor.data_ptr()
