"""Products of few rows with matrices of codes, in CUDA C++: one row by code_row.cu, up to 64 rows
at a time by code_tiles.cu.

They compute the same as the kernels in `packed`, up to rounding. Those serve other GPUs and shapes.
"""

from __future__ import annotations

import struct
from functools import cache
from pathlib import Path
from typing import NamedTuple

import torch

from cairn.kernels.cuda_source import (
    ALL_SHARED,
    CudaKernel,
    KernelUnavailableError,
    compile_source,
    device_refusal,
)
from cairn.kernels.interface import Norm, is_loadable
from cairn.kernels.norm import rms_norm
from cairn.kernels.packed_layout import BLOCK, Packed
from cairn.kernels.precompile import is_collecting
from cairn.kernels.processors import processors
from cairn.kernels.sizes import blocks_of, power_of_two

_FOLDER = Path(__file__).parent
_ROWS = "2Qif"  # struct Rows in the sources
_ROW_ARGUMENTS = struct.Struct(f"{_ROWS}4Q4i")
_PREPARE_ARGUMENTS = struct.Struct(f"{_ROWS}2Qi4x")
_TILE_ARGUMENTS = struct.Struct("6Q5i4x")
_STAGE = 8  # chunks
_KEPT = 4  # tiles whose sums code_row adds up together
_AT_ONCE = 64  # rows of one launch of code_tiles
_MOST_ROWS = 128  # with more it is faster to widen the matrix in memory
_PREPARE_THREADS = 512
PREPARE_SHARED = _PREPARE_THREADS // 8  # bytes of shared memory
_START_COLUMNS = 1024  # a block's start takes as long as this many columns of its tile

# Shared memory of a block of code_row. Blocks of products that follow each other run beside each
# other, so that the next product loads while this one ends. But two blocks of one product must not
# run on one multiprocessor while another is idle, as they did behind attention. So a product that
# adds to the stream takes so much that two of its blocks do not fit, but one does beside a block of
# another product.
_LARGE = 116 * 1024
_SMALL = ALL_SHARED - _LARGE - 2 * 1024


def row_rungs() -> tuple[int, ...]:
    """Row counts at which products switch to another compiled form."""
    return 1, 2, 9, 17, 33, _MOST_ROWS + 1


class Form(NamedTuple):
    """What a matrix has; macros of the sources (see packed_layout.py)."""

    bits: int
    shift: int  # 2**shift blocks of 32 columns have one scale
    subs: int = 1
    minimum: bool = False
    sub_scale: bool = False
    sub_minimum: bool = False
    gated: bool = False

    @property
    def chunk(self) -> int:
        """Columns of 64 bytes."""
        return 512 // self.bits


class RowPlan(NamedTuple):
    """Macros of code_row.cu."""

    groups: int
    depth: int

    @property
    def warps(self) -> int:
        """That multiply."""
        return _STAGE * self.groups

    @property
    def threads(self) -> int:
        return 32 * (self.warps + self.groups)


class TilePlan(NamedTuple):
    """Macros of code_tiles.cu."""

    eights: int
    warps_out: int
    warps_k: int
    depth: int
    x_depth: int
    blocks: int

    @property
    def threads(self) -> int:
        return 32 * self.warps_out * self.warps_k

    @property
    def outputs(self) -> int:
        """Of a tile, gate and up counted apart."""
        return 32 * self.warps_out


_WIDE_TILES = {
    1: TilePlan(1, 1, 8, 2, 4, 2),
    2: TilePlan(2, 1, 8, 2, 2, 2),
    4: TilePlan(4, 2, 4, 2, 3, 2),
    8: TilePlan(8, 2, 4, 2, 2, 1),
}
"""By eights of rows. Measured on an H200, as the next one."""
_NARROW_TILES = {**_WIDE_TILES, 4: TilePlan(4, 1, 8, 2, 2, 1)}
"""For matrices with fewer tiles than multiprocessors."""


def tile_plan(rows: int, outputs: int, device: torch.device) -> TilePlan:
    eights = power_of_two(blocks_of(rows, 8))
    wide = _WIDE_TILES[eights]
    few = blocks_of(outputs, wide.outputs) < processors(device)
    return _NARROW_TILES[eights] if few else wide


