"""Swap-in on a CUDA device: pages in pinned memory, plan and copies by kernels."""

from __future__ import annotations

import pytest
import torch

from tests.kernels import located_case, swap_case

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("shape", swap_case.SHAPES)
def test_swap_in(shape: tuple[int, int, int, int], dtype: torch.dtype) -> None:
    swap_case.check(*shape, torch.device("cuda"), dtype, steps=20)


def test_swap_in_after_a_month() -> None:
    cuda, clock = torch.device("cuda"), swap_case.LATE - 6
    swap_case.check(3, 5, 7, 40, cuda, torch.float32, clock=clock)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("shape", swap_case.STAGED)
def test_swap_in_for_prompts(shape: tuple[int, int, int], dtype: torch.dtype) -> None:
    swap_case.check_stage(*shape, torch.device("cuda"), dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_whole_pages_between_host_and_device(dtype: torch.dtype) -> None:
    swap_case.check_pages(torch.device("cuda"), dtype)


def test_swap_in_of_pages_in_several_pieces() -> None:
    swap_case.check_pieces(torch.device("cuda"))


@pytest.mark.parametrize("seqs", [1, 8, 40])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("by_lse", [True, False])
def test_pages_that_come_late(dtype: torch.dtype, seqs: int, by_lse: bool) -> None:
    """Few programs share the pages of many sequences, and loads run ahead in bf16."""
    cuda = torch.device("cuda")
    located_case.check(cuda, dtype, seqs=seqs, kv_heads=8, topk=32, by_lse=by_lse)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_attention_waits_for_pages_on_their_way(dtype: torch.dtype) -> None:
    located_case.check_waiting(dtype)
