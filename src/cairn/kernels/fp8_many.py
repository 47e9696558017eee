"""Products x @ W.T of many rows with a matrix of FP8 numbers, on FP8 tensor cores.

Rows are rounded to FP8 first, with a scale for each row and group of columns. torch multiplies
where it can (`prepare`), and Triton elsewhere. `models/fp8.py` has the same product in torch.

torch has three products, which were measured on an H200. Up to 128 rows the fastest is the one with
a scale for each row, each output and 128 columns, also where outputs have one scale for all
columns. With more rows it is the one with a scale for each block of 128 outputs and columns, or
with one scale for each row and output.

Scales of rows are stored by group: [groups, rows]. torch's product needs this order and a multiple
of 16 rows, so rounded rows are padded. Padding is never written and never read back.
"""

from __future__ import annotations

from collections.abc import Hashable
from functools import cache
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait
from triton.tools.tensor_descriptor import TensorDescriptor

from cairn.kernels.fp8_tiles import to_e4m3
from cairn.kernels.interface import BLOCK_OUTPUTS, E4M3_LARGEST, of_blocks
from cairn.kernels.launch import direct
from cairn.kernels.pdl import is_hopper, pdl_options
from cairn.kernels.sizes import blocks_of, power_of_two

_SOME_ROWS = 128  # with more, torch's products with fewer scales are faster
_LIBRARY_GROUP = 128  # columns with one scale in torch's products, unless it is one for all
_BLOCK_ROWS = 64  # of a tile of Triton's kernel
_BAND = tl.constexpr(8)  # blocks of rows that share a range of outputs at about the same time
_LARGEST = tl.constexpr(E4M3_LARGEST)


def row_rungs() -> tuple[int, ...]:
    """Row counts at which products switch to another form, and some at which torch may choose
    another kernel. torch's products run for real when these are rehearsed, which loads them."""
    return 17, 33, 65, _SOME_ROWS + 1, 257


class RoundedRows(NamedTuple):
    numbers: torch.Tensor  # [padded rows, in] e4m3
    scale: torch.Tensor  # [groups, padded rows] float32


