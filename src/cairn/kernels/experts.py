"""The experts of a mixture: down(silu(gate(x)) * up(x)) of the chosen ones, weighted and summed.
`experts` in models/experts.py does the same in torch.

A pair is one row and one of its experts. With few rows every pair reads its expert's weights at the
speed of memory, one program per few outputs. With more rows, pairs are sorted by expert, and blocks
of pairs of one expert are multiplied on tensor cores. With many pairs of each expert, FP8 weights
are multiplied as they are (`fp8_experts`):

    order: [pairs] pair at each place of the sorted order
    slots: [3, slots] expert of each block of BLOCK_M places (-1 for none), its first place, and the
           place where the expert ends

Expert e, whose first place is f, has its blocks from slot f // BLOCK_M + e on. So each expert finds
its slots without the others, and there are pairs // BLOCK_M + experts of them. The host never needs
to know how many pairs an expert has. Ids outside of the experts given are left out, so a rank may
hold some of the experts. Every output is a sum in a fixed order.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait
from triton.tools.tensor_descriptor import TensorDescriptor

from cairn.kernels import fp8_experts
from cairn.kernels.fp8_experts import ExpertScales, Sorted
from cairn.kernels.launch import direct
from cairn.kernels.norm import rms_norm
from cairn.kernels.paged_extend import can_describe
from cairn.kernels.pdl import pdl_options
from cairn.kernels.sizes import blocks_of, power_of_two

FEW = 4
"""With more rows, pairs are sorted by expert."""


_UNROLLED = tl.constexpr(8)  # most steps over the columns that are compiled one by one


class _Blocks(NamedTuple):
    """Block sizes of the grouped products up to a number of rows."""

    most_rows: int
    pairs: int  # BLOCK_M
    outputs: int  # BLOCK_N: rows of a weight tile; the gated product has as many of gate and of up
    warps: int
    sorted_at_once: int


_LADDER = (_Blocks(128, 16, 64, 4, 1024), _Blocks(1024, 64, 64, 4, 1024))
_LARGEST = _Blocks(2**31, 128, 128, 8, 4096)
_FLOAT32 = _Blocks(2**31, 16, 32, 4, 1024)  # no tensor cores
FP8_PAIRS = 24
"""Least pairs of an expert from which rows are rounded to FP8."""


def row_rungs(top: int, count: int) -> tuple[int, ...]:
    """Row counts at which `experts` switches to other compiled forms, with `top` of `count`
    experts for each row."""
    steps = (step.most_rows + 1 for step in _LADDER)
    return 1, FEW + 1, *steps, blocks_of(FP8_PAIRS * count, top)


@triton.jit
def _add_gate_up(
    gate,
    up,
    squares,
    x,  # a row
    norm_weight,
    gates,
    gate_scales,
    at,  # columns
    inside,
    start,
    IN: tl.constexpr,
    OUT: tl.constexpr,
    GROUP: tl.constexpr,
    NORM: tl.constexpr,
):
    there = inside & (at < IN)[None, :]
    g = tl.load(gates + at[None, :], mask=there, other=0.0)
    u = tl.load(gates + OUT * IN + at[None, :], mask=there, other=0.0)
    value = tl.load(x + at, mask=at < IN, other=0.0).to(tl.float32)
    if NORM:
        squares += value * value
        value *= tl.load(norm_weight + at, mask=at < IN, other=0.0).to(tl.float32)
    if GROUP > 0:
        GROUPS: tl.constexpr = (IN + GROUP - 1) // GROUP
        own = gate_scales + start // GROUP
        gate += g.to(tl.float32) * value[None, :] * tl.load(own, mask=inside, other=0.0)
        own += OUT * GROUPS
        up += u.to(tl.float32) * value[None, :] * tl.load(own, mask=inside, other=0.0)
    else:
        gate += g.to(tl.float32) * value[None, :]
        up += u.to(tl.float32) * value[None, :]
    return gate, up, squares


@direct
@triton.jit
def _few_gate_up_kernel(
    x,  # [rows, IN]
    weight,  # [EXPERTS, 2 * OUT, IN]
    scale,  # [EXPERTS, 2 * OUT, groups], if SCALED
    ids,  # [rows, TOP]
    out,  # [rows * TOP, OUT]
    norm_weight,  # [IN], if NORM
    eps,
    EXPERTS: tl.constexpr,
    IN: tl.constexpr,
    OUT: tl.constexpr,
    TOP: tl.constexpr,
    SCALED: tl.constexpr,  # weights are FP8
    GROUP: tl.constexpr,  # columns with one scale, a multiple of BLOCK_K; 0 for all
    NORM: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    PDL: tl.constexpr,
):
    n = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    pair = tl.program_id(1)
    k = tl.arange(0, BLOCK_K)
    inside = (n < OUT)[:, None]
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    expert = tl.load(ids + pair)
    if (expert < 0) | (expert >= EXPERTS):
        return
    gates = weight + (expert.to(tl.int64) * (2 * OUT) + n[:, None]) * IN
    GROUPS: tl.constexpr = (IN + GROUP - 1) // GROUP if GROUP > 0 else 1
    gate_scales = scale + (expert.to(tl.int64) * (2 * OUT) + n[:, None]) * GROUPS
    gate = tl.zeros((BLOCK_N, BLOCK_K), tl.float32)
    up = tl.zeros((BLOCK_N, BLOCK_K), tl.float32)
    squares = tl.zeros((BLOCK_K,), tl.float32)
    row = x + (pair // TOP) * IN
    if IN > _UNROLLED * BLOCK_K:  # to compile them all would take a minute
        for start in range(0, IN, BLOCK_K):
            gate, up, squares = _add_gate_up(
                gate, up, squares, row, norm_weight, gates, gate_scales, start + k, inside, start,
                IN, OUT, GROUP, NORM,
            )  # fmt: skip
    else:
        for start in tl.static_range(0, IN, BLOCK_K):
            gate, up, squares = _add_gate_up(
                gate, up, squares, row, norm_weight, gates, gate_scales, start + k, inside, start,
                IN, OUT, GROUP, NORM,
            )  # fmt: skip
    own_gate, own_up = tl.sum(gate, 1), tl.sum(up, 1)
    if SCALED and GROUP == 0:
        owns = scale + expert.to(tl.int64) * (2 * OUT) + n
        own_gate *= tl.load(owns, mask=n < OUT, other=0.0)
        own_up *= tl.load(owns + OUT, mask=n < OUT, other=0.0)
    if NORM:
        scale = tl.rsqrt(tl.sum(squares) / IN + eps)
        own_gate *= scale
        own_up *= scale
    result = own_gate / (1.0 + tl.exp(-own_gate)) * own_up
    tl.store(out + pair.to(tl.int64) * OUT + n, result.to(out.dtype.element_ty), mask=n < OUT)


@direct
@triton.jit
def _few_down_kernel(
    x,  # [rows * TOP, IN]
    weight,  # [EXPERTS, OUT, IN]
    scale,  # [EXPERTS, OUT, groups], if SCALED
    ids,  # [rows, TOP]
    weights,  # [rows, TOP]
    out,  # [rows, OUT], added to if ADD
    EXPERTS: tl.constexpr,
    IN: tl.constexpr,
    OUT: tl.constexpr,
    TOP: tl.constexpr,
    SCALED: tl.constexpr,
    GROUP: tl.constexpr,
    ADD: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    PDL: tl.constexpr,
):
    n = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    row = tl.program_id(1).to(tl.int64)
    k = tl.arange(0, BLOCK_K)
    place = out + row * OUT + n
    j = tl.arange(0, triton.next_power_of_2(TOP))
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    if ADD:
        before = tl.load(place, mask=n < OUT, other=0.0).to(tl.float32)
    expert = tl.load(ids + row * TOP + j, mask=j < TOP, other=-1)
    share = tl.load(weights + row * TOP + j, mask=j < TOP, other=0.0).to(tl.float32)
    own = ((expert >= 0) & (expert < EXPERTS))[:, None, None] & (n < OUT)[None, :, None]
    output = expert.to(tl.int64)[:, None, None] * OUT + n[None, :, None]
    matrix = weight + output * IN
    GROUPS: tl.constexpr = (IN + GROUP - 1) // GROUP if GROUP > 0 else 1
    values = x + (row * TOP + j)[:, None, None] * IN
    acc = tl.zeros((j.shape[0], BLOCK_N, BLOCK_K), tl.float32)
    for start in tl.static_range(0, IN, BLOCK_K):
        at = (start + k)[None, None, :]
        inside = own & (at < IN)
        w = tl.load(matrix + at, mask=inside, other=0.0)
        # Loaded in the shape of the tile: spreading a matrix over it would take barriers.
        value = tl.load(tl.broadcast_to(values + at, w.shape), mask=inside, other=0.0)
        if GROUP > 0:
            factor = tl.load(scale + output * GROUPS + start // GROUP, mask=own, other=0.0)
            acc += w.to(tl.float32) * value.to(tl.float32) * factor
        else:
            acc += w.to(tl.float32) * value.to(tl.float32)
    part = tl.sum(acc, 2)
    if SCALED and GROUP == 0:
        mine = ((expert >= 0) & (expert < EXPERTS))[:, None] & (n < OUT)[None, :]
        place_of = expert.to(tl.int64)[:, None] * OUT + n[None, :]
        part *= tl.load(scale + place_of, mask=mine, other=0.0)
    result = tl.sum(part * share[:, None], 0)
    if ADD:
        result += before
    tl.store(place, result.to(out.dtype.element_ty), mask=n < OUT)


@direct
@triton.jit(do_not_specialize=["pairs", "num_slots"])
def _sort_kernel(
    ids,  # [pairs]
    order,
    slots,
    pairs: tl.int32,
    num_slots: tl.int32,
    BLOCK_M: tl.constexpr,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):
    """One program per expert."""
    expert = tl.program_id(0)
    offs = tl.arange(0, BLOCK)
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    lower = tl.zeros((BLOCK,), tl.int32)
    equal = tl.zeros((BLOCK,), tl.int32)
    for start in range(0, pairs, BLOCK):
        own = tl.load(ids + start + offs, mask=start + offs < pairs, other=-1)
        lower += ((own >= 0) & (own < expert)).to(tl.int32)
        equal += (own == expert).to(tl.int32)
    first = tl.sum(lower)
    end = first + tl.sum(equal)
    placed = first
    for start in range(0, pairs, BLOCK):
        own = tl.load(ids + start + offs, mask=start + offs < pairs, other=-1)
        mine = (own == expert).to(tl.int32)
        place = placed + tl.cumsum(mine, 0) - 1
        tl.store(order + place, start + offs, mask=mine > 0)
        placed += tl.sum(mine)
    first_slot = first // BLOCK_M + expert
    last_slot = end // BLOCK_M + expert
    if expert == tl.num_programs(0) - 1:
        last_slot = num_slots - 1
    lane = tl.arange(0, 128)
    for start in range(first_slot, last_slot + 1, 128):
        slot = start + lane
        begin = first + (slot - first_slot) * BLOCK_M
        inside = slot <= last_slot
        tl.store(slots + slot, tl.where(begin < end, expert, -1), mask=inside)
        tl.store(slots + num_slots + slot, begin, mask=inside)
        tl.store(slots + 2 * num_slots + slot, tl.zeros_like(slot) + end, mask=inside)


@triton.jit
def _add_product(acc, w, a, scale, mask, SCALED: tl.constexpr, GROUP: tl.constexpr):
    """acc + w @ a.T, with the scale of each output if there are groups."""
    if SCALED:
        w = w.to(tl.float32).to(a.dtype)
    if GROUP > 0:
        part = tl.dot(w, a.T, input_precision="ieee")
        return acc + part * tl.load(scale, mask=mask, other=0.0)[:, None]
    return tl.dot(w, a.T, acc, input_precision="ieee")


@direct
@triton.jit(do_not_specialize=["num_slots"])
def _product_kernel(
    x,  # if GATED: [rows, IN], else [pairs, IN] in sorted order
    weight,  # [experts, 2 * OUT if GATED else OUT, IN]
    tiles,  # if TMA: descriptor of the weight as [-1, IN], for loads of [BLOCK_N, BLOCK_K]
    scale,  # [experts, outputs as the weight, groups], if SCALED
    order,
    slots,
    weights,  # [pairs], unless GATED
    out,  # if GATED: [pairs, OUT] in sorted order, else [pairs, OUT] by pair
    num_slots: tl.int32,
    IN: tl.constexpr,
    OUT: tl.constexpr,
    TOP: tl.constexpr,
    GATED: tl.constexpr,  # silu(gate) * up, else the product with the pair's weight
    SCALED: tl.constexpr,  # weights are FP8
    GROUP: tl.constexpr,  # a multiple of BLOCK_K, or 0
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    TMA: tl.constexpr,
    PDL: tl.constexpr,
):
    slot = tl.program_id(1)
    n = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    k = tl.arange(0, BLOCK_K)
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    expert = tl.load(slots + slot)
    if expert < 0:
        return
    begin = tl.load(slots + num_slots + slot)
    end = tl.load(slots + 2 * num_slots + slot)
    m = begin + tl.arange(0, BLOCK_M)
    there = m < end
    pair = tl.load(order + m, mask=there, other=0)
    if GATED:
        source = x + (pair // TOP).to(tl.int64)[:, None] * IN
    else:
        source = x + m.to(tl.int64)[:, None] * IN
    MATRIX: tl.constexpr = 2 * OUT if GATED else OUT
    first = expert * MATRIX + tl.program_id(0) * BLOCK_N
    rows = weight + (expert.to(tl.int64) * MATRIX + n[:, None]) * IN
    GROUPS: tl.constexpr = (IN + GROUP - 1) // GROUP if GROUP > 0 else 1
    scales = scale + (expert.to(tl.int64) * MATRIX + n) * GROUPS
    acc = tl.zeros((BLOCK_N, BLOCK_M), tl.float32)
    up = tl.zeros((BLOCK_N, BLOCK_M), tl.float32)
    # Weights are the left operand: tensor cores take at least 64 rows there, but 8 on the right.
    for start in range(0, IN, BLOCK_K):
        at = start + k
        if IN % BLOCK_K == 0:
            a = tl.load(source + at[None, :], mask=there[:, None], other=0.0)
        else:
            a = tl.load(source + at[None, :], mask=there[:, None] & (at < IN)[None, :], other=0.0)
        inside = (n < OUT)[:, None] & (at < IN)[None, :]
        if TMA:
            w = tiles.load([first, start])
        else:
            w = tl.load(rows + at[None, :], mask=inside, other=0.0)
        acc = _add_product(acc, w, a, scales + start // max(GROUP, 1), n < OUT, SCALED, GROUP)
        if GATED:
            if TMA:
                w = tiles.load([first + OUT, start])
            else:
                w = tl.load(rows + OUT * IN + at[None, :], mask=inside, other=0.0)
            own = scales + OUT * GROUPS + start // max(GROUP, 1)
            up = _add_product(up, w, a, own, n < OUT, SCALED, GROUP)
    if SCALED and GROUP == 0:
        acc *= tl.load(scales, mask=n < OUT, other=0.0)[:, None]
        if GATED:
            up *= tl.load(scales + OUT, mask=n < OUT, other=0.0)[:, None]
    if GATED:
        result = acc / (1.0 + tl.exp(-acc)) * up
        place = out + m.to(tl.int64)[None, :] * OUT + n[:, None]
    else:
        share = tl.load(weights + pair, mask=there, other=0.0).to(tl.float32)
        result = acc * share[None, :]
        place = out + pair.to(tl.int64)[None, :] * OUT + n[:, None]
    mask = there[None, :] & (n < OUT)[:, None]
    tl.store(place, result.to(out.dtype.element_ty), mask=mask)


@direct
@triton.jit
def _combine_kernel(
    x,  # [rows * TOP, WIDTH]
    ids,  # [rows, TOP]
    out,  # [rows, WIDTH], added to if ADD
    EXPERTS: tl.constexpr,
    WIDTH: tl.constexpr,
    TOP: tl.constexpr,
    ADD: tl.constexpr,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    n = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = n < WIDTH
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    total = tl.zeros((BLOCK,), tl.float32)
    if ADD:
        total += tl.load(out + row * WIDTH + n, mask=inside, other=0.0).to(tl.float32)
    for j in tl.static_range(TOP):
        expert = tl.load(ids + row * TOP + j)
        own = inside & (expert >= 0) & (expert < EXPERTS)
        total += tl.load(x + (row * TOP + j) * WIDTH + n, mask=own, other=0.0).to(tl.float32)
    tl.store(out + row * WIDTH + n, total.to(out.dtype.element_ty), mask=inside)


def experts(
    x: torch.Tensor,  # [rows, hidden], contiguous
    ids: torch.Tensor,  # [rows, per_token] int32; ids outside of 0..experts-1 are left out
    weights: torch.Tensor,  # [rows, per_token]
    gate_up: torch.Tensor,  # [experts, 2 * inter, hidden], rows of gate first
    down: torch.Tensor,  # [experts, hidden, inter]
    scales: ExpertScales | None = None,  # of weights in e4m3
    *,
    count: int = 0,  # experts on all ranks; 0 if all of them are here
    norm: tuple[torch.Tensor, float] | None = None,  # weight [hidden], epsilon: RMS norm of x first
    add_to: torch.Tensor | None = None,  # [rows, hidden], contiguous; added to and returned
) -> torch.Tensor:
    """-> [rows, hidden]"""
    rows, hidden = x.shape
    if rows == 0:
        return x if add_to is None else add_to
    out = torch.empty_like(x) if add_to is None else add_to
    given = {"EXPERTS": len(down), "TOP": ids.shape[1], **pdl_options(x)}
    if _alone(rows, ids.shape[1], len(down)):
        adds = {**given, "ADD": add_to is not None}
        _few(x, ids, weights, gate_up, down, scales, norm, out, adds)
        return out
    if norm is not None:
        x = rms_norm(x, *norm)
    parts = _grouped(x, ids, weights, gate_up, down, scales, count or len(down))
    block = min(1024, power_of_two(hidden))
    _combine_kernel[(rows, blocks_of(hidden, block))](
        parts, ids, out, WIDTH=hidden, ADD=add_to is not None, BLOCK=block, num_warps=4, **given
    )
    return out


def _alone(rows: int, top: int, count: int) -> bool:
    """Whether pairs are computed one by one, because hardly two of them share an expert."""
    return rows == 1 or (rows <= FEW and 2 * rows * top <= count)


def _few(
    x: torch.Tensor,
    ids: torch.Tensor,
    weights: torch.Tensor,
    gate_up: torch.Tensor,
    down: torch.Tensor,
    scales: ExpertScales | None,
    norm: tuple[torch.Tensor, float] | None,
    out: torch.Tensor,
    given: dict[str, Any],
) -> None:
    rows, hidden = x.shape
    inter = down.shape[2]
    pairs = ids.numel()
    mid = torch.empty(pairs, inter, dtype=x.dtype, device=x.device)
    norm_weight, eps = (x, 0.0) if norm is None else norm
    adds = given.pop("ADD")
    up_scale, up_group, down_scale, down_group = scales[:4] if scales else (gate_up, 0, down, 0)
    given["SCALED"] = scales is not None
    columns, outputs = _tile(hidden, 2048, 4096, up_group)
    _few_gate_up_kernel[(blocks_of(inter, outputs), pairs)](
        x, gate_up, up_scale, ids, mid, norm_weight, eps,
        GROUP=up_group, IN=hidden, OUT=inter, NORM=norm is not None,
        BLOCK_N=outputs, BLOCK_K=columns, num_warps=4, **given,
    )  # fmt: skip
    columns, outputs = _tile(inter, 512, 1024, down_group)
    _few_down_kernel[(blocks_of(hidden, outputs), rows)](
        mid, down, down_scale, ids, weights, out,
        GROUP=down_group, IN=inter, OUT=hidden, ADD=adds,
        BLOCK_N=outputs, BLOCK_K=columns, num_warps=4, **given,
    )  # fmt: skip


def _tile(width: int, most: int, elements: int, group: int) -> tuple[int, int]:
    """Columns and rows of a weight tile: columns that divide the group, and the width, if enough of
    them do."""
    if group:
        most = min(most, group & -group)
    columns = min(most, width & -width)
    if columns < 64:
        columns = min(most, power_of_two(width))
    return columns, min(16, max(1, elements // columns))


def _grouped(
    x: torch.Tensor,
    ids: torch.Tensor,
    weights: torch.Tensor,
    gate_up: torch.Tensor,
    down: torch.Tensor,
    scales: ExpertScales | None,
    count: int,
) -> torch.Tensor:
    """Sort, then both products -> [rows * per_token, hidden], the weighted output of each pair"""
    rows, hidden = x.shape
    inter = down.shape[2]
    pairs, top = ids.numel(), ids.shape[1]
    if scales is not None and pairs >= FP8_PAIRS * count and fp8_experts.readable(scales):
        placed = _sort(ids, len(down), fp8_experts.PAIRS, 4096)
        return fp8_experts.products(x, placed, weights, gate_up, down, scales)
    half = x.dtype.itemsize == 2
    ladder = (*_LADDER, _LARGEST) if half else (_FLOAT32,)
    step = next(step for step in ladder if rows <= step.most_rows)
    order, slots = _sort(ids, len(down), step.pairs, step.sorted_at_once)
    num_slots = slots.shape[1]
    options = pdl_options(x)
    mid = torch.empty(pairs, inter, dtype=x.dtype, device=x.device)
    out = torch.empty(pairs, hidden, dtype=x.dtype, device=x.device)
    block_k = 64 if half else 32
    for gated, source, weight, target in ((True, x, gate_up, mid), (False, mid, down, out)):
        scale, group = weight, 0
        if scales is not None:
            scale, group = scales[:2] if gated else scales[2:4]
            block_k = min(64, group & -group) if group else 64
        block_n = step.outputs if gated else 2 * step.outputs
        width = source.shape[1]
        tma = can_describe(x.device, x.dtype) and width * weight.itemsize % 16 == 0
        tiles = weight
        if tma:
            tiles = TensorDescriptor.from_tensor(weight.view(-1, width), [block_n, block_k])
        _product_kernel[(blocks_of(target.shape[1], block_n), num_slots)](
            source, weight, tiles, scale, order, slots, weights, target, num_slots,
            SCALED=scales is not None, GROUP=group, IN=width, OUT=target.shape[1], TOP=top,
            GATED=gated, BLOCK_M=step.pairs, BLOCK_N=block_n, BLOCK_K=block_k, TMA=tma,
            num_warps=step.warps, num_stages=4 if half else 2, **options,
        )  # fmt: skip
    return out


def _sort(ids: torch.Tensor, count: int, block: int, at_once: int) -> Sorted:
    """Pairs by expert, in blocks of `block` pairs."""
    pairs = ids.numel()
    num_slots = pairs // block + count
    order = torch.empty(pairs, dtype=torch.int32, device=ids.device)
    slots = torch.empty(3, num_slots, dtype=torch.int32, device=ids.device)
    _sort_kernel[(count,)](
        ids, order, slots, pairs, num_slots,
        BLOCK_M=block, BLOCK=at_once, num_warps=8, **pdl_options(ids),
    )  # fmt: skip
    return Sorted(order, slots)