class CodeMatrix(NamedTuple):
    """A matrix as the kernels read it."""

    form: Form
    packed: Packed

    @classmethod
    def of(cls, packed: Packed) -> CodeMatrix | None:
        """None if the kernels cannot read it: columns are no multiple of a chunk."""
        has = packed.has_minimum, packed.has_sub_scale, packed.has_sub_minimum
        per_scale = packed.columns // BLOCK // packed.scale.shape[1]
        shift = per_scale.bit_length() - 1
        form = Form(packed.bits, shift, packed.subs, *has)
        return None if packed.columns % form.chunk else cls(form, packed)

    def gated(self) -> CodeMatrix | None:
        """The same matrix of gate and up, for silu(gate) * up; None if the kernels have no such
        tiles."""
        if self.packed.outputs % 16:
            return None
        return self._replace(form=self.form._replace(gated=True))

    @property
    def outputs(self) -> int:
        """Of a product."""
        return self.packed.outputs // 2 if self.form.gated else self.packed.outputs

    @property
    def chunks(self) -> int:
        return self.packed.columns // self.form.chunk

    @property
    def pointers(self) -> tuple[int, int, int]:
        own = self.packed
        inner = 0 if own.inner is None else own.inner.data_ptr()
        return own.words.data_ptr(), own.scale.data_ptr(), inner

    def serves(self, x: torch.Tensor) -> bool:
        """Whether there are kernels for these rows."""
        return 0 < len(x) <= _MOST_ROWS and is_loadable(x) and refusal(x.device) is None

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
        add = add_to is not None
        plan = row_plan(self, normed=norm is not None) if len(x) == 1 else None
        if norm is not None and plan is None:
            x, norm = rms_norm(x, *norm), None
            plan = row_plan(self, normed=False) if len(x) == 1 else None
        if plan is not None:
            launch_row(row_call(x, self, out, plan, norm, add=add), x)
            return out
        for own, result in zip(x.split(_AT_ONCE), out.split(_AT_ONCE), strict=True):
            launch_tiles(tile_call(own, self, result, add=add), own)
        return out


def source(name: str) -> str:
    names = "hopper.cuh", "product_rows.cuh", name
    return "".join((_FOLDER / name).read_text() for name in names)


def constants_of(form: Form, plan: RowPlan | TilePlan, dtype: torch.dtype) -> dict[str, int]:
    """The macros that a source needs."""
    own = {**form._asdict(), **plan._asdict()}
    types = {"HALF": 1, "X_HALF": int(dtype == torch.float16)}
    return {**{name.upper(): int(value) for name, value in own.items()}, **types}


@cache
def refusal(device: torch.device) -> str | None:
    """Why there is no kernel for this device; None if there is one."""
    reason = device_refusal(device)
    if reason is not None:
        return reason
    try:
        _row_kernel(Form(bits=4, shift=0), RowPlan(2, 8), torch.bfloat16, device)
    except KernelUnavailableError as error:
        return str(error)
    return None


