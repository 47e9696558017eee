"""Products of few rows with FP8 matrices, in CUDA C++ (few_rows.cu).

They compute the same as the kernels for few rows in `fp8`, up to rounding. Those serve other GPUs
and shapes. Tensor cores multiply loaded numbers directly from registers; Triton would pass them
through shared memory.
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
from cairn.kernels.interface import FEW_ROWS, Norm, is_loadable
from cairn.kernels.precompile import is_collecting
from cairn.kernels.processors import processors
from cairn.kernels.sizes import blocks_of

_FOLDER = Path(__file__).parent
_ROW_ARGUMENTS = struct.Struct("2Qif3Q")  # struct RowArguments in the source
_ARGUMENTS = struct.Struct(f"{_ROW_ARGUMENTS.format}3Q6i")  # struct Arguments
_TILE = 16  # rows of the matrix
_CHUNK = 64  # columns of a step


def row_rungs() -> tuple[int, ...]:
    """Row counts at which products switch to another compiled form."""
    return 1, 2, FEW_ROWS + 1


class Form(NamedTuple):
    """How numbers are stored; macros of the source, which explains them."""

    grouped: bool
    gated: bool = False


class Plan(NamedTuple):
    """How a multiprocessor runs the kernel; macros of the source too."""

    warps: int
    depth: int
    blocks: int


def plan_of(rows: int, tiles: int, chunks: int, device: torch.device) -> Plan:
    """As many blocks as have enough registers. Where there are too few tiles for that, blocks are
    larger, if all warps have columns."""
    if rows == 1 and tiles <= processors(device) and chunks >= 16:
        return Plan(16, 4, 1)
    return Plan(8, 4, 3 if rows == 1 else 2)


class Fp8FewRows(NamedTuple):
    """A matrix [outputs, columns] as the kernel reads it."""

    form: Form
    weight: torch.Tensor
    scale: torch.Tensor  # [outputs, scales]
    shift: int  # 2**shift chunks have one scale

    @classmethod
    def of(
        cls,
        weight: torch.Tensor,  # [outputs, columns] e4m3
        scale: torch.Tensor,  # [outputs, groups]
        group: int,  # columns with one scale; 0 for all
    ) -> Fp8FewRows | None:
        """None if the kernel cannot read it: columns or groups are no multiple of a chunk."""
        if weight.shape[1] % _CHUNK:
            return None
        chunks, rest = divmod(group, _CHUNK)
        if scale.shape[1] == 1:
            return cls(Form(group > 0), weight, scale, 31)
        if rest or chunks.bit_count() != 1:
            return None
        return cls(Form(True), weight, scale, chunks.bit_length() - 1)

    @property
    def columns(self) -> int:
        return self.weight.shape[1]

    @property
    def outputs(self) -> int:
        """Of a product."""
        return len(self.weight) // 2 if self.form.gated else len(self.weight)

    def gated(self) -> Fp8FewRows | None:
        """The same matrix of gate and up, for silu(gate) * up; None if the kernel has no such
        tiles."""
        if len(self.weight) % 16:
            return None
        return self._replace(form=self.form._replace(gated=True))

    def serves(self, x: torch.Tensor) -> bool:
        """Whether there is a kernel for these rows: every warp of a block has columns, and a single
        row fits into shared memory."""
        chunks = self.columns // _CHUNK
        plan = plan_of(1, 2**31, chunks, x.device)
        fits = len(x) > 1 or shared_bytes(1, plan, chunks) <= MOST_SHARED // plan.blocks - 1024
        shape = 0 < len(x) <= FEW_ROWS and chunks >= plan.warps and fits
        return shape and is_loadable(x) and refusal(x.device) is None

    def product(
        self,
        x: torch.Tensor,  # [rows, in], contiguous; `serves` it
        *,
        norm: Norm | None = None,
        add_to: torch.Tensor | None = None,  # [rows, out], contiguous; added to and returned
    ) -> torch.Tensor:
        """-> [rows, out]; half as many if gated"""
        out = add_to
        if out is None:
            out = torch.empty(len(x), self.outputs, dtype=x.dtype, device=x.device)
        _launch(call_of(x, self, out, norm, add=add_to is not None), x)
        return out


def source() -> str:
    names = "hopper.cuh", "product_rows.cuh", "few_rows.cu"
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
        _kernels(Form(grouped=False), 1, Plan(8, 4, 3), torch.bfloat16, device)
    except KernelUnavailableError as error:
        return str(error)
    return None


def shared_bytes(rows: int, plan: Plan, chunks: int) -> int:
    """Bytes of struct Memory in the source."""
    sums = 2 * plan.warps * _TILE * (1 if rows == 1 else rows + 1) * 4
    if rows > 1:
        return sums
    return sums + blocks_of(plan.warps, 4) * 16 + blocks_of(chunks, 4) * 16 + 2 * chunks * _CHUNK


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
    matrix: Fp8FewRows,
    out: torch.Tensor,
    norm: Norm | None = None,
    *,
    add: bool = False,
) -> Call:
    form, count, device = matrix.form, len(x), x.device
    chunks, outputs = matrix.columns // _CHUNK, matrix.outputs
    rows = 1 if count == 1 else FEW_ROWS
    tiles = outputs // 8 if form.gated else blocks_of(outputs, _TILE)
    plan = plan_of(rows, tiles, chunks, device)
    held: tuple[torch.Tensor, ...] = ()
    if rows > 1:
        held = (
            torch.empty(rows, matrix.columns, dtype=torch.float16, device=device),
            torch.empty(chunks, rows, dtype=torch.float32, device=device),
            torch.empty(rows, plan.warps, dtype=torch.float32, device=device),
        )
    made = [own.data_ptr() for own in held] or [0, 0, 0]
    norm_weight, eps = (0, 0.0) if norm is None else (norm[0].data_ptr(), norm[1])
    of_rows = x.data_ptr(), norm_weight, matrix.columns, eps, *made
    return Call(
        form,
        rows,
        plan,
        _ROW_ARGUMENTS.pack(*of_rows) if rows > 1 else b"",
        count,
        _ARGUMENTS.pack(
            *of_rows, matrix.weight.data_ptr(), matrix.scale.data_ptr(), out.data_ptr(),
            count, tiles, outputs, matrix.scale.shape[1], matrix.shift, add,
        ),
        min(tiles, processors(device) * plan.blocks),
        shared_bytes(rows, plan, chunks),
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
