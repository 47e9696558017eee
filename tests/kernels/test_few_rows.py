"""Products of few rows in CUDA C++, without a GPU: sources compiled for the CPU, with every lane of
a warp as a fiber, and compiled for compute capability 9.0 where NVRTC is installed."""

from __future__ import annotations

import ctypes
import shutil
import subprocess
from collections.abc import Mapping
from pathlib import Path

import pytest
import torch

from cairn.bench.products import random_codes
from cairn.kernels import code_rows, few_rows
from cairn.kernels.code_rows import CodeMatrix, RowPlan, TilePlan
from cairn.kernels.cuda_source import ALL_SHARED, KernelUnavailableError, compile_source
from cairn.kernels.references import rms_norm_reference
from cairn.models.gpu_matrix import PackedMatrix
from tests.kernels.few_rows_case import FewRowsCase, few_rows_case

HERE = Path(__file__).parent
CPU = torch.device("cpu")
COMPILER = shutil.which("g++")
needs_compiler = pytest.mark.skipif(COMPILER is None, reason="needs g++")


def compiled(name: str, constants: Mapping[str, int], folder: Path) -> ctypes.CDLL:
    """A kernel as a library for the CPU."""
    assert COMPILER is not None
    library = folder / "emulated.so"
    include = Path(few_rows.__file__).parent
    command = [COMPILER, "-std=c++20", "-O1", "-fPIC", "-shared", "-w", f"-I{include}"]
    command += [f"-D{name}={value}" for name, value in constants.items()]
    subprocess.run([*command, "-o", str(library), str(HERE / name)], check=True)
    return ctypes.CDLL(str(library))


def output_of(case: FewRowsCase) -> torch.Tensor:
    if case.stream is not None:
        return case.stream.clone()
    return torch.full(case.expected.shape, torch.nan, dtype=case.x.dtype)


def emulate_fp8(case: FewRowsCase, folder: Path) -> torch.Tensor:
    assert isinstance(case.matrix, few_rows.Fp8FewRows)
    out, dtype = output_of(case), case.x.dtype
    call = few_rows.call_of(case.x, case.matrix, out, case.norm, add=case.stream is not None)
    for held in call.held:
        held.fill_(torch.nan if held.is_floating_point() else 255)
    constants = few_rows.constants_of(call.form, call.rows, call.plan, dtype)
    loaded = compiled("emulate_few_rows.cpp", constants, folder)
    if call.prepare:
        assert loaded.prepare_all(call.prepare, len(call.prepare), call.prepare_blocks, 0) == 0
    given = call.multiply, len(call.multiply), call.multiply_blocks, call.shared
    assert loaded.multiply_all(*given) == 0
    return out


def emulate_codes(case: FewRowsCase, folder: Path) -> torch.Tensor:
    assert isinstance(case.matrix, CodeMatrix)
    out, matrix, add = output_of(case), case.matrix, case.stream is not None
    plan = code_rows.row_plan(matrix, normed=case.norm is not None)
    if len(case.x) == 1 and plan is not None:
        call = code_rows.row_call(case.x, matrix, out, plan, case.norm, add=add)
    else:
        x = case.x
        if case.norm is not None:
            weight, eps = case.norm
            x = rms_norm_reference(x.float(), weight.float(), eps).to(x.dtype)
        call = code_rows.tile_call(x, matrix, out, add=add)
    for held in call.held:
        held.fill_(torch.nan if held.is_floating_point() else 255)
    constants = code_rows.constants_of(call.form, call.plan, case.x.dtype)
    given = call.arguments, len(call.arguments), call.blocks, call.shared
    if isinstance(call.plan, RowPlan):
        loaded = compiled("emulate_code_row.cpp", constants, folder)
        assert loaded.multiply_all(*given) == 0
        return out
    loaded = compiled("emulate_code_tiles.cpp", constants, folder)
    prepared = call.prepare, len(call.prepare), 8 * call.plan.eights, code_rows.PREPARE_SHARED
    assert loaded.prepare_all(*prepared) == 0
    assert loaded.multiply_all(*given, call.cluster) == 0
    return out