def row_plan(matrix: CodeMatrix, *, normed: bool) -> RowPlan | None:
    """As many slots as there is room for. None if there is no room for a row, or scales change
    within 32 columns."""
    groups = 2 if matrix.chunks >= 2 * _STAGE else 1
    room = _SMALL - _row_bytes(matrix, RowPlan(groups, 0), normed=normed)
    depth = min(8, room // (_slot_bytes(matrix.form) + 16)) // groups * groups
    if matrix.form.subs > 1 or depth < 2 * groups:
        return None
    return RowPlan(groups, depth)


def _room(blocks: int) -> int:
    """Bytes of shared memory that each of `blocks` blocks of a multiprocessor can have."""
    return ALL_SHARED // blocks - 1024


def _slot_bytes(form: Form) -> int:
    blocks = _STAGE * form.chunk // BLOCK
    scales = blocks_of(blocks, 2**form.shift)
    inner = form.sub_scale + form.sub_minimum
    return 2 * (_STAGE * 512 + scales * 16 * (1 + form.minimum) + blocks * 8 * inner)


def _row_bytes(matrix: CodeMatrix, plan: RowPlan, *, normed: bool) -> int:
    """Bytes of struct Memory in code_row.cu."""
    ring = plan.depth * (_slot_bytes(matrix.form) + 16)
    sums = 4 * (_KEPT * plan.warps * 16 + plan.warps)
    return ring + sums + matrix.chunks * 32 + (4 if normed else 2) * matrix.packed.columns


class Call(NamedTuple):
    """A launch."""

    form: Form
    plan: RowPlan | TilePlan
    arguments: bytes
    blocks: int
    shared: int  # bytes of shared memory
    cluster: int = 1
    prepare: bytes = b""  # of the kernel before it, if there is one
    held: tuple[torch.Tensor, ...] = ()
    """What the kernels write for each other."""


def _rows_of(x: torch.Tensor, matrix: CodeMatrix, norm: Norm | None) -> tuple[int | float, ...]:
    weight, eps = (0, 0.0) if norm is None else (norm[0].data_ptr(), norm[1])
    return x.data_ptr(), weight, matrix.packed.columns, eps


def row_call(
    x: torch.Tensor,
    matrix: CodeMatrix,
    out: torch.Tensor,
    plan: RowPlan,
    norm: Norm | None = None,
    *,
    add: bool = False,
) -> Call:
    outputs = matrix.outputs
    tiles = outputs // 8 if matrix.form.gated else blocks_of(outputs, 16)
    arguments = _ROW_ARGUMENTS.pack(
        *_rows_of(x, matrix, norm), *matrix.pointers, out.data_ptr(),
        tiles, outputs, matrix.packed.offset, add,
    )  # fmt: skip
    shared = _LARGE if add else _row_bytes(matrix, plan, normed=norm is not None)
    return Call(matrix.form, plan, arguments, min(tiles, processors(x.device)), shared)


def tile_call(
    x: torch.Tensor,
    matrix: CodeMatrix,
    out: torch.Tensor,
    *,
    add: bool = False,
    plan: TilePlan | None = None,
) -> Call:
    plan = plan or tile_plan(len(x), matrix.packed.outputs, x.device)
    rows, form, outputs = 8 * plan.eights, matrix.form, matrix.outputs
    slice_bytes = 2 * rows * form.chunk
    tiles = blocks_of(outputs, plan.outputs // 2 if form.gated else plan.outputs)
    parts = parts_of(tiles, matrix.packed.columns, processors(x.device) * plan.blocks)
    inputs = torch.empty(matrix.chunks, slice_bytes, dtype=torch.uint8, device=x.device)
    factors = torch.empty(rows, dtype=torch.float32, device=x.device)
    made = inputs.data_ptr(), factors.data_ptr()
    slots = plan.x_depth * plan.warps_k * slice_bytes
    sums = plan.warps_k * rows * (plan.outputs + 4) * 4
    return Call(
        form,
        plan,
        _TILE_ARGUMENTS.pack(
            *made, *matrix.pointers, out.data_ptr(),
            len(x), matrix.chunks, outputs, matrix.packed.offset, add,
        ),
        tiles * parts,
        max(slots, sums) + 12 * plan.x_depth,
        parts,
        _PREPARE_ARGUMENTS.pack(*_rows_of(x, matrix, None), *made, len(x)),
        (inputs, factors),
    )  # fmt: skip


def parts_of(tiles: int, columns: int, at_once: int) -> int:
    """Blocks that share the columns of a tile, where `at_once` blocks run at the same time."""

    def time(parts: int) -> float:
        return blocks_of(tiles * parts, at_once) * (columns / parts + _START_COLUMNS)

    return min((1, 2, 4), key=time)


@cache
def _row_kernel(form: Form, plan: RowPlan, dtype: torch.dtype, device: torch.device) -> CudaKernel:
    cubin = compile_source(source("code_row.cu"), constants_of(form, plan, dtype), "sm_90a")
    return CudaKernel(cubin, "code_row", plan.threads, _LARGE, device, copies=True)


@cache
def _tile_kernels(
    form: Form, plan: TilePlan, dtype: torch.dtype, device: torch.device
) -> tuple[CudaKernel, CudaKernel]:
    cubin = compile_source(source("code_tiles.cu"), constants_of(form, plan, dtype), "sm_90a")
    return (
        CudaKernel(cubin, "prepare_codes", _PREPARE_THREADS, PREPARE_SHARED, device),
        CudaKernel(cubin, "code_tiles", plan.threads, _room(plan.blocks), device),
    )


def launch_row(call: Call, x: torch.Tensor) -> None:
    assert isinstance(call.plan, RowPlan)
    kernel = _row_kernel(call.form, call.plan, x.dtype, x.device)
    if not is_collecting():
        kernel.launch((call.blocks,), call.arguments, shared_bytes=call.shared, pdl=True)


def launch_tiles(call: Call, x: torch.Tensor) -> None:
    assert isinstance(call.plan, TilePlan)
    prepare, tiles = _tile_kernels(call.form, call.plan, x.dtype, x.device)
    if is_collecting():
        return
    prepare.launch((8 * call.plan.eights,), call.prepare, pdl=True)
    tiles.launch(
        (call.blocks,), call.arguments, shared_bytes=call.shared, cluster=call.cluster, pdl=True
    )
