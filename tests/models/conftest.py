"""Fixtures of several tests of models."""

from __future__ import annotations

import pytest

from cairn.kernels.cpu import CpuKernels, CpuKernelsUnavailableError


@pytest.fixture(
    scope="module",
    params=["native", *(pytest.param(f"x86-64{v}", marks=pytest.mark.slow) for v in ("-v3", ""))],
)
def kernels(request: pytest.FixtureRequest) -> CpuKernels:
    """The kernels as compiled for this CPU, for AVX2, and without either."""
    try:
        return CpuKernels.load(request.param)
    except CpuKernelsUnavailableError as error:
        pytest.skip(str(error))
