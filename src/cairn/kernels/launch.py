"""Launches kernels without Triton's analysis of the arguments on every launch.

Triton inspects each argument of each launch to find the compiled form of the kernel that fits. In a
step without a graph, which launches hundreds of kernels, this is a large part of the host's work.
`direct` caches compiled forms under a smaller key. Arguments with the same key always need the same
form.

In every kernel, numbers that change from step to step are `do_not_specialize` and have a type
annotation. Otherwise a step could need a form of its own and would wait while it is compiled. For
the same reason, pointers that change from step to step are aligned to 16 bytes (see `packing`).
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
    """Decorator for kernels. Constants must be passed by name at launch."""
    return DirectKernel(jit)


class DirectKernel:
    """A kernel launched like Triton's own: kernel[grid](*arguments, **constants and options).

    While a `Collector` is Triton's hook, it collects forms and launches nothing.
    """

    def __init__(self, jit: Any) -> None:
        self.jit = jit
        self._compiled: dict[Hashable, tuple[Any, tuple[Any, ...]]] = {}
        # One function per argument. In the interpreter, jit has no `params` and needs no forms.
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
            if (self, key) not in hook.seen:  # layers repeat, and warmup is slow
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
    """The properties of an argument that decide which compiled form of a kernel it needs."""
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
    """`form_of` for numbers that the kernel is not specialized on: the kernel declares the type."""
    return None
