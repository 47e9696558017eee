"""Swaps in selected pages: a plan with one program per kv head, then one wide copy of all misses.

The plan matches `memory.hot_cache.HotCache` slot for slot. A table by page says which slot may hold
a slice (one kv head's part of a page). The answer counts only if the slot's tag matches, so nothing
is purged when pages are freed. Both launches read their sizes from device memory, so graphs can
record them. If nothing is missing, they end after one pass over the selection.

Host memory is registered with CUDA (see `memory.pinned`), so kernels take its tensors directly.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from cairn.kernels.interface import COPY_THREADS, HOT_AGES
from cairn.kernels.launch import direct
from cairn.kernels.layer_memory import LayerMemory
from cairn.kernels.pdl import pdl_options
from cairn.kernels.sizes import blocks_of, power_of_two

_UNCLAIMED = tl.constexpr(0x7FFFFFFF)
_LATE = tl.constexpr(2**30)  # clock at which ages move back, to fit 32 bits: a month of steps
_ENTRIES = (256, 1024)  # selected entries per loop step; each size is compiled separately
_WORDS_PER_THREAD = 8  # words of four bytes that each thread of a copy has in flight
_COPY_PROGRAMS = 264


@dataclass(frozen=True, slots=True)
class HotTables:
    """The hot cache of one layer."""

    pages: torch.Tensor  # [kv_heads, slots] int32, -1 for none
    generations: torch.Tensor  # [kv_heads, slots] int32
    used: torch.Tensor  # [kv_heads, slots] int32, time of the last use
    clock: torch.Tensor  # [kv_heads] int32
    slot_of: torch.Tensor  # [kv_heads, pages] int32, slot that last held the page
    arrived: torch.Tensor  # [kv_heads, slots] int32, pieces of the slot's page that have arrived

    @classmethod
    def empty(cls, kv_heads: int, slots: int, num_pages: int, device: torch.device) -> HotTables:
        def ints(width: int, value: int) -> torch.Tensor:
            return torch.full((kv_heads, width), value, dtype=torch.int32, device=device)

        clock = torch.zeros(kv_heads, dtype=torch.int32, device=device)
        lives, used, arrived = ints(slots, 0), ints(slots, 0), ints(slots, 0)
        return cls(ints(slots, -1), lives, used, clock, ints(num_pages, 0), arrived)


@dataclass(frozen=True, slots=True)
class Misses:
    """List of slices to copy."""

    entries: torch.Tensor  # [kv_heads, 3, n] int32: page, generation, destination
    counts: torch.Tensor  # [kv_heads] int32, number of entries in use

    @classmethod
    def empty(cls, kv_heads: int, room: int, device: torch.device) -> Misses:
        entries = torch.zeros(kv_heads, 3, room, dtype=torch.int32, device=device)
        return cls(entries, torch.zeros(kv_heads, dtype=torch.int32, device=device))


@dataclass(frozen=True, slots=True)
class SwapScratch:
    """Memory that passes data between plan, copy and attention; all layers share it."""

    located: torch.Tensor  # [seqs, kv_heads, k] int32 page of the pool, 0 for none, negated while
    #                        it is being copied
    claims: torch.Tensor  # [kv_heads, pages] int32, the entry that claims a missing page
    misses: Misses
    totals: torch.Tensor  # [4] int64, never reset: reads of resident pages, reads of hot pages,
    #                       misses, and staged slices, which the caller counts

    @classmethod
    def empty(
        cls, seqs: int, kv_heads: int, topk: int, num_pages: int, device: torch.device
    ) -> SwapScratch:
        def ints(*size: int) -> torch.Tensor:
            return torch.zeros(size, dtype=torch.int32, device=device)

        return cls(
            ints(seqs, kv_heads, topk),
            ints(kv_heads, num_pages).fill_(_UNCLAIMED.value),
            Misses.empty(kv_heads, seqs * topk, device),
            torch.zeros(4, dtype=torch.int64, device=device),
        )


@triton.jit
def _entry(start, of, KV_HEADS: tl.constexpr, TOPK: tl.constexpr, BLOCK: tl.constexpr):
    """-> BLOCK entries of the selection from `start` on: index, whether the entry is in use, page,
    generation and frame. Unused entries have the null page. `of` is what the next line names."""
    head, total, selected, page_table, generations, frame_of, table_stride = of
    entry = start + tl.arange(0, BLOCK)
    seq, k = entry // TOPK, entry % TOPK
    there = entry < total
    place = tl.load(selected + (seq * KV_HEADS + head) * TOPK + k, mask=there, other=-1)
    there = place >= 0
    at = seq * table_stride + place
    page = tl.load(page_table + at, mask=there, other=0)
    life = tl.load(generations + at, mask=there, other=0)
    frame = tl.load(frame_of + page, mask=there, other=0)
    return entry, there, page, life, frame


@triton.jit
def _find(page, life, wanted, head, hot_pages, hot_lives, slot_of, num_pages, SLOTS: tl.constexpr):
    """-> the slot of each wanted page, and whether it really holds the page"""
    slot = tl.load(slot_of + head * num_pages + page, mask=wanted, other=0)
    tag = head * SLOTS + slot
    held = tl.load(hot_pages + tag, mask=wanted, other=-1) == page
    held &= tl.load(hot_lives + tag, mask=wanted, other=-1) == life
    return slot, wanted & held


# Numbers that change from step to step are not specialized: a step must not wait for a compiler.
@direct
@triton.jit(do_not_specialize=["total", "table_stride"])
def _swap_plan_kernel(
    selected,  # [seqs, KV_HEADS, TOPK] place in the sequence, -1 for none
    page_table,  # [seqs, ...] page ids
    generations,  # [seqs, ...]
    frame_of,  # [num_pages] frame of a resident page, 0 for none
    hot_pages,
    hot_lives,
    used,
    clock,
    slot_of,
    arrived,
    located,
    claims,
    missed,
    counts,
    totals,
    total: tl.int32,  # number of entries, seqs * TOPK
    room,  # capacity of `missed`, in entries
    num_pages,
    table_stride: tl.int32,
    first_hot,  # the page of the pool that is slot 0
    KV_HEADS: tl.constexpr,
    TOPK: tl.constexpr,
    SLOTS: tl.constexpr,
    BLOCK_SLOTS: tl.constexpr,
    BLOCK: tl.constexpr,
    ONE: tl.constexpr,  # one block holds all entries
    WAYS: tl.constexpr,  # times of last use tried at once in the search for victims
    AGES: tl.constexpr,  # see HOT_AGES
    PDL: tl.constexpr,
):
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    head = tl.program_id(0)
    slots = tl.arange(0, BLOCK_SLOTS)
    now = tl.load(clock + head) + 2
    if now >= _LATE:
        now -= _LATE // 2
        age = tl.load(used + head * SLOTS + slots, mask=slots < SLOTS, other=0)
        tl.store(used + head * SLOTS + slots, tl.maximum(age - _LATE // 2, 0), mask=slots < SLOTS)
        tl.debug_barrier()
    tl.store(clock + head, now)
    my_missed = missed + head * (3 * room)

    # Tell entries where their page is if it is present, and mark its slot as used. Of the entries
    # that miss the same page, the first claims it.
    every = 0
    reads = 0
    missing = 0
    of = (head, total, selected, page_table, generations, frame_of, table_stride)
    entry, there, page, life, frame = _entry(0, of, KV_HEADS, TOPK, BLOCK)
    for start in range(0, total, BLOCK):
        if not ONE:
            entry, there, page, life, frame = _entry(start, of, KV_HEADS, TOPK, BLOCK)
        wanted = there & (frame == 0)
        slot, hit = _find(page, life, wanted, head, hot_pages, hot_lives, slot_of, num_pages, SLOTS)
        tl.store(used + head * SLOTS + slot, tl.full((BLOCK,), 0, tl.int32) + now + 1, mask=hit)
        tl.atomic_min(claims + head * num_pages + page, entry, mask=wanted & ~hit)
        # Pack three counts into one sum, because every sum synchronizes all warps.
        kinds = there.to(tl.int64) + (wanted.to(tl.int64) << 20)
        kinds = tl.sum(kinds + ((wanted & ~hit).to(tl.int64) << 40))
        every += (kinds & 0xFFFFF).to(tl.int32)
        reads += (kinds >> 20 & 0xFFFFF).to(tl.int32)
        missing += (kinds >> 40).to(tl.int32)
        found = tl.where(wanted, first_hot + slot, frame)
        where = (entry // TOPK * KV_HEADS + head) * TOPK + entry % TOPK
        tl.store(located + where, tl.where(there, found, 0), mask=entry < total)

    misses = 0
    if missing > 0:
        tl.debug_barrier()
        # List the claimed pages, in the order of the entries that claim them.
        for start in range(0, total, BLOCK):
            if not ONE:
                entry, there, page, life, frame = _entry(start, of, KV_HEADS, TOPK, BLOCK)
            wanted = there & (frame == 0)
            claim = tl.load(claims + head * num_pages + page, mask=wanted, other=-1)
            first = wanted & (claim == entry)
            place = misses + tl.cumsum(first.to(tl.int32), 0) - 1
            tl.store(my_missed + place, page, mask=first)
            tl.store(my_missed + room + place, life, mask=first)
            misses += tl.sum(first.to(tl.int32))
        tl.debug_barrier()

        # Pick as many slots as there are misses: least recently used first, ties to the lower one.
        age = tl.load(used + head * SLOTS + slots, mask=slots < SLOTS, other=0x7FFFFFFF)
        age = tl.maximum(age, now + 2 - AGES)
        low, high = tl.maximum(now + 2 - AGES, 0), now
        while low < high:
            step = (high - low + WAYS - 1) // WAYS
            tried = low + tl.arange(0, WAYS) * step
            held = tl.sum((age[:, None] <= tried[None, :]).to(tl.int32), 0)
            few = tl.sum((held < misses).to(tl.int32))  # tried ages with too few slots: a prefix
            low = tl.where(few > 0, low + (few - 1) * step + 1, low)
            high = tl.minimum(high, tl.where(few > 0, low + step - 1, low))
        older = age < low
        same = (age == low).to(tl.int32)
        spare = misses - tl.sum(older.to(tl.int32))
        victim = older | ((same > 0) & (tl.cumsum(same, 0) <= spare))
        order = tl.cumsum(victim.to(tl.int32), 0) - 1
        new_page = tl.load(my_missed + order, mask=victim, other=0)
        new_life = tl.load(my_missed + room + order, mask=victim, other=0)
        tl.store(my_missed + 2 * room + order, slots, mask=victim)
        tl.store(hot_pages + head * SLOTS + slots, new_page, mask=victim)
        tl.store(hot_lives + head * SLOTS + slots, new_life, mask=victim)
        loaded = tl.full((BLOCK_SLOTS,), 0, tl.int32) + now
        tl.store(used + head * SLOTS + slots, loaded, mask=victim)
        tl.store(slot_of + head * num_pages + new_page, slots, mask=victim)
        nothing = tl.full((BLOCK_SLOTS,), 0, tl.int32)
        tl.store(arrived + head * SLOTS + slots, nothing, mask=victim)
        unclaimed = tl.full((BLOCK_SLOTS,), _UNCLAIMED, tl.int32)
        tl.store(claims + head * num_pages + new_page, unclaimed, mask=victim)
        tl.debug_barrier()

        for start in range(0, total, BLOCK):
            if not ONE:
                entry, there, page, life, frame = _entry(start, of, KV_HEADS, TOPK, BLOCK)
            wanted = there & (frame == 0)
            slot = tl.load(slot_of + head * num_pages + page, mask=wanted, other=0)
            new = tl.load(used + head * SLOTS + slot, mask=wanted, other=0) == now
            found = tl.where(new, -first_hot - slot, first_hot + slot)
            where = (entry // TOPK * KV_HEADS + head) * TOPK + entry % TOPK
            tl.store(located + where, found, mask=wanted)

    tl.store(counts + head, misses)
    tl.atomic_add(totals, every - reads)
    tl.atomic_add(totals + 1, reads - misses)
    tl.atomic_add(totals + 2, misses)


@direct
@triton.jit
def _swap_copy_kernel(
    host,  # [pages, 2 * KV_HEADS, WORDS] int32, host memory that the device can read
    pool,  # [pages, 2 * KV_HEADS, WORDS] int32
    missed,
    counts,
    arrived,  # [KV_HEADS, slots] counts arrived pieces, if TELL
    room,
    first,
    slots,
    KV_HEADS: tl.constexpr,
    WORDS: tl.constexpr,  # words of one kv head's keys, or values, of a page
    PIECE: tl.constexpr,
    PROGRAMS: tl.constexpr,
    TELL: tl.constexpr,
    PDL: tl.constexpr,
):
    if PDL:
        # In this order, so that the next kernel knows, without waiting for the copies, that the
        # plan is complete.
        gdc_wait()
        gdc_launch_dependents()
    heads = tl.arange(0, triton.next_power_of_2(KV_HEADS))
    count = tl.load(counts + heads, mask=heads < KV_HEADS, other=0)
    end = tl.cumsum(count, 0)
    PIECES: tl.constexpr = (WORDS + PIECE - 1) // PIECE
    total = tl.sum(count) * (2 * PIECES)
    offs = tl.arange(0, PIECE)
    for task in range(tl.program_id(0), total, PROGRAMS):
        miss, part = task // (2 * PIECES), task % (2 * PIECES)
        head = tl.sum((end <= miss).to(tl.int32))
        begin = tl.sum(tl.where(heads == head, end - count, 0))
        own = missed + head * (3 * room) + miss - begin
        page, slot = tl.load(own).to(tl.int64), tl.load(own + 2 * room).to(tl.int64)
        half, piece = part // PIECES, part % PIECES
        words = piece * PIECE + offs
        from_ = (page * (2 * KV_HEADS) + half * KV_HEADS + head) * WORDS + words
        into = ((first + slot) * (2 * KV_HEADS) + half * KV_HEADS + head) * WORDS + words
        moved = tl.load(host + from_, mask=words < WORDS, other=0)
        tl.store(pool + into, moved, mask=words < WORDS)
        if TELL:
            tl.debug_barrier()  # the whole piece is stored before it is counted
            tl.atomic_add(arrived + head * slots + slot, 1, sem="release")


@direct
@triton.jit(
    do_not_specialize=["count"], do_not_specialize_on_alignment=["from_pages", "into_pages"]
)
def _swap_pages_kernel(
    source,  # [pages, WORDS] int32 of the first layer
    target,  # [pages, WORDS] int32 of the first layer
    source_shifts,  # [LAYERS]
    target_shifts,  # [LAYERS]
    from_pages,  # [count]
    into_pages,  # [count]
    count: tl.int32,
    LAYERS: tl.constexpr,
    WORDS: tl.constexpr,
    PIECE: tl.constexpr,
    PROGRAMS: tl.constexpr,
):
    PIECES: tl.constexpr = (WORDS + PIECE - 1) // PIECE
    offs = tl.arange(0, PIECE)
    for task in range(tl.program_id(0), LAYERS * count * PIECES, PROGRAMS):
        layer, rest = task // (count * PIECES), task % (count * PIECES)
        page, piece = rest // PIECES, rest % PIECES
        words = piece * PIECE + offs
        from_ = tl.load(from_pages + page).to(tl.int64) * WORDS + words
        into = tl.load(into_pages + page).to(tl.int64) * WORDS + words
        own_source = source + tl.load(source_shifts + layer) * 4
        own_target = target + tl.load(target_shifts + layer) * 4
        moved = tl.load(own_source + from_, mask=words < WORDS, other=0)
        tl.store(own_target + into, moved, mask=words < WORDS)


def plan_swap(
    hot: HotTables,
    scratch: SwapScratch,
    selected: torch.Tensor,  # [seqs, kv_heads, k] int32 place in the sequence, -1 for none
    page_table: torch.Tensor,  # [seqs, pages] int32
    generations: torch.Tensor,  # [seqs, pages] int32, same stride as page_table
    frame_of: torch.Tensor,  # [num_pages] int32
    first_hot: int,
) -> None:
    """Fill `scratch.located` and the list of misses; update the hot cache as if they were copied.

    There must be at least as many slots as one kv head selects distinct pages.
    """
    seqs, kv_heads, topk = selected.shape
    slots = hot.pages.shape[1]
    block_slots = power_of_two(slots)
    block = next((size for size in _ENTRIES if seqs * topk <= size), _ENTRIES[-1])
    _swap_plan_kernel[(kv_heads,)](
        selected,
        page_table,
        generations,
        frame_of,
        hot.pages,
        hot.generations,
        hot.used,
        hot.clock,
        hot.slot_of,
        hot.arrived,
        scratch.located,
        scratch.claims,
        scratch.misses.entries,
        scratch.misses.counts,
        scratch.totals,
        seqs * topk,
        scratch.misses.entries.shape[2],
        hot.slot_of.shape[1],
        page_table.stride(0),
        first_hot,
        KV_HEADS=kv_heads,
        TOPK=topk,
        SLOTS=slots,
        BLOCK_SLOTS=block_slots,
        BLOCK=block,
        ONE=seqs * topk <= block,
        WAYS=plan_ways(block_slots),
        AGES=HOT_AGES,
        num_warps=plan_warps(block_slots),
        **pdl_options(selected),
    )


def seq_rungs(topk: int) -> tuple[int, ...]:
    """Sequence counts at which `plan_swap` switches to another compiled form."""
    return (1, *(size // topk + 1 for size in _ENTRIES))


def plan_ways(block_slots: int) -> int:
    """Number of ages tried at once, chosen so that a thread makes few comparisons."""
    return max(2, min(16, 16384 // block_slots))


def plan_warps(block_slots: int) -> int:
    """Number of warps, chosen so that a thread holds few slots."""
    return max(8, min(32, block_slots // 1024))


def copy_missed(
    misses: Misses,
    host: torch.Tensor,  # [pages, 2 * kv_heads, page_size, dim], readable by the device
    pool: torch.Tensor,  # [pages, 2 * kv_heads, page_size, dim]
    first: int,  # page of `pool` that is destination 0
    *,
    arrived: torch.Tensor | None = None,  # [kv_heads, slots] int32, counts the pieces copied
    programs: int = _COPY_PROGRAMS,  # fewer leave room for concurrent kernels
    threads: int = COPY_THREADS,
) -> None:
    words = _words(pool)
    _swap_copy_kernel[(programs,)](
        host.view(torch.int32),
        pool.view(torch.int32),
        misses.entries,
        misses.counts,
        misses.counts if arrived is None else arrived,
        misses.entries.shape[2],
        first,
        0 if arrived is None else arrived.shape[1],
        KV_HEADS=pool.shape[1] // 2,
        WORDS=words,
        PIECE=_piece(words, threads),
        PROGRAMS=programs,
        TELL=arrived is not None,
        num_warps=threads // 32,
        **pdl_options(pool),
    )


def copy_pages(
    source: LayerMemory,
    target: LayerMemory,  # as many layers; source or target may be host memory
    from_pages: torch.Tensor,  # [n] on the device
    into_pages: torch.Tensor,  # [n] on the device
    *,
    programs: int = _COPY_PROGRAMS,  # fewer leave room for concurrent kernels
    threads: int = COPY_THREADS,
) -> None:
    words = source.first[0].numel()
    _swap_pages_kernel[(programs,)](
        source.first,
        target.first,
        source.shifts,
        target.shifts,
        from_pages,
        into_pages,
        len(from_pages),
        LAYERS=len(source.shifts),
        WORDS=words,
        PIECE=_piece(words, threads),
        PROGRAMS=programs,
        num_warps=threads // 32,
    )


def pieces_of(pool: torch.Tensor, threads: int = COPY_THREADS) -> int:
    """Number of pieces in which `copy_missed` copies one kv head's keys and values of a page."""
    words = _words(pool)
    return 2 * blocks_of(words, _piece(words, threads))


def _words(pool: torch.Tensor) -> int:
    """Number of 4-byte words in one kv head's keys, or values, of a page."""
    return pool.shape[2] * pool.shape[3] * pool.element_size() // 4


def _piece(words: int, threads: int) -> int:
    """Number of words that a program copies at once."""
    return min(_WORDS_PER_THREAD * threads, power_of_two(words))
