"""Finds the pages that a chunk of a prompt reads: in frames, or in a stage filled from host memory.

    1. claim: for each page that is in no frame, the first entry to arrive claims it for staging
    2. copy all claimed pages (`swap_in.copy_missed`)
    3. tell every entry where its page is

Claims arrive in any order, so the places of pages in the stage differ from run to run. The data
read is the same.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from cairn.kernels.launch import direct
from cairn.kernels.sizes import power_of_two
from cairn.kernels.swap_in import Misses

_LEAST, _MOST = 128, 1024  # entries per loop step; at least one per thread


@dataclass(frozen=True, slots=True)
class StageTables:
    """Tables of staged pages; all layers share the memory."""

    zeroed: torch.Tensor  # memory of `claims` and `staged.counts`, zeroed before every layer
    claims: torch.Tensor  # [kv_heads, pages] int32: 0, 1 if claimed, then 2 + page of the stage
    staged: Misses

    @classmethod
    def empty(
        cls, kv_heads: int, stage_pages: int, num_pages: int, device: torch.device
    ) -> StageTables:
        zeroed = torch.zeros(kv_heads * (num_pages + 1), dtype=torch.int32, device=device)
        entries = Misses.empty(kv_heads, stage_pages, device).entries
        entries[:, 2] = torch.arange(stage_pages, device=device)
        staged = Misses(entries, zeroed[:kv_heads])
        return cls(zeroed, zeroed[kv_heads:].view(kv_heads, num_pages), staged)


@direct
@triton.jit
def _stage_kernel(
    pages,  # [blocks, KV_HEADS, WIDTH] page ids
    counts,  # [blocks, KV_HEADS]
    frame_of,  # [num_pages]
    claims,
    staged,  # [KV_HEADS, 3, room] written if CLAIM
    staged_counts,  # [KV_HEADS]
    total,  # [1] added to unless CLAIM
    found,  # same shape as pages, written unless CLAIM
    room,
    num_pages,
    KV_HEADS: tl.constexpr,
    WIDTH: tl.constexpr,
    BLOCK: tl.constexpr,
    CLAIM: tl.constexpr,  # claim pages that are in no frame; otherwise tell where pages are
    STAGED: tl.constexpr,  # some pages are in no frame
):
    head = tl.program_id(0)
    own = tl.program_id(1) * KV_HEADS + head
    first_entry = own.to(tl.int64) * WIDTH
    count = tl.load(counts + own)
    for start in range(0, count, BLOCK):
        entry = start + tl.arange(0, BLOCK)
        there = entry < count
        page = tl.load(pages + first_entry + entry, mask=there, other=0)
        at = tl.load(frame_of + page, mask=there, other=0)
        missing = (page > 0) & (at == 0)
        claim = claims + head * num_pages + page
        if CLAIM:
            # Neighbours have claimed most pages already. A stale value here only costs an atomic.
            missing &= tl.load(claim, mask=missing, other=1) == 0
            one = tl.full((BLOCK,), 1, tl.int32)
            first = missing & (tl.atomic_max(claim, one, mask=missing) == 0)
            place = tl.atomic_add(staged_counts + head, tl.sum(first.to(tl.int32)))
            place += tl.cumsum(first.to(tl.int32), 0) - 1
            tl.store(staged + head * (3 * room) + place, page, mask=first)
            tl.store(claim, place + 2, mask=first)
        else:
            if STAGED:
                at = tl.where(missing, 1 - tl.load(claim, mask=missing, other=1), at)
            tl.store(found + first_entry + entry, at, mask=there)
    if not CLAIM and STAGED and tl.program_id(1) == 0:
        tl.atomic_add(total, tl.load(staged_counts + head).to(tl.int64))


def claim_missing(
    tables: StageTables,
    pages: torch.Tensor,  # [blocks, kv_heads, n] int32 page ids
    counts: torch.Tensor,  # [blocks, kv_heads] int32, number of entries in use
    frame_of: torch.Tensor,  # [num_pages] int32, 0 for none
) -> None:
    """Fill `tables.staged` with the distinct pages of each kv head that are in no frame.

    The stage must have room for them.
    """
    tables.zeroed.zero_()
    _launch(tables, pages, counts, frame_of, counts, pages, claim=True, staged=True)


def tell_places(
    tables: StageTables,
    pages: torch.Tensor,  # [blocks, kv_heads, n] int32 page ids
    counts: torch.Tensor,  # [blocks, kv_heads] int32
    frame_of: torch.Tensor,  # [num_pages] int32
    total: torch.Tensor,  # [1] int64, the number of staged pages is added
    *,
    staged: bool,  # true after `claim_missing`; if false, all pages are in frames
) -> torch.Tensor:
    """-> [blocks, kv_heads, n]: a page of the pool, or -1 - page of the stage. Only the entries
    within `counts` are set."""
    found = torch.empty_like(pages)
    _launch(tables, pages, counts, frame_of, total, found, claim=False, staged=staged)
    return found


def _launch(
    tables: StageTables,
    pages: torch.Tensor,
    counts: torch.Tensor,
    frame_of: torch.Tensor,
    total: torch.Tensor,
    found: torch.Tensor,
    *,
    claim: bool,
    staged: bool,
) -> None:
    blocks, kv_heads, width = pages.shape
    entries = tables.staged.entries
    _stage_kernel[(kv_heads, blocks)](
        *(pages, counts, frame_of, tables.claims, entries, tables.staged.counts),
        *(total, found, entries.shape[2], len(frame_of)),
        KV_HEADS=kv_heads,
        WIDTH=width,
        BLOCK=max(_LEAST, min(_MOST, power_of_two(width))),
        CLAIM=claim,
        STAGED=staged,
        num_warps=4,
    )
