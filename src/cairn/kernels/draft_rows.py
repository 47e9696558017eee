"""Lets drafting continue when only the device knows which of the last drafts were right.

The host prepares the inputs of a draft step as if none had been right. Kernels then find the newest
token of each request and advance the inputs of recorded steps: by the number of right drafts, and
by one for every further draft.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from cairn.kernels.interface import RowInputs
from cairn.kernels.launch import direct
from cairn.kernels.sizes import blocks_of

_BLOCK = 128  # requests of a program


@direct
@triton.jit(do_not_specialize=["count", "most"])
def _newest_kernel(
    tokens,  # [samples] that a step sampled
    newest,  # [places] newest token of each slot, and its drafts behind it
    first,  # [count] index of the first token that a request sampled
    checked,  # [count] number of its drafts
    places,  # [count] place of its slot
    right,  # [count] number of right drafts
    count: tl.int32,
    most: tl.int32,  # of `checked`
    BLOCK: tl.constexpr,
):
    own = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    valid = own < count
    begin = tl.load(first + own, mask=valid, other=0)
    drafts = tl.load(checked + own, mask=valid, other=0)
    place = tl.load(places + own, mask=valid, other=0)
    found = tl.zeros_like(drafts)
    for i in range(0, most):
        so_far = valid & (i < drafts) & (found == i)
        token = tl.load(tokens + begin + i, mask=so_far, other=0)
        draft = tl.load(newest + place + 1 + i, mask=so_far, other=-1)
        found += (so_far & (token == draft)).to(tl.int32)
    tl.store(right + own, found, mask=valid)
    token = tl.load(tokens + begin + found, mask=valid, other=0)
    tl.store(newest + place, token, mask=valid)


def keep_newest(
    tokens: torch.Tensor,
    newest: torch.Tensor,
    first: torch.Tensor,
    checked: torch.Tensor,
    places: torch.Tensor,
    right: torch.Tensor,
    most: int,
) -> None:
    """Count the right drafts of each request into `right`, and store the token that was sampled
    after them as the newest of its slot. Arguments are as in the kernel."""
    count = len(first)
    _newest_kernel[(blocks_of(count, _BLOCK),)](
        tokens, newest, first, checked, places, right, count, most, BLOCK=_BLOCK, num_warps=4
    )


@triton.jit
def _mix64(x):
    x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9
    x = (x ^ (x >> 27)) * 0x94D049BB133111EB
    return x ^ (x >> 31)


@direct
@triton.jit(
    do_not_specialize=[
        *("count", "times", "further", "page_stride", "group_stride", "table_stride"),
    ]
)
def _move_kernel(
    seeds,
    places,
    sources,
    positions,
    lengths,
    offsets,
    pages,
    kv_lens,
    tables,
    request_seeds,  # [count] int64
    room,  # [count] number of tokens that a request has pages for
    right,  # [count]
    count: tl.int32,
    times: tl.int32,  # 1 to move by `right` too, else 0
    further: tl.int32,
    page_stride: tl.int32,  # from the pages of one layer group to those of the next
    group_stride: tl.int64,
    table_stride: tl.int32,
    PAGE_SIZE: tl.constexpr,
    GROUPS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    own = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    valid = own < count
    position = tl.load(positions + own, mask=valid, other=0) + further
    position += times * tl.load(right + own, mask=valid, other=0)
    limit = tl.load(room + own, mask=valid, other=1)
    fits = position < limit  # other rows are written to the null page; nobody asks for their tokens
    length = tl.load(lengths + own, mask=valid, other=0)
    tl.store(positions + own, position, mask=valid)
    tl.store(lengths + own, tl.maximum(length, position + 1), mask=valid)
    tl.store(kv_lens + own, tl.minimum(position + 1, limit), mask=valid)
    tl.store(offsets + own, position % PAGE_SIZE, mask=valid)
    for group in tl.static_range(GROUPS):
        table = tables + group * group_stride + own.to(tl.int64) * table_stride
        page = tl.load(table + position // PAGE_SIZE, mask=valid & fits, other=0)
        tl.store(pages + group * page_stride + own, page, mask=valid)
    tl.store(sources + own, tl.load(sources + own, mask=valid, other=0) + further, mask=valid)
    tl.store(places + own, tl.load(places + own, mask=valid, other=0) + further, mask=valid)
    seed = tl.load(request_seeds + own, mask=valid, other=0).to(tl.uint64)
    seed = _mix64(seed + (position + 1).to(tl.uint64) * 0x9E3779B97F4A7C15)
    tl.store(seeds + own, seed.to(tl.int64, bitcast=True), mask=valid)


def move_rows(
    rows: RowInputs,
    request_seeds: torch.Tensor,  # [count] int64
    room: torch.Tensor,  # [count] int32
    right: torch.Tensor | None,  # [count] int32
    further: int,
    page_size: int,
) -> None:
    """Advance the first rows of a recorded step by `right` tokens and `further` drafts: their
    positions, lengths, pages and random seeds. Where tokens are read and stored advances by
    `further` only."""
    count, groups = len(room), len(rows.pages)
    step = rows.pages[1].storage_offset() - rows.pages[0].storage_offset() if groups > 1 else 0
    _move_kernel[(blocks_of(count, _BLOCK),)](
        *rows[:6],
        rows.pages[0],
        rows.kv_lens,
        rows.tables,
        request_seeds,
        room,
        room if right is None else right,
        count,
        0 if right is None else 1,
        further,
        step,
        rows.tables.stride(0),
        rows.tables.stride(1),
        PAGE_SIZE=page_size,
        GROUPS=groups,
        BLOCK=_BLOCK,
        num_warps=4,
    )
