"""Attention over a paged cache of latent rows: one row serves all heads as key and as value.

A latent row is [latent | rope]. Queries are absorbed, so they have the same columns; values are the
first `latent` columns. All heads read the same rows, so tiles of heads share them.

Decode: each program takes an equal share of all pages of a step, of whichever sequences they are.
The device plans the shares, once per step:

    pages: [max_seqs + 1] pages of all sequences before each; [max_seqs + 1] holds the share

A program that reads only a part of a sequence stores a partial result, and a second kernel merges
these. A program has at most two such parts: of a sequence that began before it (place 2 * program),
and of one that ends after it (2 * program + 1).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait
from triton.tools.tensor_descriptor import TensorDescriptor

from cairn.kernels.fp8_rows import is_narrow
from cairn.kernels.fp8_tiles import load_latents, row_size
from cairn.kernels.launch import direct
from cairn.kernels.paged_extend import ExtendBlocks, can_describe
from cairn.kernels.pdl import pdl_options
from cairn.kernels.processors import processors
from cairn.kernels.sizes import blocks_of, power_of_two
from cairn.kernels.softmax import LOG2E, softmax_result, softmax_step

_LEAST_ROWS = 128  # fewest rows of a share: less is not worth the merge
_TILE = 64, 2  # rows of a tile, and tiles in memory, of 16-bit types
_TILE_FLOAT32 = 16, 1
_MERGED = tl.constexpr(16)  # parts that are merged at once


@dataclass(frozen=True, slots=True)
class LatentShares:
    pages: torch.Tensor  # [max_seqs + 2] int32
    partial: torch.Tensor  # [2 * programs, heads, latent] float32
    partial_lse: torch.Tensor  # [2 * programs, heads] float32

    @classmethod
    def empty(
        cls, max_seqs: int, heads: int, latent: int, dtype: torch.dtype, device: torch.device
    ) -> LatentShares:
        count = _programs(heads, dtype, device)
        return cls(
            torch.zeros(max_seqs + 2, dtype=torch.int32, device=device),
            torch.empty(2 * count, heads, latent, dtype=torch.float32, device=device),
            torch.empty(2 * count, heads, dtype=torch.float32, device=device),
        )

    @property
    def programs(self) -> int:
        """Programs that share the pages; there are as many for each tile of heads."""
        return len(self.partial) // 2


def _block_m(dtype: torch.dtype) -> int:
    """Queries of a program. Tensor cores of an H200 take 64; float32 has none."""
    return 64 if dtype.itemsize == 2 else 16


def _head_tile(heads: int, dtype: torch.dtype) -> int:
    return min(_block_m(dtype), power_of_two(heads))


def _programs(heads: int, dtype: torch.dtype, device: torch.device) -> int:
    """A program has a multiprocessor for itself: its tiles fill shared memory."""
    return max(1, processors(device) // blocks_of(heads, _head_tile(heads, dtype)))


def rows_per_block(heads: int, dtype: torch.dtype) -> int:
    """Rows of a sequence that one program of `latent_extend` handles."""
    return _block_m(dtype) // _head_tile(heads, dtype)


@direct
@triton.jit(do_not_specialize=["num_seqs"])
def _share_kernel(
    kv_lens,  # [num_seqs]
    pages,
    num_seqs: tl.int32,
    MAX_SEQS: tl.constexpr,
    PROGRAMS: tl.constexpr,
    PAGE_SIZE: tl.constexpr,
    LEAST: tl.constexpr,
    BLOCK: tl.constexpr,  # at least MAX_SEQS
):
    seq = tl.arange(0, BLOCK)
    length = tl.load(kv_lens + seq, mask=seq < num_seqs, other=0).to(tl.int32)
    own = (length + PAGE_SIZE - 1) // PAGE_SIZE
    total = tl.sum(own)
    tl.store(pages + seq, tl.cumsum(own, 0) - own, mask=seq < MAX_SEQS)
    tl.store(pages + MAX_SEQS, total)
    tl.store(pages + MAX_SEQS + 1, tl.maximum((total + PROGRAMS - 1) // PROGRAMS, LEAST))


def share_pages(shares: LatentShares, kv_lens: torch.Tensor, page_size: int) -> None:
    """Plan the shares of a step.

    Attention reads the plan before its PDL wait. A kernel launched without PDL must therefore run
    between the two; in a step, `known_tokens` does.
    """
    max_seqs = len(shares.pages) - 2
    _share_kernel[(1,)](
        kv_lens,
        shares.pages,
        len(kv_lens),
        MAX_SEQS=max_seqs,
        PROGRAMS=shares.programs,
        PAGE_SIZE=page_size,
        LEAST=max(1, _LEAST_ROWS // page_size),
        BLOCK=power_of_two(max_seqs),
    )


@triton.jit
def _tile(
    query,
    pool,
    table,  # page table row of the sequence
    n,  # [BLOCK_N] rows of the sequence
    there,  # [BLOCK_N] rows to load; others are zero
    LATENT: tl.constexpr,
    ROPE: tl.constexpr,
    PAGE_SIZE: tl.constexpr,
    BLOCK_L: tl.constexpr,
    BLOCK_R: tl.constexpr,
):
    """-> latents [BLOCK_N, BLOCK_L] and rotated parts [BLOCK_N, BLOCK_R]"""
    page = tl.load(table + n // PAGE_SIZE, mask=there, other=0).to(tl.int64)
    WIDTH: tl.constexpr = LATENT + ROPE
    row = pool + (page * PAGE_SIZE + n % PAGE_SIZE) * row_size(pool, WIDTH)
    latent = load_latents(row, there, query, 0, LATENT, WIDTH, BLOCK_L)
    rope = load_latents(row, there, query, LATENT, ROPE, WIDTH, BLOCK_R)
    return latent, rope


@triton.jit
def _attend(
    query,  # [rows, HEADS, LATENT + ROPE], contiguous
    pool,  # [pages, PAGE_SIZE, LATENT + ROPE], or rows of 8 bits with their scales
    latents,  # if TMA: descriptors of the pool as [-1, LATENT + ROPE], for loads of
    ropes,  # [BLOCK_N, LATENT] and [BLOCK_N, ROPE]
    table,
    row,  # [BLOCK_M] row of each query
    head,  # [BLOCK_M] its head
    valid,  # [BLOCK_M]
    position,  # [BLOCK_M] the last row of the sequence that it sees
    begin,  # first row to read, a multiple of PAGE_SIZE
    seen,  # all queries see all rows before it
    end,
    scale,
    HEADS: tl.constexpr,
    LATENT: tl.constexpr,
    ROPE: tl.constexpr,
    PAGE_SIZE: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    TMA: tl.constexpr,
):
    """-> output [BLOCK_M, BLOCK_L] float32 and log-sum-exp [BLOCK_M]"""
    BLOCK_L: tl.constexpr = max(16, triton.next_power_of_2(LATENT))
    BLOCK_R: tl.constexpr = max(16, triton.next_power_of_2(ROPE))
    offs_l = tl.arange(0, BLOCK_L)
    offs_r = tl.arange(0, BLOCK_R)
    offs_n = tl.arange(0, BLOCK_N)
    own = query + (row.to(tl.int64) * HEADS + head)[:, None] * (LATENT + ROPE)
    q = tl.load(own + offs_l[None, :], mask=valid[:, None] & (offs_l < LATENT)[None, :], other=0.0)
    q_rope = tl.load(
        own + LATENT + offs_r[None, :], mask=valid[:, None] & (offs_r < ROPE)[None, :], other=0.0
    )
    most = tl.full((BLOCK_M,), float("-inf"), tl.float32)
    total = tl.zeros((BLOCK_M,), tl.float32)
    acc = tl.zeros((BLOCK_M, BLOCK_L), tl.float32)
    clear = begin + tl.maximum(seen - begin, 0) // BLOCK_N * BLOCK_N  # tiles without a mask
    # Look up pages one tile ahead: a load that depends on another load would stall the loop.
    following = tl.load(table + begin // PAGE_SIZE)
    for start in range(begin, clear, BLOCK_N):
        if TMA:
            first = following * PAGE_SIZE + start % PAGE_SIZE
            following = tl.load(table + (start + BLOCK_N) // PAGE_SIZE)
            k = latents.load([first, 0])
            k_rope = ropes.load([first, LATENT])
        else:
            n = start + offs_n
            k, k_rope = _tile(
                query, pool, table, n, n < clear, LATENT, ROPE, PAGE_SIZE, BLOCK_L, BLOCK_R
            )
        # Always true. Without a branch, Triton sees that the second product takes the result of the
        # first, and lets both halves of the warps compute all scores.
        if end > 0:
            scores = tl.dot(q, k.T, input_precision="ieee") * (scale * LOG2E)
            scores += tl.dot(q_rope, k_rope.T, input_precision="ieee") * (scale * LOG2E)
            new_most = tl.maximum(most, tl.max(scores, 1))
            weights = tl.exp2(scores - new_most[:, None])
            fade = tl.exp2(most - new_most)
            total = total * fade + tl.sum(weights, 1)
            shares = weights.to(k.dtype)
            most = new_most
        else:
            shares = tl.full((BLOCK_M, BLOCK_N), scale, tl.float32).to(k.dtype)
            fade = tl.full((BLOCK_M,), scale, tl.float32)
        acc = tl.dot(shares, k, acc * fade[:, None], input_precision="ieee")
    for start in range(clear, end, BLOCK_N):
        n = start + offs_n
        k, k_rope = _tile(query, pool, table, n, n < end, LATENT, ROPE, PAGE_SIZE, BLOCK_L, BLOCK_R)
        scores = tl.dot(q, k.T, input_precision="ieee")
        scores = tl.dot(q_rope, k_rope.T, scores, input_precision="ieee")
        scores = tl.where(n[None, :] <= position[:, None], scores * (scale * LOG2E), float("-inf"))
        most, total, acc = softmax_step(scores, k, most, total, acc, False)
    return softmax_result(most, total, acc)


@direct
@triton.jit(do_not_specialize=["table_stride"])
def _latent_decode_kernel(
    query,  # [rows, HEADS, LATENT + ROPE]
    pool,
    latents,
    ropes,
    page_table,  # [seqs, ...]
    kv_lens,  # [seqs]
    rows,  # [seqs] row of each sequence's query
    pages,
    out,  # [rows, HEADS, LATENT]
    partial,
    partial_lse,
    scale,
    table_stride: tl.int32,
    MAX_SEQS: tl.constexpr,
    HEADS: tl.constexpr,
    LATENT: tl.constexpr,
    ROPE: tl.constexpr,
    PAGE_SIZE: tl.constexpr,
    HEAD_TILE: tl.constexpr,
    BLOCK_M: tl.constexpr,  # at least HEAD_TILE
    BLOCK_N: tl.constexpr,
    BLOCK_SEQS: tl.constexpr,  # at least MAX_SEQS
    TMA: tl.constexpr,
    PDL: tl.constexpr,
):
    if PDL:
        gdc_launch_dependents()
    # Data that is constant within a step is read before the wait, bypassing the L1 cache.
    program = tl.program_id(1)
    seqs = tl.arange(0, BLOCK_SEQS)
    ends = tl.load(pages + 1 + seqs, mask=seqs < MAX_SEQS, other=2**31 - 1, cache_modifier=".cg")
    total = tl.load(pages + MAX_SEQS, cache_modifier=".cg")
    share = tl.load(pages + MAX_SEQS + 1, cache_modifier=".cg")
    first = program * share
    last = tl.minimum(first + share, total)
    if PDL:
        gdc_wait()
    if first >= total:
        return
    offs_m = tl.arange(0, BLOCK_M)
    head = tl.program_id(0) * HEAD_TILE + offs_m
    valid = (offs_m < HEAD_TILE) & (head < HEADS)
    offs_l = tl.arange(0, max(16, triton.next_power_of_2(LATENT)))
    mask = valid[:, None] & (offs_l < LATENT)[None, :]
    first_seq = tl.sum((ends <= first).to(tl.int32))
    last_seq = tl.sum((ends < last).to(tl.int32))
    for seq in range(first_seq, last_seq + 1):
        begin = tl.load(pages + seq)
        end = tl.load(pages + seq + 1)
        if end > begin:  # a sequence may have nothing to read here
            length = tl.load(kv_lens + seq).to(tl.int32)
            row = tl.load(rows + seq).to(tl.int64)
            first_row = (tl.maximum(first, begin) - begin) * PAGE_SIZE
            end_row = tl.minimum((tl.minimum(last, end) - begin) * PAGE_SIZE, length)
            result, lse = _attend(
                query,
                pool,
                latents,
                ropes,
                page_table + seq * table_stride,
                row + tl.zeros_like(head),
                head,
                valid,
                end_row - 1 + tl.zeros_like(head),
                first_row,
                end_row,
                end_row,
                scale,
                HEADS,
                LATENT,
                ROPE,
                PAGE_SIZE,
                BLOCK_M,
                BLOCK_N,
                TMA,
            )
            if (begin >= first) & (end <= last):
                place = out + (row * HEADS + head)[:, None] * LATENT + offs_l[None, :]
                tl.store(place, result.to(out.dtype.element_ty), mask=mask)
            else:
                part = 2 * program + (begin >= first).to(tl.int32)
                at = part * HEADS + head
                tl.store(partial + at[:, None] * LATENT + offs_l[None, :], result, mask=mask)
                tl.store(partial_lse + at, lse, mask=valid)


@direct
@triton.jit
def _latent_merge_kernel(
    rows,  # [seqs]
    pages,
    out,  # [rows, HEADS, LATENT]
    partial,
    partial_lse,
    MAX_SEQS: tl.constexpr,
    HEADS: tl.constexpr,
    LATENT: tl.constexpr,
    PDL: tl.constexpr,
):
    if PDL:
        gdc_launch_dependents()
    head = tl.program_id(0)
    seq = tl.program_id(1)
    begin = tl.load(pages + seq, cache_modifier=".cg")
    end = tl.load(pages + seq + 1, cache_modifier=".cg")
    share = tl.load(pages + MAX_SEQS + 1, cache_modifier=".cg")
    row = tl.load(rows + seq, cache_modifier=".cg").to(tl.int64)
    if PDL:
        gdc_wait()
    first = begin // share
    last = (end - 1) // share
    if (end <= begin) | (first == last):
        return
    offs_l = tl.arange(0, max(16, triton.next_power_of_2(LATENT)))
    inside = offs_l < LATENT
    most = float("-inf")
    total = 0.0
    merged = tl.zeros(offs_l.shape, tl.float32)
    for start in range(first, last + 1, _MERGED):
        program = start + tl.arange(0, _MERGED)
        there = program <= last
        at = (2 * program + (program == first).to(tl.int32)) * HEADS + head
        lse = tl.load(partial_lse + at, mask=there, other=float("-inf"), cache_modifier=".cg")
        part = tl.load(
            partial + at[:, None] * LATENT + offs_l[None, :],
            mask=there[:, None] & inside[None, :],
            other=0.0,
            cache_modifier=".cg",
        )
        new_most = tl.maximum(most, tl.max(lse, 0))
        fade = tl.exp(most - new_most)
        weight = tl.exp(lse - new_most)
        merged = merged * fade + tl.sum(part * weight[:, None], 0)
        total = total * fade + tl.sum(weight, 0)
        most = new_most
    place = out + (row * HEADS + head) * LATENT + offs_l
    tl.store(place, (merged / total).to(out.dtype.element_ty), mask=inside)


@direct
@triton.jit(do_not_specialize=["table_stride"])
def _latent_extend_kernel(
    query,  # [rows, HEADS, LATENT + ROPE]
    pool,
    latents,
    ropes,
    page_table,
    kv_lens,
    cu_query,  # [seqs + 1] first row of each sequence
    block_seq,
    block_begin,
    out,  # [rows, HEADS, LATENT]
    scale,
    table_stride: tl.int32,
    HEADS: tl.constexpr,
    LATENT: tl.constexpr,
    ROPE: tl.constexpr,
    PAGE_SIZE: tl.constexpr,
    HEAD_TILE: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    TMA: tl.constexpr,
):
    ROWS: tl.constexpr = BLOCK_M // HEAD_TILE
    block = tl.program_id(1)
    seq = tl.load(block_seq + block)
    begin = tl.load(block_begin + block)
    if begin < 0:
        return
    first_row = tl.load(cu_query + seq).to(tl.int32)
    new = tl.load(cu_query + seq + 1).to(tl.int32) - first_row
    length = tl.load(kv_lens + seq).to(tl.int32)
    past = length - new
    offs_m = tl.arange(0, BLOCK_M)
    own = begin + offs_m // HEAD_TILE  # index among the sequence's new rows
    head = tl.program_id(0) * HEAD_TILE + offs_m % HEAD_TILE
    valid = (own < new) & (head < HEADS)
    row = first_row + own
    result, _ = _attend(
        query,
        pool,
        latents,
        ropes,
        page_table + seq * table_stride,
        row,
        head,
        valid,
        past + own,
        0,
        past + begin + 1,
        tl.minimum(past + begin + ROWS, length),
        scale,
        HEADS,
        LATENT,
        ROPE,
        PAGE_SIZE,
        BLOCK_M,
        BLOCK_N,
        TMA,
    )
    offs_l = tl.arange(0, max(16, triton.next_power_of_2(LATENT)))
    place = out + (row.to(tl.int64) * HEADS + head)[:, None] * LATENT + offs_l[None, :]
    mask = valid[:, None] & (offs_l < LATENT)[None, :]
    tl.store(place, result.to(out.dtype.element_ty), mask=mask)


def latent_decode(
    query: torch.Tensor,  # [rows, heads, latent + rope], contiguous
    pool: torch.Tensor,  # [pages, page_size, latent + rope], or packed rows of 8 bits
    page_table: torch.Tensor,  # [seqs, pages] int32
    kv_lens: torch.Tensor,  # [seqs] int32; sequences of length 0 are left out
    rows: torch.Tensor,  # [seqs] int32, query row of each sequence
    shares: LatentShares,  # planned by `share_pages` for these lengths
    out: torch.Tensor,  # [rows, heads, latent], contiguous
    *,
    scale: float,
) -> None:
    """Attention of one row of each sequence."""
    descriptors, sizes = _sizes(query, pool, out)
    max_seqs = len(shares.pages) - 2
    _latent_decode_kernel[(blocks_of(out.shape[1], sizes["HEAD_TILE"]), shares.programs)](
        query, pool, *descriptors, page_table, kv_lens, rows, shares.pages, out, shares.partial,
        shares.partial_lse, scale, page_table.stride(0), MAX_SEQS=max_seqs,
        BLOCK_SEQS=power_of_two(max_seqs), **sizes, **pdl_options(query),
    )  # fmt: skip
    merge_shares(shares, rows, out)


def merge_shares(shares: LatentShares, rows: torch.Tensor, out: torch.Tensor) -> None:
    """Merge the partial results of sequences that several programs have read."""
    heads, latent = out.shape[1:]
    _latent_merge_kernel[(heads, len(rows))](
        rows, shares.pages, out, shares.partial, shares.partial_lse, HEADS=heads, LATENT=latent,
        MAX_SEQS=len(shares.pages) - 2, num_warps=4, **pdl_options(out),
    )  # fmt: skip


def latent_extend(
    query: torch.Tensor,  # [rows, heads, latent + rope], contiguous
    pool: torch.Tensor,  # [pages, page_size, latent + rope], or packed rows of 8 bits
    page_table: torch.Tensor,  # [seqs, pages] int32
    kv_lens: torch.Tensor,  # [seqs] int32
    cu_query: torch.Tensor,  # [seqs + 1] int32
    blocks: ExtendBlocks,  # of `rows_per_block` rows
    out: torch.Tensor,  # [rows, heads, latent], contiguous
    *,
    scale: float,
) -> None:
    """Causal attention of many rows of each sequence."""
    descriptors, sizes = _sizes(query, pool, out)
    assert blocks.block_m == rows_per_block(query.shape[1], query.dtype)
    _latent_extend_kernel[(blocks_of(out.shape[1], sizes["HEAD_TILE"]), len(blocks.seq))](
        query, pool, *descriptors, page_table, kv_lens, cu_query, blocks.seq, blocks.begin, out,
        scale, page_table.stride(0), **sizes,
    )  # fmt: skip


def _sizes(
    query: torch.Tensor, pool: torch.Tensor, out: torch.Tensor
) -> tuple[tuple[Any, Any], dict[str, Any]]:
    """Descriptors of latents and rotated parts; constants and options of the kernels."""
    heads, width = query.shape[1:]
    page_size, latent = pool.shape[1], out.shape[2]
    half = query.dtype.itemsize == 2
    block_n, tiles = _TILE if half else _TILE_FLOAT32
    rope = width - latent
    tma = (
        not is_narrow(pool.dtype)
        and can_describe(pool.device, pool.dtype)
        and page_size % block_n == 0
        and latent in (64, 128, 256, 512)
        and rope in (16, 32, 64)
    )
    descriptors: tuple[Any, Any] = pool, pool
    if tma:
        flat = pool.view(-1, width)
        describe = TensorDescriptor.from_tensor
        descriptors = describe(flat, [block_n, latent]), describe(flat, [block_n, rope])
    sizes: dict[str, Any] = {"HEADS": heads, "LATENT": latent, "ROPE": rope, "TMA": tma}
    sizes |= {"PAGE_SIZE": page_size, "HEAD_TILE": _head_tile(heads, query.dtype)}
    sizes |= {"BLOCK_M": _block_m(query.dtype), "BLOCK_N": block_n}
    sizes |= {"num_warps": 8 if half else 4, "num_stages": tiles}
    return descriptors, sizes
