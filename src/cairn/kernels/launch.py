"""Launches that skip what Triton finds out about the arguments anew every time.

Triton looks at each argument of each launch to see which compiled form of the kernel fits: in a
step without a graph, with its hundreds of kernels, a large part of what the host does. `direct`
keeps compiled forms under a smaller description of the arguments, fine enough that arguments of the
same one always have the same form.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from functools import partial
from typing import Any

import torch
from triton.tools.tensor_descriptor import TensorDescriptor


def direct(jit: Any) -> DirectKernel:
    """Decorates a kernel; one that is launched with its constants by name."""
    return DirectKernel(jit)


class DirectKernel:
    """Launched as Triton's own: kernel[grid](*arguments, **constants and options)."""

    def __init__(self, jit: Any) -> None:
        self.jit = jit
        self._compiled: dict[Hashable, tuple[Any, tuple[Any, ...]]] = {}

    def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., None]:
        return partial(self._launch, grid)

    def _launch(self, grid: tuple[int, ...], *arguments: Any, **constants: Any) -> None:
        key = (tuple(map(form_of, arguments)), tuple(constants.items()))
        found = self._compiled.get(key)
        if found is None:
            compiled = self.jit[grid](*arguments, **constants)
            if compiled is not None:  # the interpreter compiles nothing
                names = self.jit.arg_names[len(arguments) :]
                self._compiled[key] = compiled, tuple(constants[name] for name in names)
            return
        compiled, rest = found
        compiled[(*grid, 1, 1)[:3]](*arguments, *rest)


def form_of(argument: Any) -> Hashable:
    """What of an argument decides which compiled form of a kernel it is for."""
    if isinstance(argument, torch.Tensor):
        return argument.dtype, argument.data_ptr() % 16 == 0, argument.device
    if isinstance(argument, int) and not isinstance(argument, bool):
        if argument == 1:
            return "one"
        return argument % 16 == 0, -(2**31) <= argument < 2**31
    if isinstance(argument, float):
        return "number"
    if isinstance(argument, TensorDescriptor):
        return argument.base.dtype, tuple(argument.block_shape), argument.base.device
    raise TypeError(f"a kernel was given {type(argument).__name__}, which has no form")
