"""Products of few rows in CUDA C++, without a GPU: the source compiled for the CPU, with every lane
of a warp as a fiber, and compiled for compute capability 9.0 where NVRTC is installed."""

from __future__ import annotations

import ctypes
import shutil
import subprocess
from pathlib import Path

import pytest
import torch

from cairn.kernels import few_rows
from cairn.kernels.cuda_source import MOST_SHARED, KernelUnavailableError, compile_source
from cairn.kernels.few_rows import Call, Form, Plan, constants_of
from tests.kernels.few_rows_case import FewRowsCase, few_rows_case

HERE = Path(__file__).parent
CPU = torch.device("cpu")
COMPILER = shutil.which("g++")


def launched(call: Call, dtype: torch.dtype, folder: Path) -> None:
    """Run a product on the CPU."""
    assert COMPILER is not None
    for held in call.held:
        held.fill_(torch.nan)
    library = folder / "emulated.so"
    include = Path(few_rows.__file__).parent
    command = [COMPILER, "-std=c++20", "-O1", "-fPIC", "-shared", "-w", f"-I{include}"]
    constants = constants_of(call.form, call.rows, call.plan, dtype)
    command += [f"-D{name}={value}" for name, value in constants.items()]
    command += ["-o", str(library), str(HERE / "emulate_few_rows.cpp")]
    subprocess.run(command, check=True)
    loaded = ctypes.CDLL(str(library))
    if call.prepare:
        assert loaded.prepare_all(call.prepare, len(call.prepare), call.prepare_blocks) == 0
    assert loaded.multiply_all(call.multiply, len(call.multiply), call.multiply_blocks) == 0


def emulated(case: FewRowsCase, folder: Path) -> torch.Tensor:
    out = torch.full(case.expected.shape, torch.nan, dtype=case.x.dtype)
    if case.stream is not None:
        out = case.stream.clone()
    call = few_rows.call_of(case.x, case.matrix, out, case.norm, add=case.stream is not None)
    launched(call, case.x.dtype, folder)
    return out


@pytest.mark.parametrize(
    ("bits", "columns", "norm"), [(4, 29568, False), (4, 24576, True), (8, 29568, False)]
)
def test_a_row_of_a_large_model_fits_into_shared_memory(
    bits: int, columns: int, norm: bool
) -> None:
    """Products without a norm are the widest: those behind gate and up."""
    form, plan = Form(fp8=False, grouped=False, bits=bits), Plan(8, 4, 2)
    own = few_rows.shared_bytes(form, 1, plan, columns // form.chunk, norm=norm)
    assert own <= MOST_SHARED // plan.blocks - 1024


@pytest.mark.skipif(COMPILER is None, reason="needs g++")
@pytest.mark.parametrize(
    ("form", "rows", "columns", "kind"),
    [
        ("fp8", 1, 1088, "added"),
        ("GPTQ", 1, 2304, "normed"),
        ("Q4_K", 8, 1280, "gated"),
        *(
            pytest.param(*case, marks=pytest.mark.slow)
            for case in (
                ("fp8-64", 7, 2176, "added"),
                ("GPTQ", 5, 1280, "normed"),
                ("Q6_K", 3, 1280, "normed"),
                ("fp8", 5, 1152, "normed"),
                ("fp8", 1, 1152, "gated"),
                ("fp8-128", 1, 4224, "normed"),
                ("GPTQ", 1, 2304, "gated"),
                ("AWQ", 1, 1280, "added"),
                ("Q4_K", 1, 1280, "gated"),
                ("Q4_0", 1, 1280, "plain"),
                ("Q2_K", 1, 1280, "plain"),
                ("Q8_0", 1, 1280, "added"),
            )
        ),
    ],
)
def test_emulated_lanes_compute_what_they_must(
    form: str, rows: int, columns: int, kind: str, tmp_path: Path
) -> None:
    outputs = 48 if kind == "gated" else 37
    case = few_rows_case(form, rows, columns, CPU, kind=kind, outputs=outputs)
    case.check(emulated(case, tmp_path))


@pytest.mark.parametrize(
    ("form", "rows"),
    [(Form(True, True), 1), (Form(False, False, 4, 1, True, True, True), 8)],
    ids=["fp8-1", "q4_k-8"],
)
def test_it_compiles_for_a_gpu_that_is_not_here(form: Form, rows: int) -> None:
    try:
        cubin = compile_source(
            few_rows.source(), constants_of(form, rows, Plan(8, 4, 2), torch.bfloat16), "sm_90a"
        )
    except KernelUnavailableError as error:
        if "not installed" in str(error):
            pytest.skip(str(error))
        raise
    assert b"few_rows" in cubin


def test_other_devices_are_refused_with_a_reason() -> None:
    assert few_rows.refusal(CPU) == "it is for CUDA devices, this is cpu"
