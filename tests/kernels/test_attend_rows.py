"""Attention over chosen rows in CUDA C++, without a GPU: its source compiled for the CPU, with
every lane of a warp as a fiber, and compiled for compute capability 9.0 where NVRTC is installed.
"""

from __future__ import annotations

import ctypes
import shutil
import subprocess
from functools import partial
from pathlib import Path

import pytest
import torch

from cairn.kernels import attend_rows as module
from cairn.kernels.attend_rows import (
    SHARED_BYTES,
    clusters_of,
    constants_of,
    pack,
    parts_of,
)
from cairn.kernels.cuda_source import KernelUnavailableError, compile_source
from cairn.kernels.latent_decode import tiles_refusal
from tests.kernels import latent_case, row_case

HERE = Path(__file__).parent
CPU = torch.device("cpu")
COMPILER = shutil.which("g++")


@pytest.mark.skipif(COMPILER is None, reason="needs g++")
def test_emulated_lanes_compute_what_they_must(tmp_path: Path) -> None:
    """Lists in parts and whole; tiles that are full, short and empty, odd and even in number."""
    assert COMPILER is not None
    library = tmp_path / "emulated.so"
    command = [COMPILER, "-std=c++20", "-O2", "-fPIC", "-shared", "-w"]
    command += [f"-D{name}={value}" for name, value in constants_of(64, torch.bfloat16).items()]
    command += [f"-I{Path(module.__file__).parent}", "-o", str(library)]
    subprocess.run([*command, str(HERE / "emulate_attend_rows.cpp")], check=True)
    launch = ctypes.CDLL(str(library)).launch

    def attend(
        query: torch.Tensor, pool: torch.Tensor, slots: torch.Tensor, scale: float, *, parts: int
    ) -> torch.Tensor:
        words = (ctypes.c_uint64 * 16)(query.data_ptr(), 576, 64, 64, len(query) * 64)
        out = torch.full_like(query[..., :512], float("nan"))
        arguments = pack(bytes(words), (pool, slots, out), slots.shape[1], parts, scale)
        held = ctypes.create_string_buffer(len(arguments) + 64)
        aligned = (ctypes.addressof(held) + 63) // 64 * 64
        ctypes.memmove(aligned, arguments, len(arguments))
        size = len(arguments), len(query), parts, SHARED_BYTES
        assert launch(ctypes.c_void_p(aligned), *size) == 0
        return out

    sizes = latent_case.Sizes(64, 512, 64, 64)
    for parts, counts, k in ((1, [150, 0], 150), (2, [200, 3], 256), (3, [300], 300)):
        own = partial(attend, parts=parts)
        row_case.check_attention(counts, k, sizes, CPU, torch.bfloat16, tolerance=1e-2, attend=own)


def test_few_queries_read_in_parts() -> None:
    """As many as are computed at once, or in two turns if that pays."""
    clusters = {1: 132, 2: 66, 3: 40, 4: 30, 5: 22, 6: 18, 7: 16, 8: 14}
    lists = (2, 14, 16, 30, 32, 64, 66, 67, 2000)
    assert [parts_of(n, 32, clusters) for n in lists] == [8, 8, 7, 4, 3, 2, 2, 3, 1]
    assert parts_of(1, 3, clusters) == 3


def test_sizes_of_clusters_that_do_not_fit_are_left_out() -> None:
    assert clusters_of(lambda size: 132 // size if size in (1, 3) else 0) == {1: 132, 3: 44}
    with pytest.raises(KernelUnavailableError, match="no room"):
        clusters_of(lambda size: 0)


def test_other_devices_are_refused_with_a_reason() -> None:
    reason = tiles_refusal(128, 512, 64, torch.bfloat16, CPU)
    assert reason == "it is for CUDA devices, this is cpu"


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_source_compiles_for_a_gpu_that_is_not_here(dtype: torch.dtype) -> None:
    try:
        cubin = compile_source(module.source(), constants_of(128, dtype), "sm_90a")
    except KernelUnavailableError as error:
        if "not installed" not in str(error):
            raise
        pytest.skip(str(error))
    assert b"attend_rows" in cubin
