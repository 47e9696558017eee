"""Causal attention of many new rows per sequence over a paged KV cache, optionally with a window.

The keys and values of the new rows are already in the cache, so prefix and new rows are read the
same way. Rows are cut into blocks, each of one sequence (`ExtendBlocks`).
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
import triton
import triton.language as tl
from triton.tools.tensor_descriptor import TensorDescriptor

from cairn.kernels.fp8_rows import page_rows
from cairn.kernels.fp8_tiles import fit_query, has_scales, load_scales, slice_size
from cairn.kernels.launch import direct
from cairn.kernels.packing import pack, unpack
from cairn.kernels.pdl import is_hopper
from cairn.kernels.softmax import LOG2E, softmax_result, softmax_step


@dataclass(frozen=True, slots=True)
class ExtendBlocks:
    seq: torch.Tensor  # [blocks] int32
    begin: torch.Tensor  # [blocks] int32, the block's first row among the sequence's new rows
    block_m: int  # rows per block

    @classmethod
    def of(
        cls, query_lens: np.ndarray, seqs: np.ndarray, device: torch.device, block_m: int = 64
    ) -> ExtendBlocks:
        """Blocks of the given sequences in reverse order: the last of a sequence reads the most."""
        counts = -(-query_lens[seqs] // block_m)
        seq = np.repeat(seqs, counts)
        begin = np.arange(counts.sum()) - np.repeat(np.cumsum(counts) - counts, counts)
        both = pack((seq[::-1], begin[::-1] * block_m))
        on_device = torch.from_numpy(both).to(device, non_blocking=True)
        on_device_seq, on_device_begin = unpack(on_device, (len(seq), len(seq)))
        return cls(on_device_seq, on_device_begin, block_m)

    @classmethod
    def on_device(cls, query_lens: torch.Tensor, rows: int, block_m: int = 64) -> ExtendBlocks:
        """Blocks of sequences whose lengths only the device knows, with at most `rows` new rows.

        Returns as many blocks as there can be at most. Surplus blocks begin at -1. The order is
        that of `of`.
        """
        counts = (query_lens + block_m - 1) // block_m
        most = rows // block_m + len(query_lens)
        seq, nth, there = numbered(counts, most)
        begin = torch.where(there, nth * block_m, -1)
        return cls(seq.flip(0).int(), begin.flip(0).int(), block_m)


def numbered(counts: torch.Tensor, most: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """List the items of sequences that have `counts` [seqs] items, at most `most` together.

    Returns of each item [most] its sequence, its number within the sequence, and False for the
    surplus items at the end.
    """
    ends = counts.cumsum(0)
    index = torch.arange(most, device=counts.device)
    seq = torch.searchsorted(ends, index, right=True).clamp(max=len(counts) - 1)
    return seq, index - (ends - counts)[seq], index < ends[-1]


@triton.jit
def _masked_tile(
    pool,
    table,  # page table row of the sequence
    start,
    there,  # [BLOCK_N] keys to load, from `start` on: pages before a window may have been freed
    kv_head,
    KV_HEADS: tl.constexpr,
    DIM: tl.constexpr,
    PAGE_SIZE: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    """-> keys [BLOCK_D, BLOCK_N] and values [BLOCK_N, BLOCK_D], zero where not loaded"""
    BLOCK_D: tl.constexpr = max(16, triton.next_power_of_2(DIM))
    offs_d = tl.arange(0, BLOCK_D)
    in_dim = offs_d < DIM
    n = start + tl.arange(0, BLOCK_N)
    if PAGE_SIZE % BLOCK_N == 0:
        page = tl.load(table + start // PAGE_SIZE).to(tl.int64)
    else:
        page = tl.load(table + n // PAGE_SIZE, mask=there, other=0).to(tl.int64)
    SLICE: tl.constexpr = slice_size(pool, PAGE_SIZE, DIM)
    slot = (page * (2 * KV_HEADS) + kv_head) * SLICE + (n % PAGE_SIZE) * DIM
    k = tl.load(
        pool + slot[None, :] + offs_d[:, None], mask=there[None, :] & in_dim[:, None], other=0.0
    )
    values = pool + KV_HEADS * SLICE + slot[:, None]
    v = tl.load(values + offs_d[None, :], mask=there[:, None] & in_dim[None, :], other=0.0)
    return k, v


@triton.jit
def _tile_scales(
    pool,
    table,
    start,
    there,
    kv_head,
    KV_HEADS: tl.constexpr,
    DIM: tl.constexpr,
    PAGE_SIZE: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    """-> scales of the keys and of the values of a tile, [BLOCK_N] each"""
    n = start + tl.arange(0, BLOCK_N)
    if PAGE_SIZE % BLOCK_N == 0:
        page = tl.load(table + start // PAGE_SIZE).to(tl.int64)
    else:
        page = tl.load(table + n // PAGE_SIZE, mask=there, other=0).to(tl.int64)
    SLICE: tl.constexpr = slice_size(pool, PAGE_SIZE, DIM)
    rows = pool + (page * (2 * KV_HEADS) + kv_head) * SLICE
    keys = load_scales(rows, n % PAGE_SIZE, there, PAGE_SIZE, DIM)
    return keys, load_scales(rows + KV_HEADS * SLICE, n % PAGE_SIZE, there, PAGE_SIZE, DIM)


@direct
@triton.jit(do_not_specialize=["table_stride"])
def _extend_kernel(
    query,  # [rows, HEADS, DIM]
    pool,  # [pages, 2 * KV_HEADS, PAGE_SIZE, DIM]
    tiles,  # if TMA: descriptor of the pool as [-1, DIM], for loads of BLOCK_N rows
    page_table,  # [seqs, ...]
    kv_lens,  # [seqs]
    cu_query,  # [seqs + 1] first row of each sequence
    dense_until,  # [seqs] if PAGED_WINDOW: rows at positions below it have no window
    block_seq,
    block_begin,
    out,
    lse_out,
    scale,
    query_stride,
    table_stride: tl.int32,
    HEADS: tl.constexpr,
    KV_HEADS: tl.constexpr,
    DIM: tl.constexpr,
    PAGE_SIZE: tl.constexpr,
    WINDOW: tl.constexpr,
    PAGED_WINDOW: tl.constexpr,  # windows start at page boundaries
    HIDE_LAST: tl.constexpr,
    WITH_LSE: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    TMA: tl.constexpr,
):
    BLOCK_D: tl.constexpr = max(16, triton.next_power_of_2(DIM))
    block = tl.program_id(1)
    head = tl.program_id(0)
    kv_head = head // (HEADS // KV_HEADS)
    seq = tl.load(block_seq + block)
    begin = tl.load(block_begin + block)
    if begin < 0:
        return
    first_row = tl.load(cu_query + seq).to(tl.int32)
    query_len = tl.load(cu_query + seq + 1).to(tl.int32) - first_row
    length = tl.load(kv_lens + seq).to(tl.int32)
    past = length - query_len

    offs_m = begin + tl.arange(0, BLOCK_M)  # index among the sequence's new rows
    offs_d = tl.arange(0, BLOCK_D)
    offs_n = tl.arange(0, BLOCK_N)
    in_rows = offs_m < query_len
    in_dim = offs_d < DIM
    row = (first_row + offs_m).to(tl.int64)
    q = tl.load(
        query + row[:, None] * query_stride + head * DIM + offs_d[None, :],
        mask=in_rows[:, None] & in_dim[None, :],
        other=0.0,
    )
    q = fit_query((q * (scale * LOG2E)).to(q.dtype), pool)  # scores in base 2
    position = past + offs_m  # [BLOCK_M] in the cache

    most = tl.full((BLOCK_M,), float("-inf"), tl.float32)
    total = tl.zeros((BLOCK_M,), tl.float32)
    acc = tl.zeros((BLOCK_M, BLOCK_D), tl.float32)
    SLICE: tl.constexpr = slice_size(pool, PAGE_SIZE, DIM)
    PAGE_STRIDE: tl.constexpr = 2 * KV_HEADS * SLICE
    VALUES: tl.constexpr = KV_HEADS * SLICE
    table = page_table + seq * table_stride
    WINDOWED: tl.constexpr = PAGED_WINDOW or WINDOW > 0
    first_seen = 0
    clear = 0  # from this key on, no row's window masks a key
    if PAGED_WINDOW:
        until = tl.load(dense_until + seq).to(tl.int32)
        first_key = tl.maximum(position - WINDOW + 1, 0) // PAGE_SIZE * PAGE_SIZE
        first_key = tl.where(position < until, 0, first_key)  # [BLOCK_M]
        first_seen = tl.min(first_key)
        clear = tl.max(first_key)
    elif WINDOW > 0:
        first_key = position - WINDOW + 1
        first_seen = tl.maximum(past + begin - WINDOW + 1, 0)
        clear = past + begin + BLOCK_M - WINDOW
    lowest = first_seen // BLOCK_N * BLOCK_N
    own = (past + begin) // BLOCK_N * BLOCK_N  # tiles before it need no causal mask
    end = tl.minimum(past + begin + BLOCK_M, length)

    # Look up pages one tile ahead: a load that depends on another load would stall the loop.
    following = tl.load(table + lowest // PAGE_SIZE)
    for start in range(lowest, own, BLOCK_N):
        page = following
        following = tl.load(table + (start + BLOCK_N) // PAGE_SIZE)
        n = start + offs_n
        if TMA:
            first = (page * (2 * KV_HEADS) + kv_head) * PAGE_SIZE + start % PAGE_SIZE
            k = tiles.load([first, 0]).T
            v = tiles.load([first + KV_HEADS * PAGE_SIZE, 0])
        elif PAGE_SIZE % BLOCK_N == 0:
            slot = page.to(tl.int64) * PAGE_STRIDE + kv_head * SLICE
            slot = slot + (start % PAGE_SIZE + offs_n) * DIM
            k = tl.load(pool + slot[None, :] + offs_d[:, None], mask=in_dim[:, None], other=0.0)
            v = tl.load(
                pool + VALUES + slot[:, None] + offs_d[None, :], mask=in_dim[None, :], other=0.0
            )
        else:
            there = n >= first_seen
            k, v = _masked_tile(
                pool, table, start, there, kv_head, KV_HEADS, DIM, PAGE_SIZE, BLOCK_N
            )
        scores = tl.dot(q, k.to(q.dtype), input_precision="ieee")
        value_scale = None
        if has_scales(pool):
            key_scale, value_scale = _tile_scales(
                pool, table, start, n >= first_seen, kv_head, KV_HEADS, DIM, PAGE_SIZE, BLOCK_N
            )
            scores *= key_scale[None, :]
        if HIDE_LAST:
            scores = tl.where((n % PAGE_SIZE != PAGE_SIZE - 1)[None, :], scores, float("-inf"))
        if WINDOWED:  # noqa: SIM102 - known at compile time
            if start < clear:
                scores = tl.where(n[None, :] >= first_key[:, None], scores, float("-inf"))
        most, total, acc = softmax_step(
            scores, v.to(q.dtype), most, total, acc, not WINDOWED, value_scale
        )

    for start in range(own, end, BLOCK_N):
        n = start + offs_n
        there = (n >= first_seen) & (n < end)
        k, v = _masked_tile(pool, table, start, there, kv_head, KV_HEADS, DIM, PAGE_SIZE, BLOCK_N)
        scores = tl.dot(q, k.to(q.dtype), input_precision="ieee")
        value_scale = None
        if has_scales(pool):
            key_scale, value_scale = _tile_scales(
                pool, table, start, there, kv_head, KV_HEADS, DIM, PAGE_SIZE, BLOCK_N
            )
            scores *= key_scale[None, :]
        seen = n[None, :] <= position[:, None]
        if WINDOWED:
            seen = seen & (n[None, :] >= first_key[:, None])
        if HIDE_LAST:
            seen = seen & (n % PAGE_SIZE != PAGE_SIZE - 1)[None, :]
        scores = tl.where(seen, scores, float("-inf"))
        most, total, acc = softmax_step(scores, v.to(q.dtype), most, total, acc, False, value_scale)

    result, lse = softmax_result(most, total, acc)
    place = row[:, None] * (HEADS * DIM) + head * DIM + offs_d[None, :]
    tl.store(out + place, result.to(out.dtype.element_ty), mask=in_rows[:, None] & in_dim[None, :])
    if WITH_LSE:
        tl.store(lse_out + row * HEADS + head, lse, mask=in_rows)


def paged_extend(
    query: torch.Tensor,  # [rows, heads, dim], heads contiguous
    pool: torch.Tensor,  # [pages, 2 * kv_heads, page_size, dim]
    page_table: torch.Tensor,  # [seqs, pages] int32
    kv_lens: torch.Tensor,  # [seqs] int32
    cu_query: torch.Tensor,  # [seqs + 1] int32
    blocks: ExtendBlocks,
    out: torch.Tensor,  # [rows, heads, dim], contiguous
    *,
    scale: float,
    window: int | None = None,
    hide_last: bool = False,
    lse: torch.Tensor | None = None,  # [rows, heads] float32, filled if given
    dense_until: torch.Tensor | None = None,  # [seqs]: PAGED_WINDOW, see the kernel
) -> None:
    heads, dim = query.shape[1:]
    kv_heads, page_size = pool.shape[1] // 2, page_rows(pool)
    wide = dim > 128 or query.dtype == torch.float32
    block_n = 32 if wide else 64
    tma = can_describe(pool.device, pool.dtype) and _fits(block_n, page_size, dim)
    tiles = pool
    if tma:
        tiles = TensorDescriptor.from_tensor(pool.view(-1, dim), [block_n, dim])
    _extend_kernel[(heads, len(blocks.seq))](
        query,
        pool,
        tiles,
        page_table,
        kv_lens,
        cu_query,
        cu_query if dense_until is None else dense_until,
        blocks.seq,
        blocks.begin,
        out,
        out if lse is None else lse,
        scale,
        query.stride(0),
        page_table.stride(0),
        HEADS=heads,
        KV_HEADS=kv_heads,
        DIM=dim,
        PAGE_SIZE=page_size,
        WINDOW=window or 0,
        PAGED_WINDOW=dense_until is not None,
        HIDE_LAST=hide_last,
        WITH_LSE=lse is not None,
        BLOCK_M=blocks.block_m,
        BLOCK_N=block_n,
        TMA=tma,
        num_warps=8 if blocks.block_m == 128 else 4,
        num_stages=3 if tma and window is None else 2,  # short loops gain more from occupancy
    )


def _fits(block_n: int, page_size: int, dim: int) -> bool:
    """Whether a tile lies within one page and its rows need no padding."""
    return page_size % block_n == 0 and dim in (16, 32, 64, 128)


def can_describe(device: torch.device, dtype: torch.dtype) -> bool:
    """Whether whole tiles can be loaded through a descriptor (TMA)."""
    return dtype.itemsize == 2 and is_hopper(device)