@needs_compiler
@pytest.mark.parametrize(
    ("form", "rows", "columns", "kind"),
    [
        ("fp8", 1, 1088, "added"),
        *(
            pytest.param(*case, marks=pytest.mark.slow)
            for case in (
                ("fp8-64", 7, 2176, "added"),
                ("fp8", 5, 1152, "normed"),
                ("fp8", 1, 1152, "gated"),
                ("fp8-128", 1, 4224, "normed"),
            )
        ),
    ],
)
def test_emulated_lanes_multiply_fp8(
    form: str, rows: int, columns: int, kind: str, tmp_path: Path
) -> None:
    outputs = 48 if kind == "gated" else 37
    case = few_rows_case(form, rows, columns, CPU, kind=kind, outputs=outputs)
    case.check(emulate_fp8(case, tmp_path))


@needs_compiler
@pytest.mark.parametrize(
    ("form", "rows", "columns", "kind", "outputs"),
    [
        ("GPTQ", 1, 2304, "normed", 300),
        ("Q4_K", 9, 1280, "gated", 48),
        *(
            pytest.param(*case, marks=pytest.mark.slow)
            for case in (
                ("GPTQ", 1, 2304, "gated", 592),
                ("AWQ", 1, 1280, "added", 37),
                ("Q4_K", 1, 1280, "gated", 48),
                ("Q4_0", 1, 11008, "plain", 37),
                ("Q8_0", 1, 1280, "added", 37),
                ("Q2_K", 1, 1280, "plain", 37),
                ("Q6_K", 3, 1280, "normed", 37),
                ("GPTQ", 5, 1280, "normed", 137),
                ("AWQ", 13, 2304, "added", 37),
                ("Q4_0", 29, 1280, "normed", 137),
                ("Q2_K", 64, 1280, "plain", 37),
                ("Q8_0", 40, 1280, "gated", 48),
            )
        ),
    ],
)
def test_emulated_lanes_multiply_codes(
    form: str, rows: int, columns: int, kind: str, outputs: int, tmp_path: Path
) -> None:
    case = few_rows_case(form, rows, columns, CPU, kind=kind, outputs=outputs)
    case.check(emulate_codes(case, tmp_path))


@pytest.mark.parametrize(
    ("form", "columns", "norm"),
    [("Q4_0", 29696, False), ("Q4_K", 8192, True), ("Q8_0", 8192, True)],
)
def test_blocks_of_two_products_fit_beside_each_other_but_not_two_of_one(
    form: str, columns: int, norm: bool
) -> None:
    """Those that add to the stream. Without a norm they are wider: behind gate and up."""
    matrix = CodeMatrix.of(PackedMatrix(random_codes(form, 16, columns)).packed)
    assert matrix is not None
    plan = code_rows.row_plan(matrix, normed=norm)
    assert plan is not None and plan.depth >= 2
    x = torch.zeros(1, columns, dtype=torch.bfloat16)
    given = (x[0], 1e-6) if norm else None
    out = torch.zeros(1, 16, dtype=x.dtype)
    added = code_rows.row_call(x, matrix, out, plan, given, add=True).shared + 1024
    other = code_rows.row_call(x, matrix, out, plan, given).shared + 1024
    assert other + added <= ALL_SHARED < 2 * added


def test_few_tiles_are_shared_by_blocks() -> None:
    assert code_rows.parts_of(tiles=32, columns=4096, at_once=132) == 4
    assert code_rows.parts_of(tiles=128, columns=4096, at_once=132) == 1


@pytest.mark.parametrize(
    ("name", "constants"),
    [
        ("few_rows", few_rows.constants_of(
            few_rows.Form(True), 8, few_rows.Plan(8, 4, 2), torch.bfloat16)),
        ("code_row", code_rows.constants_of(
            code_rows.Form(4, 3, 1, True, True, True), RowPlan(2, 8), torch.bfloat16)),
        ("code_tiles", code_rows.constants_of(
            code_rows.Form(8, 3, 2, False, True), TilePlan(4, 2, 4, 2, 3, 2), torch.float16)),
    ],
)  # fmt: skip
def test_they_compile_for_a_gpu_that_is_not_here(name: str, constants: dict[str, int]) -> None:
    source = few_rows.source() if name == "few_rows" else code_rows.source(f"{name}.cu")
    try:
        cubin = compile_source(source, constants, "sm_90a")
    except KernelUnavailableError as error:
        if "not installed" in str(error):
            pytest.skip(str(error))
        raise
    assert name.encode() in cubin


def test_other_devices_are_refused_with_a_reason() -> None:
    for kernels in (few_rows, code_rows):
        assert kernels.refusal(CPU) == "it is for CUDA devices, this is cpu"
