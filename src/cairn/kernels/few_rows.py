"""Products of few rows with quantised matrices, in CUDA C++ (few_rows.cu).

They compute the same as the kernels for few rows in `fp8` and `packed`, up to rounding. Those serve
other GPUs and shapes. Tensor cores multiply loaded numbers directly from registers; Triton would
pass them through shared memory.
"""

from __future__ import annotations

import struct
from functools import cache
from pathlib import Path
from typing import NamedTuple

import torch

from cairn.kernels.cuda_source import (
    MOST_SHARED,
    CudaKernel,
    KernelUnavailableError,
    compile_source,
    device_refusal,
)
from cairn.kernels.interface import FEW_CODE_ROWS, FEW_ROWS
from cairn.kernels.precompile import is_collecting
from cairn.kernels.processors import processors
from cairn.kernels.sizes import blocks_of

_FOLDER = Path(__file__).parent
_ROWS = "2Q2if4x"  # struct Rows in the source
_ROW_ARGUMENTS = struct.Struct(f"{_ROWS}3Q")  # struct RowArguments
_ARGUMENTS = struct.Struct(f"{_ROWS}7Q6i")  # struct Arguments
_TILE = 16  # rows of the matrix


def row_rungs() -> tuple[int, ...]:
    """Row counts at which products switch to another compiled form."""
    return 1, 2, FEW_ROWS + 1, FEW_CODE_ROWS + 1


class Form(NamedTuple):
    """How numbers are stored; macros of the source, which explains them."""

    fp8: bool
    grouped: bool
    bits: int = 8
    subs: int = 1
    minimum: bool = False
    sub_scale: bool = False
    sub_minimum: bool = False
    whole: bool = False
    gated: bool = False

    def in_whole_numbers(self, rows: int) -> bool:
        """WHOLE_NUMBERS in the source."""
        return rows == 1 and not self.fp8 and self.subs == 1

    def floats(self, rows: int) -> int:
        """Of a chunk; FLOATS in the source."""
        if self.in_whole_numbers(rows):
            return 8
        return 1 + (0 if self.fp8 else 1 if self.whole else 4 * self.subs)

    @property
    def chunk(self) -> int:
        """Columns of 64 bytes."""
        return 512 // self.bits


class Plan(NamedTuple):
    """How a multiprocessor runs the kernel; macros of the source too."""

    warps: int
    depth: int
    blocks: int


def plan_of(form: Form, rows: int, tiles: int, chunks: int, device: torch.device) -> Plan:
    """As many blocks as have enough registers. Where there are too few tiles for that, blocks are
    larger, if all warps have columns."""
    few = tiles <= processors(device) * (1 if form.fp8 else 3)
    if rows == 1 and few and chunks >= 16:
        return Plan(16, 4, 1)
    return Plan(8, 4, 3 if form.fp8 and rows == 1 else 2)


def shift_of(per_scale: int, scales: int) -> int | None:
    """For `Matrix`; None if the kernel cannot find the scales of a column."""
    if scales == 1:
        return 31
    return per_scale.bit_length() - 1 if per_scale.bit_count() == 1 else None


class Matrix(NamedTuple):
    """A matrix [outputs, columns] as the kernel reads it."""

    form: Form
    weight: torch.Tensor
    scale: torch.Tensor  # [outputs, scales], or as `Packed` has it
    shift: int  # 2**shift chunks (FP8) or blocks of 32 columns (codes) have one scale
    outputs: int
    columns: int
    inner: torch.Tensor | None = None
    offset: int = 0

    @property
    def tensors(self) -> tuple[torch.Tensor | None, ...]:
        return self.weight, self.scale, self.inner


def fp8_matrix(
    weight: torch.Tensor,  # [outputs, columns] e4m3
    scale: torch.Tensor,  # [outputs, groups]
    group: int,  # columns with one scale; 0 for all
) -> Matrix | None:
    """None if the kernel cannot read it."""
    form = Form(True, group > 0)
    chunks, rest = divmod(group, form.chunk)
    shift = None if rest else shift_of(chunks, scale.shape[1])
    if shift is None:
        return None
    return Matrix(form, weight, scale, shift, *weight.shape)


def source() -> str:
    names = "hopper.cuh", "few_rows_inputs.cuh", "few_rows.cu"
    return "".join((_FOLDER / name).read_text() for name in names)


def constants_of(form: Form, rows: int, plan: Plan, dtype: torch.dtype) -> dict[str, int]:
    """The macros that the source needs, for blocks of `rows` rows."""
    own = {**form._asdict(), **plan._asdict()}
    half = {"HALF": 1, "X_HALF": int(dtype == torch.float16)}
    return {**{name.upper(): int(value) for name, value in own.items()}, **half, "ROWS": rows}


@cache
def refusal(device: torch.device) -> str | None:
    """Why there is no kernel for this device; None if there is one."""
    reason = device_refusal(device)
    if reason is not None:
        return reason
    try:
        _kernels(Form(fp8=True, grouped=False), 1, Plan(8, 4, 3), torch.bfloat16, device)
    except KernelUnavailableError as error:
        return str(error)
    return None


