"""Matrices of 16 and 8 bits: products from the form in which a file has them."""

from __future__ import annotations

import pytest
import torch

from cairn.kernels.cpu import FLOAT_KINDS, CpuKernels
from cairn.models.blocks import Kept, Stack
from cairn.models.narrow import Narrow, NarrowMatrix
from cairn.models.quantize import to_int8

OUTPUTS, COLUMNS = 76, 300  # neither a multiple of 16


def random_matrix(dtype: torch.dtype, outputs: int = OUTPUTS, span: int = 128) -> Narrow:
    draw = torch.Generator().manual_seed(0)
    values = torch.randn(outputs, COLUMNS, generator=draw)
    if dtype.itemsize > 1:
        return Narrow(values.to(dtype))
    scale = torch.rand(outputs, -(-COLUMNS // span), generator=draw) + 0.5
    return Narrow((values * 50).to(dtype), scale, span)


def rows(count: int, columns: int = COLUMNS) -> torch.Tensor:
    return torch.randn(count, columns, generator=torch.Generator().manual_seed(1))


def test_every_number_of_a_type_is_multiplied_as_what_it_is(kernels: CpuKernels) -> None:
    """The kernel takes numbers apart bit by bit: all of FP8 and int8, and all of 16 bits."""
    for dtype in FLOAT_KINDS[1:]:
        bits = torch.int16 if dtype.itemsize == 2 else torch.int8
        limits = torch.iinfo(bits)
        every = torch.arange(limits.min, limits.max + 1).to(bits).view(dtype)
        every = every[every.float().isfinite()]
        found = NarrowMatrix(Narrow(every[:, None]), kernels).product(torch.ones(1, 1))
        assert torch.equal(found[0], every.float())


@pytest.mark.parametrize("dtype", FLOAT_KINDS)
@pytest.mark.parametrize("span", [128, 20, COLUMNS])
def test_kernel_equals_the_widened_matrix_however_many_rows_there_are(
    dtype: torch.dtype, span: int, kernels: CpuKernels
) -> None:
    given, x = random_matrix(dtype, span=span), rows(21)
    exact = x.double() @ given.dense().double().t()
    reference, matrix = NarrowMatrix(given, None), NarrowMatrix(given, kernels)
    found = matrix.product(x)
    for own in (found, reference.product(x)):
        assert (own - exact).abs().max() < 1e-6 * exact.abs().max()
    for count in (1, 2, 3, 7, 8, 12):
        assert torch.equal(matrix.product(x[:count]), found[:count])
    assert torch.equal(matrix.product(x[20:]), found[20:])
    assert torch.equal(matrix.dense(), given.dense())
    ids = torch.tensor([75, 0, 17, 17])
    assert torch.equal(matrix.rows(ids), given.dense()[ids])


def test_norm_activation_and_addition_are_part_of_a_product(kernels: CpuKernels) -> None:
    x, both, stream = rows(5), rows(5, 2 * COLUMNS), rows(5, OUTPUTS)
    both[0, :4] = torch.tensor([-1000.0, 1000.0, 0.0, -20.0])
    weight = rows(1).abs()[0]
    reference, matrix = (NarrowMatrix(random_matrix(torch.bfloat16), k) for k in (None, kernels))
    expected = stream + reference.product(x, norm=(weight, 1e-5))
    out = stream.clone()
    assert matrix.product(x, out, norm=(weight, 1e-5), add=True) is out
    torch.testing.assert_close(out, expected, rtol=1e-4, atol=1e-4)
    expected = reference.product(both, silu=True)
    torch.testing.assert_close(matrix.product(both, silu=True), expected, rtol=1e-4, atol=1e-2)
    one_by_one = torch.cat([matrix.product(row[None], silu=True) for row in both])
    assert torch.equal(matrix.product(both, silu=True), one_by_one)


def test_a_result_does_not_depend_on_threads(kernels: CpuKernels) -> None:
    x, before = rows(200), torch.get_num_threads()
    matrix, results = NarrowMatrix(random_matrix(torch.float16, 200), kernels), []
    for threads in (1, 2, 3):
        torch.set_num_threads(threads)
        results.append(matrix.product(x))
    torch.set_num_threads(before)
    assert torch.equal(results[0], results[1]) and torch.equal(results[0], results[2])


def test_matrices_of_several_types_make_one_product(kernels: CpuKernels) -> None:
    x = rows(3)[:, :288]
    parts = [
        Narrow(random_matrix(dtype).values[:, :288])
        for dtype in (torch.float16, torch.bfloat16, torch.bfloat16)
    ]
    kept: list[Kept] = [*parts, to_int8(parts[0].dense())]
    stack, weights = Stack(kept, kernels), torch.cat([part.dense() for part in kept])
    assert torch.equal(stack.dense(), weights)
    torch.testing.assert_close(stack.product(x), x @ weights.t(), rtol=1e-3, atol=1e-3)
    order = torch.arange(OUTPUTS).flip(0)
    fp8 = random_matrix(torch.float8_e4m3fn)
    assert torch.equal(fp8.with_rows(order).dense(), fp8.dense().flip(0))
