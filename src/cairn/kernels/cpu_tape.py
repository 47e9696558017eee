"""Runs of CPU kernels that are recorded once, and then repeated by a single call.

Python between small kernels takes as long as the kernels. A tape holds the calls of a run with
their arguments. A tape would miss anything else that a run computes, so `Watch` detects that.
"""

from __future__ import annotations

import ctypes
import functools
import struct
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch.overrides import TorchFunctionMode


class StrideOf(int):
    """The row stride of a tensor. On a tape it is the stride of the input that replaces it."""

    pointer: int

    def __new__(cls, tensor: torch.Tensor) -> StrideOf:
        self = super().__new__(cls, tensor.stride(0))
        self.pointer = tensor.data_ptr()
        return self


class _Word(ctypes.Structure):
    """An argument on a tape: `Word` in the C++ source."""

    _fields_ = (("value", ctypes.c_int64), ("input", ctypes.c_int64))


class Tape:
    """The kernel calls of one run. Arguments that are inputs of the run are replaced later."""

    def __init__(self, inputs: Sequence[torch.Tensor]) -> None:
        self.whole = True
        """Everything that the run computed is on the tape."""
        self.result: int | torch.Tensor = 0
        """The number of the input that holds the result, or the tensor that does."""
        self._inputs = {x.data_ptr(): i for i, x in enumerate(inputs)}
        if len(self._inputs) < len(inputs) or 0 in self._inputs:
            self.whole = False  # a pointer does not tell which input it is
        self._kinds: list[int] = []
        self._words: list[_Word] = []
        self._kept: dict[int, torch.Tensor] = {}  # by pointer; kept alive

    def add(
        self, kind: int, tensors: tuple[torch.Tensor, ...], arguments: Sequence[int | float | None]
    ) -> None:
        self._kinds.append(kind)
        self._kept |= {tensor.data_ptr(): tensor for tensor in tensors}
        self._words += map(self._word, arguments)

    @property
    def nbytes(self) -> int:
        """Memory that it keeps."""
        return sum(tensor.nbytes for tensor in self._kept.values())

    def expect(self, tensor: torch.Tensor) -> None:
        """Note that a kernel reads the tensor, which must be an input."""
        self.whole &= tensor.data_ptr() in self._inputs

    def _word(self, argument: int | float | None) -> _Word:
        if isinstance(argument, float):
            return _Word(struct.unpack("<i", struct.pack("<f", argument))[0], -1)
        value = int(argument or 0)
        if isinstance(argument, StrideOf) and argument.pointer in self._inputs:
            return _Word(value, len(self._inputs) + self._inputs[argument.pointer])
        return _Word(value, self._inputs.get(value, -1))

    def end(self, result: torch.Tensor) -> None:
        self.result = self._inputs.get(result.data_ptr(), result)

    @functools.cached_property
    def compiled(self) -> tuple[ctypes.Array[ctypes.c_int32], ctypes.Array[_Word]]:
        """The calls and their arguments, as `cairn_replay` reads them."""
        kinds, words = self._kinds, self._words
        return (ctypes.c_int32 * len(kinds))(*kinds), (_Word * len(words))(*words)

    def values(self, inputs: Sequence[torch.Tensor]) -> ctypes.Array[ctypes.c_int64]:
        """What words refer to, for these inputs: pointers, then row strides."""
        pointers, strides = ([x.data_ptr() for x in inputs], [x.stride(0) for x in inputs])
        return (ctypes.c_int64 * (2 * len(inputs)))(*pointers, *strides)


class Watch(TorchFunctionMode):
    """Notices when torch computes something, which a tape would miss.

    A mode of torch's dispatcher would see more, but imports a hundred megabytes of torch.
    """

    def __init__(self, tape: Tape) -> None:
        super().__init__()
        self._tape = tape

    def __torch_function__(
        self, func: Any, types: Any, args: Any = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        if func.__name__ not in _MADE:
            self._tape.whole &= not _computes(func.__name__, args, kwargs or {}, result)
        return result


_MADE = ("empty", "empty_like", "new_empty")


def _computes(name: str, args: Sequence[Any], kwargs: Mapping[str, Any], result: Any) -> bool:
    """Whether a call did more than make another view of a tensor."""
    special = name.startswith("__") and name.endswith("__")
    in_place = name.startswith("__i") if special else name.endswith("_")
    if name == "__setitem__" or "out" in kwargs or (in_place and isinstance(result, torch.Tensor)):
        return True
    given = {x.untyped_storage().data_ptr() for x in args if isinstance(x, torch.Tensor)}
    results = result if isinstance(result, (tuple, list)) else (result,)
    return any(
        x.untyped_storage().data_ptr() not in given for x in results if isinstance(x, torch.Tensor)
    )
