"""Reads the header of a GGUF file: metadata, and where each tensor lies.

A file may be hostile. Every length is compared with the file before it is used, and what a header
may hold is limited.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from cairn.errors import LoadError

if TYPE_CHECKING:
    from gguf import GGMLQuantizationType

_MAGIC = b"GGUF"
_VERSIONS = (2, 3)
_SCALARS = {
    number: struct.Struct(f"<{code}")
    for number, code in zip((0, 1, 2, 3, 4, 5, 6, 7, 10, 11, 12), "BbHhIif?Qqd", strict=True)
}
_STRING, _ARRAY = 8, 9  # the other types of values
_U32, _U64 = _SCALARS[4], _SCALARS[10]
_ALIGNMENT = "general.alignment"

# A vocabulary of 262,144 tokens has a million values in 20 MB.
_MOST_BYTES = 128 * 2**20
_MOST_VALUES = 2**22
_MOST_FIELDS = 2**16
_MOST_TENSORS = 2**17
_MOST_DIMENSIONS = 4


class _CorruptError(Exception):
    """What is wrong with a header."""


@dataclass(frozen=True, slots=True)
class GGUFTensor:
    name: str
    kind: GGMLQuantizationType
    shape: tuple[int, ...]  # outermost first, as in torch
    data: np.ndarray  # uint8 [*shape[:-1], bytes of a row], in the file


@dataclass(frozen=True, slots=True)
class GGUFHeader:
    metadata: dict[str, Any]
    tensors: tuple[GGUFTensor, ...]


def read_header(path: Path) -> GGUFHeader:
    try:
        return _Reader(path, np.memmap(path, mode="r")).read()
    except OSError as error:
        raise LoadError(f"{path} cannot be read: {error}") from error
    except (_CorruptError, ValueError) as error:  # ValueError: an empty file, or no UTF-8
        raise LoadError(f"{path} is not a GGUF file, or its header is corrupt: {error}") from error


class _Reader:
    def __init__(self, path: Path, data: np.ndarray) -> None:
        self._path, self._data = path, data
        self._bytes = memoryview(data)  # type: ignore[arg-type]
        self._end = min(len(data), _MOST_BYTES)  # of what may be read
        self._at = 0
        self._values_left = _MOST_VALUES

    def read(self) -> GGUFHeader:
        if bytes(self._take(4)) != _MAGIC:
            raise _CorruptError("it does not begin with GGUF")
        version = self._number(_U32)
        if version not in _VERSIONS:
            order = " of a big-endian machine" if version & 0xFFFF == 0 else ""
            raise _CorruptError(f"version {version}{order}; supported: 2 and 3, little-endian")
        num_tensors = self._count("tensors", _MOST_TENSORS)
        metadata: dict[str, Any] = {}
        for _ in range(self._count("fields", _MOST_FIELDS)):
            name = self._string()
            if name in metadata:
                raise _CorruptError(f"field {name} is there twice")
            metadata[name] = self._value(name, self._number(_U32))
        entries = [self._entry() for _ in range(num_tensors)]
        return GGUFHeader(metadata, self._tensors(entries, _alignment(metadata)))

    def _take(self, count: int) -> memoryview:
        begin, end = self._at, self._at + count
        if end > self._end:
            where = "the file" if self._end == len(self._data) else f"{_MOST_BYTES} bytes, the most"
            raise _CorruptError(f"what is at byte {begin} ends at {end}, beyond {where}")
        self._at = end
        return self._bytes[begin:end]

    def _number(self, form: struct.Struct) -> Any:
        return form.unpack(self._take(form.size))[0]

    def _count(self, what: str, most: int) -> int:
        count: int = self._number(_U64)
        if count > most:
            raise _CorruptError(f"it has {count} {what}; at most {most} are read")
        return count

    def _string(self) -> str:
        return str(self._take(self._number(_U64)), "utf-8")

    def _value(self, name: str, kind: int) -> Any:
        if kind == _STRING:
            return self._string()
        if kind in _SCALARS:
            return self._number(_SCALARS[kind])
        if kind != _ARRAY:
            raise _CorruptError(f"field {name} has the unknown type {kind}")
        kind = self._number(_U32)
        count = self._count(f"values in field {name}", self._values_left)
        self._values_left -= count
        if kind == _STRING:
            return [self._string() for _ in range(count)]
        if kind not in _SCALARS:
            raise _CorruptError(f"field {name} is an array of type {kind}, which is not supported")
        form = _SCALARS[kind]
        return [value for (value,) in form.iter_unpack(self._take(form.size * count))]

    def _entry(self) -> tuple[str, GGMLQuantizationType, tuple[int, ...], int]:
        """Name, type, shape and offset of a tensor."""
        from gguf import GGMLQuantizationType  # here, because it takes long and few need it

        name, dimensions = self._string(), self._number(_U32)
        if not 1 <= dimensions <= _MOST_DIMENSIONS:
            raise _CorruptError(
                f"tensor {name} has {dimensions} dimensions; 1 to {_MOST_DIMENSIONS} are possible"
            )
        shape = tuple(self._number(_U64) for _ in range(dimensions))[::-1]
        if not all(shape):
            raise _CorruptError(f"tensor {name} has shape {list(shape)}, without any value")
        number = self._number(_U32)
        try:
            kind = GGMLQuantizationType(number)
        except ValueError as error:
            raise _CorruptError(f"tensor {name} has the unknown type {number}") from error
        return name, kind, shape, self._number(_U64)

    def _tensors(
        self, entries: list[tuple[str, GGMLQuantizationType, tuple[int, ...], int]], alignment: int
    ) -> tuple[GGUFTensor, ...]:
        from gguf import GGML_QUANT_SIZES

        start, size = -(-self._at // alignment) * alignment, len(self._data)
        tensors: dict[str, GGUFTensor] = {}
        total = 0
        for name, kind, shape, offset in entries:
            block, block_bytes = GGML_QUANT_SIZES[kind]
            if shape[-1] % block:
                raise _CorruptError(
                    f"tensor {name} has rows of {shape[-1]} values; blocks of {kind.name} have "
                    f"{block}"
                )
            row_bytes = shape[-1] // block * block_bytes
            count = prod(shape[:-1]) * row_bytes
            begin, end = start + offset, start + offset + count
            if end > size:
                raise LoadError(
                    f"{self._path} is truncated: tensor {name} ends at byte {end}, the file at "
                    f"{size}; fetch it again"
                )
            if name in tensors:
                raise _CorruptError(f"tensor {name} is there twice")
            total += count
            data = self._data[begin:end].reshape(*shape[:-1], row_bytes)
            tensors[name] = GGUFTensor(name, kind, shape, data)
        if start + total > size:
            raise _CorruptError(f"its tensors overlap: they have {total} bytes, the file {size}")
        return tuple(tensors.values())


def _alignment(metadata: dict[str, Any]) -> int:
    value = metadata.get(_ALIGNMENT, 32)
    if not isinstance(value, int) or value < 1 or value & (value - 1):
        raise _CorruptError(f"{_ALIGNMENT} is {value!r:.100}; it must be a power of two")
    return value
