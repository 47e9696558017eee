"""Arguments that are told apart by what `direct` sees are those that Triton tells apart."""

from __future__ import annotations

import importlib
import pkgutil
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

triton = pytest.importorskip("triton")

from triton._C.libtriton import native_specialize_impl  # noqa: E402
from triton.backends.nvidia.compiler import CUDABackend  # noqa: E402
from triton.tools.tensor_descriptor import TensorDescriptor  # noqa: E402

from cairn import kernels  # noqa: E402
from cairn.kernels.launch import DirectKernel, form_of  # noqa: E402

MEMORY = torch.zeros(64, dtype=torch.uint8)
TENSORS = st.builds(
    lambda dtype, start: MEMORY[start:].view(dtype)[1:],
    st.sampled_from([torch.uint8, torch.int8]),
    st.integers(0, 32),
) | st.sampled_from([torch.zeros(8, dtype=d) for d in (torch.float32, torch.bfloat16, torch.int64)])
NUMBERS = st.sampled_from([0, 1, 2, 16, 2**31 - 1, 2**31, 2**31 + 16, -1, -16, -(2**31) - 1])
DESCRIPTORS = st.builds(
    lambda dtype, block: TensorDescriptor.from_tensor(torch.zeros(8, 16, dtype=dtype), block),
    st.sampled_from([torch.float32, torch.bfloat16]),
    st.sampled_from([[4, 16], [8, 16]]),
)
ARGUMENTS = TENSORS | NUMBERS | st.integers(-(2**40), 2**40) | st.floats() | DESCRIPTORS


def compiled_form(argument: Any) -> Any:
    return native_specialize_impl(CUDABackend, argument, False, True, True)


@given(ARGUMENTS, ARGUMENTS)
def test_arguments_of_one_form_are_compiled_alike(first: Any, second: Any) -> None:
    if form_of(first) == form_of(second):
        assert compiled_form(first) == compiled_form(second)


@given(st.integers(-(2**40), 2**40), st.integers(0, 2**20))
def test_numbers_that_are_compiled_alike_have_one_form(first: int, steps: int) -> None:
    """Else memory would fill with copies of the same kernel."""
    second = first + 16 * steps
    if compiled_form(first) == compiled_form(second):
        assert form_of(first) == form_of(second)


def test_what_has_no_form_is_refused() -> None:
    with pytest.raises(TypeError, match="str"):
        form_of("text")


def test_numbers_that_are_not_specialised_for_have_a_type() -> None:
    """Else a kernel would have a form for numbers of 32 bits and another one."""
    names = [module.name for module in pkgutil.iter_modules(kernels.__path__)]
    found = [
        param
        for name in names
        for kernel in vars(importlib.import_module(f"cairn.kernels.{name}")).values()
        if isinstance(kernel, DirectKernel)
        for param in kernel.jit.params
        if param.do_not_specialize
    ]
    assert len(found) > 20
    assert {param.annotation_type for param in found} == {"i32", "i64"}
