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
from cairn.kernels.cuda_source import MOST_SHARED, KernelUnavailableError, compile_source
from cairn.kernels.interface import MOST_SCORES
from tests.kernels import row_case

HERE = Path(__file__).parent
CPU = torch.device("cpu")
COMPILER = shutil.which("g++")
Launch = Callable[..., int]


def built(constants: dict[str, int], folder: Path) -> Launch:
    if COMPILER is None:
        pytest.skip("needs g++")
    library = folder / "emulated.so"
    command = [COMPILER, "-std=c++20", "-O1", "-fPIC", "-shared", "-w"]
    command += [f"-D{name}={value}" for name, value in constants.items()]
    command += [f"-I{Path(module.__file__).parent}", "-o", str(library)]
    subprocess.run([*command, str(HERE / "emulate_choose_rows.cpp")], check=True)
    found: Launch = ctypes.CDLL(str(library)).launch
    return found


def chooser(launch: Launch, constants: dict[str, int], cluster: int) -> Callable[..., None]:
    def choose(*tensors: torch.Tensor, page_size: int) -> None:
        (rows, length), k = tensors[0].shape, tensors[4].shape[1]
        words = words_of(length, cluster)
        arguments = pack(tensors, k, page_size, words)
        shared = shared_bytes(constants, words)
        assert launch(arguments, len(arguments), rows, cluster, shared) == 0

    return choose


SMALL = constants_of(threads=64, listed=48)


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> Launch:
    return built(SMALL, tmp_path_factory.mktemp("emulated"))


@pytest.mark.parametrize("cluster", [1, 4])
@pytest.mark.parametrize("kind", row_case.KINDS)
def test_emulated_lanes_choose_the_best(kind: str, cluster: int, small: Launch) -> None:
    """Blocks list few scores, so that some rows are listed and others are read again."""
    choose = chooser(small, SMALL, cluster)
    row_case.check_top(kind, [1, 17, 18, 130, 1500], 17, CPU, choose=choose)
    row_case.check_top(kind, [900], 300, CPU, choose=choose)


def test_emulated_lanes_with_the_sizes_of_a_launch(tmp_path: Path) -> None:
    constants = constants_of()
    choose = chooser(built(constants, tmp_path), constants, 2)
    for kind, length in (("random", 20_000), ("equal", 7000)):
        row_case.check_top(kind, [length], 2048, CPU, choose=choose)


def test_few_rows_are_shared_by_more_blocks() -> None:
    clusters = {1: 132, 2: 66, 4: 30, 8: 14}
    rows = (1, 14, 15, 30, 31, 66, 67, 1000)
    assert [cluster_of(n, 65536, clusters) for n in rows] == [8, 8, 4, 4, 2, 2, 1, 1]
    for n in rows:  # maps fit into shared memory whatever the length
        words = words_of(MOST_SCORES, cluster_of(n, MOST_SCORES, clusters))
        assert shared_bytes(constants_of(), words) <= MOST_SHARED


def test_source_compiles_for_a_gpu_that_is_not_here() -> None:
    try:
        cubin = compile_source(module.source(), constants_of(), "sm_90")
    except KernelUnavailableError as error:
        if "not installed" not in str(error):
            raise
        pytest.skip(str(error))
    assert b"choose_rows" in cubin
