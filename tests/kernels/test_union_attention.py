"""Attention over unions in CUDA C++, without a GPU: its source compiled for the CPU, with every
lane of a warp as a fiber, and compiled for compute capability 9.0 where NVRTC is installed."""

from __future__ import annotations

import ctypes
import shutil
import subprocess
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from cairn.kernels import union_attention as module
from cairn.kernels.cuda_source import KernelUnavailableError, compile_source
from cairn.kernels.union_attention import Tuning, constants_of, pack, shape_refusal
from tests.kernels.union_case import SHAPE, UNION_SHAPES, UnionCase, expected_output, union_case

HERE = Path(__file__).parent
CPU = torch.device("cpu")
COMPILER = shutil.which("g++")


def emulated(case: UnionCase, tuning: Tuning, folder: Path) -> tuple[torch.Tensor, torch.Tensor]:
    """Output and counts."""
    assert COMPILER is not None
    shape = case.shape
    constants = constants_of(shape, case.query.dtype, tuning, has_bias=case.bias is not None)
    library = folder / "emulated.so"
    include = Path(module.__file__).parent
    command = [COMPILER, "-std=c++20", "-O1", "-fPIC", "-shared", "-w", f"-I{include}"]
    command += [f"-D{name}={value}" for name, value in constants.items()]
    subprocess.run([*command, "-o", str(library), str(HERE / "emulate.cpp")], check=True)
    blocks = case.blocks(tuning.rows)
    counts = torch.empty(len(blocks.seq), shape.kv_heads, dtype=torch.int32)
    out = case.window_out.clone()  # in place, as the engine has it

    def described(matrix: torch.Tensor, box_rows: int) -> bytes:
        rows, columns = matrix.shape
        words = (ctypes.c_uint64 * 16)(matrix.data_ptr(), columns, 64, box_rows, rows)
        return bytes(words)

    landmarks = shape.landmark_heads // shape.kv_heads
    maps = (
        described(case.pool.view(-1, shape.head_dim), shape.page_size),
        described(case.vectors.view(-1, shape.landmark_width), landmarks),
    )
    tensors = (
        *(case.query, case.scoring, case.window_lse if case.bias is None else case.bias),
        *(case.selected, case.page_table, case.cu_query, blocks.seq, blocks.begin, out),
        *(case.window_lse, case.window_lse if case.normalizer is None else case.normalizer),
        *(out, counts),
    )
    strides = case.query.stride(0), case.scoring.stride(0), case.page_table.stride(0)
    arguments = pack(maps, tensors, strides, shape.scale)
    held = ctypes.create_string_buffer(len(arguments) + 64)
    aligned = (ctypes.addressof(held) + 63) // 64 * 64
    ctypes.memmove(aligned, arguments, len(arguments))
    launch = ctypes.CDLL(str(library)).launch
    shared = module.shared_bytes(shape, tuning)
    status = launch(ctypes.c_void_p(aligned), len(arguments), len(blocks.seq), shared)
    assert status == 0
    return out, counts


@pytest.mark.skipif(COMPILER is None, reason="needs g++")
@pytest.mark.parametrize(
    ("name", "new", "rows", "tiles", "dtype"),
    [
        pytest.param(name, [37], None, 1, torch.bfloat16, marks=[pytest.mark.slow] * (i % 4 != 3))
        for i, name in enumerate(UNION_SHAPES)
    ]
    + [
        ("hils", [1, 19, 3], 32, 1, torch.float16),
        ("unbounded", [20], 16, 2, torch.bfloat16),
        pytest.param("hils", [1, 19, 3], 16, 2, torch.bfloat16, marks=pytest.mark.slow),
        pytest.param("hils", [13], 8, 1, torch.bfloat16, marks=pytest.mark.slow),
    ],
)
def test_emulated_lanes_compute_what_they_must(
    name: str, new: list[int], rows: int | None, tiles: int, dtype: torch.dtype, tmp_path: Path
) -> None:
    shape = UNION_SHAPES[name]
    case = union_case(shape, new, 9, dtype, CPU)
    tuning = Tuning.of(shape, rows, tiles)
    assert tuning is not None
    # Few stages, so that every slot of the ring is used again.
    found, counts = emulated(case, replace(tuning, stages=2), tmp_path)
    expected = expected_output(case)
    torch.testing.assert_close(found.float(), expected, rtol=0.02, atol=0.01)
    assert counts.tolist() == case.pages_read(tuning.rows)


def test_shapes_it_does_not_have_are_named() -> None:
    cases = {
        "head_dim is 80": replace(SHAPE, head_dim=80),
        "page_size is 16": replace(SHAPE, page_size=16),
        "7 query heads": replace(SHAPE, heads=14, landmark_heads=14),
        "landmark_width is 128": replace(SHAPE, landmark_width=128, split_query="signs"),
    }
    for reason, shape in cases.items():
        found = shape_refusal(shape, torch.bfloat16)
        assert found is not None and reason in found
    assert "float32" in (shape_refusal(SHAPE, torch.float32) or "")
    for topk in (1, 8, 32, 128):
        for shape in UNION_SHAPES.values():
            assert shape_refusal(replace(shape, topk=topk), torch.bfloat16) is None


def test_source_compiles_for_a_gpu_that_is_not_here(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Once: what was compiled is kept."""
    monkeypatch.setenv("CAIRN_CACHE", str(tmp_path))
    tuning = Tuning.of(SHAPE)
    assert tuning is not None
    constants = constants_of(SHAPE, torch.bfloat16, tuning, has_bias=True)
    try:
        cubin = compile_source(module.source(), constants, "sm_90")
    except KernelUnavailableError as error:
        if "not installed" not in str(error):
            raise
        pytest.skip(str(error))
    (kept,) = (tmp_path / "kernels").iterdir()
    assert kept.read_bytes() == cubin and b"union_attention" in cubin
    kept.write_bytes(b"kept")
    assert compile_source(module.source(), constants, "sm_90") == b"kept"
    with pytest.raises(KernelUnavailableError, match="cannot compile"):
        compile_source("no source", constants, "sm_90")