@direct
@triton.jit(do_not_specialize=["padded"])
def _round_kernel(
    x,  # [rows, IN]
    rounded,  # [padded, IN] e4m3
    scale,  # [groups, padded]
    padded: tl.int32,
    IN: tl.constexpr,
    GROUP: tl.constexpr,  # columns with one scale
    BLOCK_G: tl.constexpr,
    BLOCK_K: tl.constexpr,  # at least GROUP
    PDL: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    group = tl.program_id(1) * BLOCK_G + tl.arange(0, BLOCK_G)
    k = tl.arange(0, BLOCK_K)
    GROUPS: tl.constexpr = (IN + GROUP - 1) // GROUP
    at = group[:, None] * GROUP + k[None, :]
    inside = (at < IN) & (k < GROUP)[None, :]
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    value = tl.load(x + row * IN + at, mask=inside, other=0.0).to(tl.float32)
    factor = row_scale(value)
    numbers = to_e4m3(value * (1.0 / factor)[:, None])
    tl.store(rounded + row * IN + at, numbers, mask=inside)
    tl.store(scale + group.to(tl.int64) * padded + row, factor, mask=group < GROUPS)


@triton.jit
def row_scale(value):
    """-> scales [n] with which rows of numbers [n, columns] fit into e4m3"""
    most = tl.max(tl.abs(value), 1)
    return tl.where(most > 0, most / _LARGEST, 1.0)


@direct
@triton.jit(do_not_specialize=["rows", "padded"])
def _many_rows_kernel(
    x,  # [padded, IN] e4m3, or its descriptor if TMA
    x_scale,  # [groups, padded]
    weight,  # [out_features, IN] e4m3, or its descriptor if TMA
    scale,  # [out_features, groups]
    out,  # [rows, out_features]
    rows: tl.int32,
    padded: tl.int32,
    out_features,
    IN: tl.constexpr,
    GROUP: tl.constexpr,  # 0: one for all columns
    BLOCKS: tl.constexpr,  # all outputs of a tile have the same scales
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,  # divides GROUP
    TMA: tl.constexpr,
    PDL: tl.constexpr,
):
    # Programs that run at the same time share a band of rows and a range of outputs.
    across = tl.cdiv(out_features, BLOCK_N)
    band = tl.program_id(0) // (_BAND * across) * _BAND
    tall = min(tl.cdiv(rows, BLOCK_M) - band, _BAND)
    within = tl.program_id(0) % (_BAND * across)
    first_m, first_n = (band + within % tall) * BLOCK_M, within // tall * BLOCK_N
    m, n = first_m + tl.arange(0, BLOCK_M), first_n + tl.arange(0, BLOCK_N)
    k = tl.arange(0, BLOCK_K)
    seen, there = m < rows, n < out_features
    GROUPS: tl.constexpr = 1 if GROUP == 0 else (IN + GROUP - 1) // GROUP
    x_scales, scales = x_scale + m, scale + n * GROUPS
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    acc = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    for start in range(0, IN, BLOCK_K):
        if GROUP > 0:  # before the product, which takes longer than these loads
            own_x = tl.load(x_scales + start // GROUP * padded, mask=seen, other=0.0)
            if BLOCKS:
                factor = own_x * tl.load(scale + first_n * GROUPS + start // GROUP)
            else:
                own = tl.load(scales + start // GROUP, mask=there, other=0.0)
        if TMA:
            a, w = x.load([first_m, start]), weight.load([first_n, start])
        else:
            at = (start + k)[None, :]
            places = x + m.to(tl.int64)[:, None] * IN + at
            a = tl.load(places, mask=seen[:, None] & (at < IN), other=0.0)
            places = weight + n.to(tl.int64)[:, None] * IN + at
            w = tl.load(places, mask=there[:, None] & (at < IN), other=0.0)
        # Tensor cores sum FP8 products with few bits, so each block's sum is added in float32.
        part = tl.dot(a, w.T)
        if GROUP > 0:
            part *= factor[:, None] if BLOCKS else own_x[:, None] * own[None, :]
        acc += part
    if GROUP == 0:
        own_x = tl.load(x_scales, mask=seen, other=0.0)
        acc *= own_x[:, None] * tl.load(scales, mask=there, other=0.0)[None, :]
    place = out + m.to(tl.int64)[:, None] * out_features + n[None, :]
    tl.store(place, acc.to(out.dtype.element_ty), mask=seen[:, None] & there[None, :])


class Prepared(NamedTuple):
    """What products of many rows need to know of a matrix; see `prepare`. Scales are as torch's
    product takes them: [1, out], or [groups of 128 columns, out or blocks of 128 outputs]."""

    has_blocks: bool
    """The outputs of each block of 128 have the same scales."""
    some: torch.Tensor | None = None
    """Scales for up to 128 rows; None if torch cannot multiply the matrix."""
    many: torch.Tensor | None = None
    """Scales for more rows."""

    @property
    def form(self) -> Hashable:
        """What decides which kernels products of a shape need."""
        return self.has_blocks, *(None if own is None else own.shape for own in self[1:])

    def for_library(self, rows: int, dtype: torch.dtype) -> torch.Tensor | None:
        """Scales for torch's product of so many rows; None if Triton multiplies."""
        if dtype != torch.bfloat16:
            return None
        return self.some if rows <= _SOME_ROWS else self.many

    def row_group(self, rows: int, dtype: torch.dtype, group: int) -> int:
        """Columns of a row that are rounded with one scale; 0 for all. The matrix has `group`."""
        scale = self.for_library(rows, dtype)
        if scale is None:
            return group
        return _LIBRARY_GROUP if len(scale) > 1 else 0


def prepare(weight: torch.Tensor, scale: torch.Tensor, group: int) -> Prepared:
    """For arguments of `many_rows`; waits for the device. Where torch multiplies with a scale for
    each output and 128 columns, these are stored once more, which takes 3 % of the bytes of the
    matrix, also for a matrix that has one scale for each output."""
    outputs, columns = weight.shape
    has_blocks = group > 0 and of_blocks(scale)
    if outputs % 16 or not is_hopper(weight.device):
        return Prepared(has_blocks)
    some = many = scale.t() if group == 0 else None
    grouped = group in (0, _LIBRARY_GROUP) and columns % _LIBRARY_GROUP == 0
    if grouped and torch_refusal(weight.device) is None:
        some = scale.t().expand(columns // _LIBRARY_GROUP, outputs).contiguous()
        # One scale for each block of outputs will do if four groups can be read at once.
        if has_blocks and outputs % BLOCK_OUTPUTS == 0 and columns % (4 * group) == 0:
            many = scale[::BLOCK_OUTPUTS].contiguous().t()
        elif group > 0:
            many = some
    return Prepared(has_blocks, some, many)


def many_rows(
    x: torch.Tensor,  # [rows, in], contiguous
    weight: torch.Tensor,  # [out, in] e4m3; `in` is a multiple of 16
    scale: torch.Tensor,  # [out, groups] float32
    group: int,  # columns with one scale; 0 for all
    prepared: Prepared,
) -> torch.Tensor:
    """-> [rows, out]"""
    rows = x.shape[0]
    rounded = round_rows(x, prepared.row_group(rows, x.dtype, group))
    for_library = prepared.for_library(rows, x.dtype)
    if for_library is not None:
        return _by_library(rounded, weight, for_library)[:rows]
    return _by_triton(rounded, weight, scale, group, prepared.has_blocks, rows, x.dtype)


def round_rows(x: torch.Tensor, group: int) -> RoundedRows:
    """x [rows, in] in e4m3, with a scale for each row and `group` columns, or all if 0"""
    rows, width = x.shape
    size = group or width
    groups, padded = blocks_of(width, size), blocks_of(rows, 16) * 16
    rounded = torch.empty(padded, width, dtype=torch.float8_e4m3fn, device=x.device)
    scale = torch.empty(groups, padded, dtype=torch.float32, device=x.device)
    block_k = power_of_two(size)
    block_g = min(power_of_two(groups), max(1, 2048 // block_k))
    _round_kernel[(rows, blocks_of(groups, block_g))](
        x, rounded, scale, padded, IN=width, GROUP=size, BLOCK_G=block_g, BLOCK_K=block_k,
        num_warps=min(16, max(4, block_k // 1024)), **pdl_options(x),
    )  # fmt: skip
    return RoundedRows(rounded, scale)


def _by_triton(
    x: RoundedRows,
    weight: torch.Tensor,
    scale: torch.Tensor,
    group: int,
    has_blocks: bool,
    rows: int,
    dtype: torch.dtype,
) -> torch.Tensor:
    """The product of `rows` rounded rows -> [rows, out] of the type `dtype`"""
    out_features, width = weight.shape
    out = torch.empty(rows, out_features, dtype=dtype, device=weight.device)
    columns = tile_columns(group)
    tma = is_hopper(weight.device)
    operands = x.numbers, weight
    if tma:
        operands = (
            TensorDescriptor.from_tensor(x.numbers, [_BLOCK_ROWS, columns]),
            TensorDescriptor.from_tensor(weight, [BLOCK_OUTPUTS, columns]),
        )
    grid = (blocks_of(out_features, BLOCK_OUTPUTS) * blocks_of(rows, _BLOCK_ROWS),)
    _many_rows_kernel[grid](
        operands[0], x.scale, operands[1], scale, out, rows, x.scale.shape[1], out_features,
        IN=width, GROUP=group, BLOCKS=has_blocks,
        BLOCK_M=_BLOCK_ROWS, BLOCK_N=BLOCK_OUTPUTS, BLOCK_K=columns, TMA=tma,
        num_warps=4, num_stages=3, **pdl_options(weight),
    )  # fmt: skip
    return out


def tile_columns(group: int) -> int:
    """Columns of a tile in a tensor-core product: all of them have one scale."""
    return min(128, group & -group) if group else 128


def _by_library(x: RoundedRows, weight: torch.Tensor, for_library: torch.Tensor) -> torch.Tensor:
    """The product in torch -> [padded rows, out] bfloat16"""
    scale = x.scale.t() if len(x.scale) > 1 else x.scale.view(-1, 1)
    return torch._scaled_mm(x.numbers, weight.t(), scale, for_library, out_dtype=torch.bfloat16)


@cache
def torch_refusal(device: torch.device) -> str | None:
    """Why torch's products with scales of 128 columns are not used on a GPU, or None. They are
    tried once: they need a Hopper GPU, and CUDA 12.9 or newer."""
    draw = torch.Generator(device).manual_seed(0)
    group, rows, outputs, columns = _LIBRARY_GROUP, 32, 256, 1024

    def drawn(*shape: int) -> torch.Tensor:
        return torch.rand(shape, generator=draw, device=device) + 0.5

    x, weight = (drawn(n, columns).to(torch.float8_e4m3fn) for n in (rows, outputs))
    x_scale = drawn(columns // group, rows)
    own = drawn(outputs // group, columns // group)
    every = own.repeat_interleave(group, 0)
    wide = [
        numbers.double() * scale.double().repeat_interleave(group, 1)
        for numbers, scale in ((x, x_scale.t()), (weight, every))
    ]
    expected = wide[0] @ wide[1].t()
    for form in (own.t(), every.t().contiguous()):
        try:
            found = _by_library(RoundedRows(x, x_scale), weight, form)
        except (RuntimeError, ValueError) as error:
            return str(error)
        if (found.double() - expected).norm() > 0.01 * expected.norm():
            return "torch's product of FP8 matrices with scales of 128 columns is wrong"
    return None
