"""Swap-in on a CUDA device: pages in pinned memory, plan and copies by kernels."""

from __future__ import annotations

import pytest
import torch

from tests.kernels import swap_case

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("shape", swap_case.SHAPES)
def test_swap_in(shape: tuple[int, int, int, int], dtype: torch.dtype) -> None:
    swap_case.check(*shape, torch.device("cuda"), dtype, steps=20)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_whole_pages_between_host_and_device(dtype: torch.dtype) -> None:
    swap_case.check_pages(torch.device("cuda"), dtype)
