"""Decode over latent rows in CUDA C++, compiled for compute capability 9.0."""

from __future__ import annotations

import pytest
import torch

from cairn.kernels.cuda_source import KernelUnavailableError, compile_source
from cairn.kernels.latent_decode import constants_of, refusal, source


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_it_compiles(dtype: torch.dtype) -> None:
    try:
        cubin = compile_source(source(), constants_of(128, 64, 8, dtype), "sm_90a")
    except KernelUnavailableError as error:
        if "not installed" in str(error):
            pytest.skip(str(error))
        raise
    assert cubin.startswith(b"\x7fELF")


def test_other_devices_are_refused_with_a_reason() -> None:
    reason = refusal(128, 512, 64, 64, torch.bfloat16, torch.device("cpu"))
    assert reason == "it is for CUDA devices, this is cpu"
