"""The products of `experts` with FP8 weights and many pairs of each expert, on FP8 tensor cores.

Rows are rounded to FP8 once. If gate and up have a scale for each output, rows have one scale, and
tensor cores sum all columns. Otherwise rows have a scale for 128 columns, as weights do, and each
128 columns are summed by themselves. What the first product returns is rounded with a scale for 128
columns as soon as a tile of it is there. `fp8_experts` in models/experts.py does the same in torch.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait
from triton.tools.tensor_descriptor import TensorDescriptor

from cairn.kernels.fp8_many import RoundedRows, round_rows, row_scale
from cairn.kernels.fp8_tiles import to_e4m3
from cairn.kernels.launch import direct
from cairn.kernels.pdl import is_hopper, pdl_options
from cairn.kernels.sizes import blocks_of

COLUMNS = 128
"""Columns of a row with one scale, and of a tile."""
PAIRS = 64
"""Pairs of a block."""


class ExpertScales(NamedTuple):
    """Scales of FP8 weights, for each output and group of columns; see `models/fp8.py`."""

    gate_up: torch.Tensor  # [experts, 2 * inter, groups] float32
    gate_up_group: int  # columns with one scale; 0 for all
    down: torch.Tensor  # [experts, hidden, groups] float32
    down_group: int
    of_blocks: bool = False
    """The outputs of each block of 128 of gate, up and down have the same scales."""


class Sorted(NamedTuple):
    """Pairs sorted by expert; see `experts`."""

    order: torch.Tensor  # [pairs]
    slots: torch.Tensor  # [3, slots]


def readable(scales: ExpertScales) -> bool:
    """Whether weights have a scale for each output, or for each tile."""
    groups = scales.gate_up_group, scales.down_group
    tiled = scales.of_blocks and all(group % COLUMNS == 0 for group in groups)
    return tiled or not any(groups)


def row_columns(scales: ExpertScales) -> int:
    """Columns of a row of x with one scale; 0 for all."""
    return COLUMNS if scales.gate_up_group else 0


@triton.jit
def _factor(a_scale, scale, first, start, GROUP: tl.constexpr, GROUPS: tl.constexpr):
    """-> scales of rows [n], times that of the block of weights if there are groups"""
    factor = a_scale
    if GROUP > 0:
        factor *= tl.load(scale + first * GROUPS + start // GROUP)
    return factor


@triton.jit
def _load_weights(weight, first, start, inside, IN: tl.constexpr, TMA: tl.constexpr):
    """-> a square tile of weights from output `first` and column `start` on. Outputs that are not
    `inside` may be those of another matrix."""
    if TMA:
        w = weight.load([first, start])
    else:
        lane = tl.arange(0, inside.shape[0])
        places = weight + (first + lane).to(tl.int64)[:, None] * IN + (start + lane)[None, :]
        w = tl.load(places, mask=inside[:, None] & (start + lane < IN)[None, :], other=0.0)
    return w


@direct
@triton.jit(do_not_specialize=["num_slots", "x_stride", "out_stride"])
def _fp8_product_kernel(
    x,  # e4m3: [rows, IN] if GATED, else [pairs, IN] in sorted order; if TMA its descriptor
    x_scale,  # [groups of 128 columns, x_stride], or [1, x_stride] if WHOLE
    weight,  # e4m3 [experts, 2 * OUT if GATED else OUT, IN]; if TMA its descriptor as [-1, IN]
    scale,  # [experts, outputs as the weight, groups]; with groups the same for all of a tile
    order,
    slots,
    weights,  # [pairs], unless GATED
    out,  # e4m3 [pairs, OUT] in sorted order if GATED, else [pairs, OUT] by pair
    out_scale,  # if GATED: [groups of 128 columns, out_stride]
    num_slots: tl.int32,
    x_stride: tl.int32,
    out_stride: tl.int32,
    IN: tl.constexpr,
    OUT: tl.constexpr,
    TOP: tl.constexpr,
    GATED: tl.constexpr,  # silu(gate) * up, else the product with the pair's weight
    GROUP: tl.constexpr,  # columns of the weight with one scale, a multiple of 128; 0 for all
    BLOCK_M: tl.constexpr,
    BLOCK: tl.constexpr,  # 128: outputs and columns of a tile
    TMA: tl.constexpr,
    PDL: tl.constexpr,
):
    WHOLE: tl.constexpr = GATED and GROUP == 0  # rows and outputs have one scale
    slot = tl.program_id(1)
    lane = tl.arange(0, BLOCK)
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    expert = tl.load(slots + slot)
    if expert < 0:
        return
    begin = tl.load(slots + num_slots + slot)
    m = begin + tl.arange(0, BLOCK_M)
    there = m < tl.load(slots + 2 * num_slots + slot)
    pair = tl.load(order + m, mask=there, other=0)
    row = pair // TOP if GATED else m
    DESCRIBED: tl.constexpr = TMA and not GATED
    if not DESCRIBED:
        source = x + row.to(tl.int64)[:, None] * IN
    x_scales = x_scale + row
    n = tl.program_id(0) * BLOCK + lane
    MATRIX: tl.constexpr = 2 * OUT if GATED else OUT
    first = expert * MATRIX + tl.program_id(0) * BLOCK
    GROUPS: tl.constexpr = (IN + GROUP - 1) // GROUP if GROUP > 0 else 1
    acc = tl.zeros((BLOCK_M, BLOCK), tl.float32)
    up = tl.zeros((BLOCK_M, BLOCK), tl.float32)
    for start in range(0, IN, BLOCK):
        at = start + lane
        if not WHOLE:
            a_scale = tl.load(x_scales + start // BLOCK * x_stride, mask=there, other=0.0)
        if DESCRIBED:  # rows behind those of the expert are not stored
            a = x.load([begin, start])
        elif IN % BLOCK == 0:
            a = tl.load(source + at[None, :], mask=there[:, None], other=0.0)
        else:
            a = tl.load(source + at[None, :], mask=there[:, None] & (at < IN)[None, :], other=0.0)
        if not WHOLE:  # tensor cores sum with few bits, so each block's sum is added in float32
            factor = _factor(a_scale, scale, first, start, GROUP, GROUPS)
        w = _load_weights(weight, first, start, n < OUT, IN, TMA)
        acc = tl.dot(a, w.T, acc) if WHOLE else acc + tl.dot(a, w.T) * factor[:, None]
        if GATED:
            if not WHOLE:
                factor = _factor(a_scale, scale, first + OUT, start, GROUP, GROUPS)
            w = _load_weights(weight, first + OUT, start, n < OUT, IN, TMA)
            up = tl.dot(a, w.T, up) if WHOLE else up + tl.dot(a, w.T) * factor[:, None]
    scales = scale + first + lane
    if GROUP == 0:
        acc *= tl.load(scales, mask=n < OUT, other=0.0)[None, :]
    inside = there[:, None] & (n < OUT)[None, :]
    if GATED:
        if WHOLE:
            up *= tl.load(scales + OUT, mask=n < OUT, other=0.0)[None, :]
            factor = tl.load(x_scales, mask=there, other=0.0)
            acc *= factor[:, None]
            up *= factor[:, None]
        result = tl.where(inside, acc / (1.0 + tl.exp(-acc)) * up, 0.0)
        factor = row_scale(result)
        place = out + m.to(tl.int64)[:, None] * OUT + n[None, :]
        tl.store(place, to_e4m3(result * (1.0 / factor)[:, None]), mask=inside)
        tl.store(out_scale + tl.program_id(0) * out_stride + m, factor, mask=there)
    else:
        share = tl.load(weights + pair, mask=there, other=0.0).to(tl.float32)
        place = out + pair.to(tl.int64)[:, None] * OUT + n[None, :]
        tl.store(place, (acc * share[:, None]).to(out.dtype.element_ty), mask=inside)


def products(
    x: torch.Tensor,  # [rows, hidden], contiguous
    pairs: Sorted,
    weights: torch.Tensor,  # [rows, per_token]
    gate_up: torch.Tensor,  # [experts, 2 * inter, hidden] e4m3
    down: torch.Tensor,  # [experts, hidden, inter] e4m3
    scales: ExpertScales,
) -> torch.Tensor:
    """-> [rows * per_token, hidden], the weighted output of each pair"""
    (_, hidden, inter), count, top = down.shape, weights.numel(), weights.shape[1]
    mid = RoundedRows(
        torch.empty(count, inter, dtype=torch.float8_e4m3fn, device=x.device),
        torch.empty(blocks_of(inter, COLUMNS), count, dtype=torch.float32, device=x.device),
    )
    out = torch.empty(count, hidden, dtype=x.dtype, device=x.device)
    tma = is_hopper(x.device)
    num_slots = pairs.slots.shape[1]
    # Warps and stages are the fastest that were measured on an H200; one more stage with groups.
    for gated, source, matrix, target, (scale, group), warps, stages in (
        (True, round_rows(x, row_columns(scales)), gate_up, mid.numbers, scales[:2], 8, 2),
        (False, mid, down, out, scales[2:4], 4, 3),
    ):
        width, outputs = matrix.shape[2], target.shape[1]
        tiles, rows = matrix, source.numbers
        if tma:
            tiles = TensorDescriptor.from_tensor(matrix.view(-1, width), [COLUMNS, COLUMNS])
            if not gated:
                rows = TensorDescriptor.from_tensor(rows, [PAIRS, COLUMNS])
        _fp8_product_kernel[(blocks_of(outputs, COLUMNS), num_slots)](
            rows, source.scale, tiles, scale, *pairs, weights, target, mid.scale,
            num_slots, source.scale.shape[1], count,
            IN=width, OUT=outputs, TOP=top, GATED=gated, GROUP=group,
            BLOCK_M=PAIRS, BLOCK=COLUMNS, TMA=tma,
            num_warps=warps, num_stages=stages + (group > 0), **pdl_options(x),
        )  # fmt: skip
    return out
