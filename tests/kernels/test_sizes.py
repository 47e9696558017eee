from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cairn.kernels.sizes import blocks_of, power_of_two

triton = pytest.importorskip("triton")


@given(st.integers(0, 2**40), st.integers(1, 2**20))
def test_blocks_are_tritons(size: int, block: int) -> None:
    assert blocks_of(size, block) == triton.cdiv(size, block)


@given(st.integers(1, 2**31))
def test_powers_are_tritons(least: int) -> None:
    assert power_of_two(least) == triton.next_power_of_2(least)