def serves(x: torch.Tensor, matrix: Matrix, *, norm: bool) -> bool:
    """Whether there is a kernel for these rows: every warp of a block has columns, and a single row
    fits into shared memory. Codes are read again for every few rows, up to the number from which on
    it is better to widen them."""
    form = matrix.form
    most = FEW_ROWS if form.fp8 else FEW_CODE_ROWS
    chunks, rest = divmod(matrix.columns, form.chunk)
    plan = plan_of(form, 1, 2**31, chunks, x.device)
    room = MOST_SHARED // plan.blocks - 1024
    fits = len(x) > 1 or shared_bytes(form, 1, plan, chunks, norm=norm) <= room
    shape = 0 < len(x) <= most and rest == 0 and chunks >= plan.warps and fits
    halves = x.dtype in (torch.bfloat16, torch.float16) and x.data_ptr() % 16 == 0
    return shape and halves and refusal(x.device) is None


def shared_bytes(form: Form, rows: int, plan: Plan, chunks: int, *, norm: bool) -> int:
    """Bytes of struct Memory in the source."""
    sums = 2 * plan.warps * _TILE * (1 if rows == 1 else rows + 1) * 4
    if rows > 1:
        return sums
    floats = blocks_of(chunks * form.floats(1), 4) * 16
    per_column = 4 if form.in_whole_numbers(rows) and norm else 2
    return sums + blocks_of(plan.warps, 4) * 16 + floats + per_column * chunks * form.chunk


class _Kernels(NamedTuple):
    prepare: CudaKernel | None
    multiply: CudaKernel


@cache
def _kernels(
    form: Form, rows: int, plan: Plan, dtype: torch.dtype, device: torch.device
) -> _Kernels:
    cubin = compile_source(source(), constants_of(form, rows, plan, dtype), "sm_90a")
    threads = 32 * plan.warps
    prepare = None
    if rows > 1:
        prepare = CudaKernel(cubin, "prepare_rows", threads, 8 * plan.warps, device)
    most = MOST_SHARED // plan.blocks - 1024
    return _Kernels(prepare, CudaKernel(cubin, "few_rows", threads, most, device))


class Call(NamedTuple):
    """The launches of a product."""

    form: Form
    rows: int  # of a block
    plan: Plan
    prepare: bytes  # the argument of the first kernel, if there is one
    prepare_blocks: int
    multiply: bytes
    multiply_blocks: int
    shared: int  # bytes of shared memory
    held: tuple[torch.Tensor, ...] = ()
    """What the kernels write for each other."""


def call_of(
    x: torch.Tensor,
    matrix: Matrix,
    out: torch.Tensor,
    norm: tuple[torch.Tensor, float] | None = None,
    *,
    add: bool = False,
    alone: bool | None = None,  # x is the only row of a product; by default, if it is one row
    plan: Plan | None = None,
) -> Call:
    form, count, device = matrix.form, len(x), x.device
    chunks = matrix.columns // form.chunk
    rows = 1 if (count == 1 if alone is None else alone) else FEW_ROWS
    outputs = matrix.outputs // 2 if form.gated else matrix.outputs
    tiles = outputs // 8 if form.gated else blocks_of(outputs, _TILE)
    plan = plan or plan_of(form, rows, tiles, chunks, device)
    held: tuple[torch.Tensor, ...] = ()
    if rows > 1:
        held = (
            torch.empty(rows, matrix.columns, dtype=torch.float16, device=device),
            torch.empty(chunks, form.floats(rows), rows, dtype=torch.float32, device=device),
            torch.empty(rows, plan.warps, dtype=torch.float32, device=device),
        )
    made = [own.data_ptr() for own in held] or [0, 0, 0]
    norm_weight, eps = (0, 0.0) if norm is None else (norm[0].data_ptr(), norm[1])
    of_rows = x.data_ptr(), norm_weight, matrix.columns, matrix.offset, eps
    return Call(
        form,
        rows,
        plan,
        _ROW_ARGUMENTS.pack(*of_rows, *made) if rows > 1 else b"",
        count,
        _ARGUMENTS.pack(
            *of_rows, *made,
            *(0 if own is None else own.data_ptr() for own in matrix.tensors), out.data_ptr(),
            count, tiles, outputs, matrix.scale.shape[1], matrix.shift, add,
        ),
        min(tiles, processors(device) * plan.blocks),
        shared_bytes(form, rows, plan, chunks, norm=norm is not None),
        held,
    )  # fmt: skip


def _launch(call: Call, x: torch.Tensor) -> None:
    kernels = _kernels(call.form, call.rows, call.plan, x.dtype, x.device)
    if is_collecting():
        return
    if kernels.prepare is not None:
        kernels.prepare.launch((call.prepare_blocks,), call.prepare, pdl=True)
    kernels.multiply.launch(
        (call.multiply_blocks,), call.multiply, shared_bytes=call.shared, pdl=True
    )


def product(
    x: torch.Tensor,  # [rows, in], contiguous; `serves` it
    matrix: Matrix,
    *,
    norm: tuple[torch.Tensor, float] | None = None,  # weight [in], epsilon: apply RMS norm to x
    add_to: torch.Tensor | None = None,  # [rows, out], contiguous; added to and returned
) -> torch.Tensor:
    """-> [rows, out]; half as many if gated"""
    out = add_to
    if out is None:
        outputs = matrix.outputs // 2 if matrix.form.gated else matrix.outputs
        out = torch.empty(len(x), outputs, dtype=x.dtype, device=x.device)
    add, alone = add_to is not None, len(x) == 1
    for own, result in zip(x.split(FEW_ROWS), out.split(FEW_ROWS), strict=True):
        _launch(call_of(own, matrix, result, norm, add=add, alone=alone), own)
    return out


def gated(matrix: Matrix) -> Matrix | None:
    """The same matrix of gate and up, for silu(gate) * up; None if the kernel has no such tiles."""
    if matrix.outputs % 16:
        return None
    return matrix._replace(form=matrix.form._replace(gated=True))
