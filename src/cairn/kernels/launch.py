"""Launches that skip what Triton finds out about the arguments anew every time.

Triton looks at each argument of each launch to see which compiled form of the kernel fits: in a
step without a graph, with its hundreds of kernels, a large part of what the host does. `direct`
keeps compiled forms under a smaller description of the arguments, fine enough that arguments of the
same one always have the same form.

Numbers that change from step to step are `do_not_specialize` in every kernel, with their type
written down: no step may have a form of its own, which would have to be compiled while it waits.
Their pointers lie on 16 bytes (see `packing`).
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from functools import partial
from operator import call
from typing import Any

import torch
from triton import knobs
from triton.tools.tensor_descriptor import TensorDescriptor

from cairn.kernels.precompile import Collector


def direct(jit: Any) -> DirectKernel:
    """Decorates a kernel; one that is launched with its constants by name."""
    return DirectKernel(jit)


class DirectKernel:
    """Launched as Triton's own: kernel[grid](*arguments, **constants and options).

    While a `Collector` is Triton's hook, nothing is launched.
    """

    def __init__(self, jit: Any) -> None:
        self.jit = jit
        self._compiled: dict[Hashable, tuple[Any, tuple[Any, ...]]] = {}
        # One for each argument; the interpreter has no parameters, and needs no forms.
        self._forms = [
            _no_form if param.do_not_specialize and param.annotation_type else form_of
            for param in getattr(jit, "params", ())
        ]

    def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., None]:
        return partial(self._launch, grid)

    def _launch(self, grid: tuple[int, ...], *arguments: Any, **constants: Any) -> None:
        forms = tuple(map(call, self._forms, arguments))
        key = (forms, tuple(constants.items()))
        hook = knobs.runtime.jit_cache_hook
        if isinstance(hook, Collector):
            if (self, key) not in hook.seen:  # layers are alike, and Triton's own look is slow
                hook.seen.add((self, key))
                self.jit.warmup(*arguments, grid=grid, **constants)
            return
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


def _no_form(argument: Any) -> Hashable:
    """The same, of a number that makes no difference: the kernel says its type itself."""
    return None
