"""Selection of rows in CUDA C++, without a GPU: its source compiled for the CPU, with every lane of
a warp as a fiber, and compiled for compute capability 9.0 where NVRTC is installed."""

from __future__ import annotations

import ctypes
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from cairn.kernels import choose_rows as module
from cairn.kernels.choose_rows import cluster_of, constants_of, pack, shared_bytes, words_of
from cairn.kernels.cuda_source import KernelUnavailableError, compile_source
from tests.kernels import row_case

HERE = Path(__file__).parent
CPU = torch.device("cpu")
COMPILER = shutil.which("g++")
CONSTANTS = constants_of(threads=64, listed=48)


@pytest.fixture(scope="module")
def launch(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., int]:
    if COMPILER is None:
        pytest.skip("needs g++")
    library = tmp_path_factory.mktemp("emulated") / "emulated.so"
    command = [COMPILER, "-std=c++20", "-O1", "-fPIC", "-shared", "-w"]
    command += [f"-D{name}={value}" for name, value in CONSTANTS.items()]
    command += [f"-I{Path(module.__file__).parent}", "-o", str(library)]
    subprocess.run([*command, str(HERE / "emulate_choose_rows.cpp")], check=True)
    found: Callable[..., int] = ctypes.CDLL(str(library)).launch
    return found


@pytest.mark.parametrize("cluster", [1, 4])
@pytest.mark.parametrize("kind", row_case.KINDS)
def test_emulated_lanes_choose_the_best(
    kind: str, cluster: int, launch: Callable[..., int]
) -> None:
    """Blocks list few scores, so that some parts are listed and others are read again."""

    def choose(*tensors: torch.Tensor, page_size: int) -> None:
        (rows, length), k = tensors[0].shape, tensors[4].shape[1]
        words = words_of(length, cluster)
        arguments = pack(tensors, k, page_size, words)
        shared = shared_bytes(CONSTANTS, words)
        assert launch(arguments, len(arguments), rows, cluster, shared) == 0

    row_case.check_top(kind, [1, 17, 18, 130, 1500], 17, CPU, choose=choose)
    row_case.check_top(kind, [900], 300, CPU, choose=choose)


def test_few_rows_are_shared_by_more_blocks() -> None:
    assert [cluster_of(rows, 65536, 264) for rows in (1, 16, 33, 34, 66, 132, 133, 1000)] == [
        *(8, 8, 8, 4, 4, 2, 1, 1)
    ]
    for rows in (1, 64, 1000):  # maps fit into shared memory whatever the length
        length = 2**21 - 128
        words = words_of(length, cluster_of(rows, length, 264))
        assert shared_bytes(constants_of(), words) <= 233472 // 2 - 1024 + 8192


def test_source_compiles_for_a_gpu_that_is_not_here() -> None:
    try:
        cubin = compile_source(module.source(), constants_of(), "sm_90")
    except KernelUnavailableError as error:
        if "not installed" not in str(error):
            raise
        pytest.skip(str(error))
    assert b"choose_rows" in cubin
