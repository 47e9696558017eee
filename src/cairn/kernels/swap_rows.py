"""Swaps in selected rows: finds them on the device, and copies all missing ones at once.

The plan matches `memory.hot_cache.HotCache` slot for slot. A table by row number says which slot
may hold a row. The answer counts only if the slot's tag matches, so nothing is purged when pages
are freed. Thousands of rows are selected by each sequence, so many programs share every pass:

    find    tells each entry where its row is, if it is there. Of the entries that miss the same
            row, the first claims it
    list    some programs list claimed rows, in the order of entries; others count slots by age
    give    gives the least recently used slots to the listed rows
    copy    copies these rows, and tells the remaining entries where their row is

All passes read their sizes from device memory, so graphs can record them. If nothing is missing,
all but the first end at once. A layer that shares a selection only copies its own rows.

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
from cairn.kernels.pdl import pdl_options
from cairn.kernels.sizes import blocks_of, power_of_two

_UNCLAIMED = tl.constexpr(0x7FFFFFFF)
_NUMBER = tl.constexpr(0xFFFFFFFF)  # bits of a tag that hold the row number
_NONE = tl.constexpr(-1)  # an entry without a row; smaller places stand for rows that are missing
_ENTRIES = 256  # entries at once
_LISTED = 512  # entries at once of a program that lists rows
_SLOTS = 1024  # slots at once
_PROGRAMS = 64  # programs that list rows, and as many that look through slots
_COPY_PROGRAMS = 264
_COPY_WORDS = 2048  # words that a program of 128 threads has in flight


@dataclass(frozen=True, slots=True)
class HotRowTables:
    """The hot cache of layers that share a selection."""

    tags: torch.Tensor  # [slots] int64, generation << 32 | row number, -1 for none
    used: torch.Tensor  # [slots] int64, time of the last use
    clock: torch.Tensor  # [1] int64
    slot_of: torch.Tensor  # [rows] int32, slot that last held the row
    totals: torch.Tensor  # [3] int64, never reset: reads in frames, in hot slots, and misses

    @classmethod
    def over(cls, tags: torch.Tensor, used: torch.Tensor, num_rows: int) -> HotRowTables:
        """With these tags and times."""
        device = tags.device
        clock, totals = (torch.zeros(n, dtype=torch.int64, device=device) for n in (1, 3))
        slot_of = torch.zeros(num_rows, dtype=torch.int32, device=device)
        return cls(tags, used, clock, slot_of, totals)


@dataclass(frozen=True, slots=True)
class RowScratch:
    """Memory that passes data between kernels; all layers share it."""

    claims: torch.Tensor  # [rows] int32, the entry that claims a missing row
    missing: torch.Tensor  # [1] int32, entries whose row is missing
    listed: torch.Tensor  # [room] int64, tags of claimed rows; each program has its own part
    counts: torch.Tensor  # [programs] int32, rows that each program listed
    ends: torch.Tensor  # [programs, programs] int32, their sums, for each program that gives slots
    ages: torch.Tensor  # [programs, ages] int32, slots by age
    tasks: torch.Tensor  # [2, room] int32, row and slot of each copy
    num_tasks: torch.Tensor  # [1] int32

    @classmethod
    def empty(cls, entries: int, num_rows: int, device: torch.device) -> RowScratch:
        def ints(*size: int) -> torch.Tensor:
            return torch.zeros(size, dtype=torch.int32, device=device)

        room = _PROGRAMS * _share(entries)
        return cls(
            claims=ints(num_rows).fill_(_UNCLAIMED.value),
            missing=ints(1),
            listed=torch.zeros(room, dtype=torch.int64, device=device),
            counts=ints(_PROGRAMS),
            ends=ints(_PROGRAMS, _PROGRAMS),
            ages=ints(_PROGRAMS, HOT_AGES),
            tasks=ints(2, entries),
            num_tasks=ints(1),
        )

    def forget(self) -> None:
        """Withdraw all claims, because a plan was not carried out completely."""
        self.claims.fill_(_UNCLAIMED.value)
        self.missing.zero_()


@direct
@triton.jit(do_not_specialize=["total", "table_stride"])
def _swap_find_kernel(
    positions,  # [n, K] position in the sequence, -1 for none
    seqs,  # [n]
    page_table,  # [seqs, ...] page ids
    generations,  # [seqs, ...]
    frame_of,  # [pages] frame of a resident page, 0 for none
    tags,
    used,
    clock,
    slot_of,
    claims,
    missing,
    totals,
    places,  # [n, K] row of the pool; -2 - row number where it is missing
    total: tl.int32,  # entries, n * K
    table_stride: tl.int32,
    first_hot,  # the row of the pool that is slot 0
    K: tl.constexpr,
    PAGE_SIZE: tl.constexpr,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    entry = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    position = tl.load(positions + entry, mask=entry < total, other=-1)
    there = position >= 0
    seq = tl.load(seqs + entry // K, mask=there, other=0).to(tl.int64)
    at = seq * table_stride + position // PAGE_SIZE
    page = tl.load(page_table + at, mask=there, other=0)
    life = tl.load(generations + at, mask=there, other=0).to(tl.int64)
    frame = tl.load(frame_of + page, mask=there, other=0)
    wanted = (page > 0) & (frame == 0)
    row = page * PAGE_SIZE + position % PAGE_SIZE
    slot = tl.load(slot_of + row, mask=wanted, other=0)
    tag = (life << 32) | row.to(tl.int64)
    hit = wanted & (tl.load(tags + slot, mask=wanted, other=-1) == tag)
    now = tl.load(clock) + 2
    tl.store(used + slot, tl.zeros((BLOCK,), tl.int64) + now + 1, mask=hit)
    missed = wanted & ~hit
    tl.atomic_min(claims + row, entry, mask=missed)
    place = tl.where(wanted, first_hot + slot, frame * PAGE_SIZE + position % PAGE_SIZE)
    place = tl.where(missed, -2 - row, place)
    tl.store(places + entry, tl.where(there, place, _NONE), mask=entry < total)
    # Pack three counts into one sum, because every sum synchronizes all warps.
    kinds = (frame > 0).to(tl.int64) + (wanted.to(tl.int64) << 20) + (missed.to(tl.int64) << 40)
    kinds = tl.sum(kinds, 0)
    tl.atomic_add(totals, kinds & 0xFFFFF)
    tl.atomic_add(totals + 1, kinds >> 20 & 0xFFFFF)
    if kinds >> 40 > 0:
        tl.atomic_add(missing, (kinds >> 40).to(tl.int32))


@triton.jit
def _age(used, slot, there, now, AGES: tl.constexpr):
    """-> the age of slots, from 0 for those that entries found to AGES - 1 for the oldest"""
    last = tl.load(used + slot, mask=there, other=0)
    age = tl.minimum(now + 1 - last, AGES - 1).to(tl.int32)
    return tl.where(there, age, 0)


@direct
@triton.jit(do_not_specialize=["total", "table_stride", "share"])
def _swap_list_kernel(
    positions,
    seqs,
    generations,
    places,
    used,
    clock,
    claims,
    missing,
    listed,
    counts,
    ages,
    total: tl.int32,
    table_stride: tl.int32,
    share: tl.int32,  # entries of a program
    slots,
    K: tl.constexpr,
    PAGE_SIZE: tl.constexpr,
    PROGRAMS: tl.constexpr,
    BLOCK: tl.constexpr,
    BLOCK_SLOTS: tl.constexpr,
    AGES: tl.constexpr,
    PDL: tl.constexpr,
):
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    program = tl.program_id(0)
    some = tl.load(missing) > 0
    if program < PROGRAMS:
        found = 0
        if some:
            for start in range(program * share, tl.minimum((program + 1) * share, total), BLOCK):
                entry = start + tl.arange(0, BLOCK)
                place = tl.load(places + entry, mask=entry < total, other=_NONE)
                row = -2 - place
                missed = place < _NONE
                first = missed & (tl.load(claims + row, mask=missed, other=-1) == entry)
                position = tl.load(positions + entry, mask=first, other=0)
                seq = tl.load(seqs + entry // K, mask=first, other=0).to(tl.int64)
                at = seq * table_stride + position // PAGE_SIZE
                life = tl.load(generations + at, mask=first, other=0).to(tl.int64)
                own = program * share + found + tl.cumsum(first.to(tl.int32), 0) - 1
                tl.store(listed + own, (life << 32) | row.to(tl.int64), mask=first)
                found += tl.sum(first.to(tl.int32), 0)
        tl.store(counts + program, found)
    elif some:
        program -= PROGRAMS
        now = tl.load(clock) + 2
        own = (slots + PROGRAMS - 1) // PROGRAMS
        counted = tl.zeros((AGES,), tl.int32)
        for start in range(program * own, tl.minimum((program + 1) * own, slots), BLOCK_SLOTS):
            slot = start + tl.arange(0, BLOCK_SLOTS)
            there = slot < tl.minimum((program + 1) * own, slots)
            counted += tl.histogram(_age(used, slot, there, now, AGES), AGES)
        tl.store(ages + program * AGES + tl.arange(0, AGES), counted)


@direct
@triton.jit(do_not_specialize=["share"])
def _swap_give_kernel(
    tags,
    used,
    clock,
    slot_of,
    totals,
    claims,
    missing,
    listed,
    counts,
    ends,
    ages,
    tasks,
    num_tasks,
    share: tl.int32,
    slots,
    room,  # of tasks
    PROGRAMS: tl.constexpr,
    BLOCK_SLOTS: tl.constexpr,
    AGES: tl.constexpr,
    PDL: tl.constexpr,
):
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    program = tl.program_id(0)
    each = tl.arange(0, PROGRAMS)
    count = tl.load(counts + each)
    end = tl.cumsum(count, 0)
    misses = tl.sum(count, 0)
    if program == 0:
        tl.store(num_tasks, misses)
        tl.store(missing, 0)
        tl.atomic_add(totals + 1, -misses.to(tl.int64))
        tl.atomic_add(totals + 2, misses.to(tl.int64))
    if misses > 0:
        ends += program * PROGRAMS
        tl.store(ends + each, end)
        tl.debug_barrier()  # all of them are stored before they are searched
        age = tl.arange(0, AGES)
        counted = tl.load(ages + each[:, None] * AGES + age[None, :])
        by_age = tl.sum(counted, 0)
        as_old = tl.sum(by_age, 0) - tl.cumsum(by_age, 0) + by_age  # slots of at least this age
        oldest = tl.max(tl.where(as_old >= misses, age, 0), 0)
        # All older slots are given away, and so many of this age, the first ones.
        spare = misses - tl.sum(tl.where(age > oldest, by_age, 0), 0)
        before = tl.where((each < program)[:, None], counted, 0)
        older_before = tl.sum(tl.sum(tl.where((age > oldest)[None, :], before, 0), 1), 0)
        same_before = tl.sum(tl.sum(tl.where((age == oldest)[None, :], before, 0), 1), 0)
        given = older_before + tl.minimum(same_before, spare)
        spare = tl.maximum(spare - same_before, 0)
        now = tl.load(clock) + 2
        own = (slots + PROGRAMS - 1) // PROGRAMS
        for start in range(program * own, tl.minimum((program + 1) * own, slots), BLOCK_SLOTS):
            slot = start + tl.arange(0, BLOCK_SLOTS)
            there = slot < tl.minimum((program + 1) * own, slots)
            mine = _age(used, slot, there, now, AGES)
            same = (mine == oldest).to(tl.int32)
            victim = (mine > oldest) | ((same > 0) & (tl.cumsum(same, 0) <= spare))
            spare = tl.maximum(spare - tl.sum(same, 0), 0)
            # Slots in ascending order get rows in the order of entries.
            order = given + tl.cumsum(victim.to(tl.int32), 0) - 1
            given += tl.sum(victim.to(tl.int32), 0)
            lister = tl.zeros((BLOCK_SLOTS,), tl.int32)  # programs that listed earlier rows only
            step = PROGRAMS // 2
            while step > 0:
                before_it = tl.load(ends + lister + step - 1, mask=victim, other=0)
                lister += tl.where(before_it <= order, step, 0)
                step //= 2
            skipped = tl.load(ends + lister - 1, mask=victim & (lister > 0), other=0)
            tag = tl.load(listed + lister * share + order - skipped, mask=victim, other=0)
            row = (tag & _NUMBER).to(tl.int32)
            tl.store(tags + slot, tag, mask=victim)
            tl.store(used + slot, tl.zeros((BLOCK_SLOTS,), tl.int64) + now, mask=victim)
            tl.store(slot_of + row, slot, mask=victim)
            unclaimed = tl.full((BLOCK_SLOTS,), _UNCLAIMED, tl.int32)
            tl.store(claims + row, unclaimed, mask=victim)
            tl.store(tasks + order, row, mask=victim)
            tl.store(tasks + room + order, slot, mask=victim)


@direct
@triton.jit(do_not_specialize=["total"])
def _swap_rows_kernel(
    host,  # [rows, WORDS], host memory that the device can read
    pool,  # [rows, WORDS]
    tasks,
    num_tasks,
    places,  # [n, K], completed if TELL
    slot_of,
    clock,
    total: tl.int32,
    room,
    first_hot,
    WORDS: tl.constexpr,
    BLOCK_WORDS: tl.constexpr,
    ROWS: tl.constexpr,  # rows at once
    PROGRAMS: tl.constexpr,  # that copy
    BLOCK: tl.constexpr,
    TELL: tl.constexpr,
    PDL: tl.constexpr,
):
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    program = tl.program_id(0)
    count = tl.load(num_tasks)
    if program < PROGRAMS:
        word = tl.arange(0, BLOCK_WORDS)
        for first in range(program * ROWS, count, PROGRAMS * ROWS):
            task = first + tl.arange(0, ROWS)
            there = (task < count)[:, None] & (word < WORDS)[None, :]
            row = tl.load(tasks + task, mask=task < count, other=0).to(tl.int64)
            slot = tl.load(tasks + room + task, mask=task < count, other=0).to(tl.int64)
            moved = tl.load(host + row[:, None] * WORDS + word[None, :], mask=there, other=0)
            into = (first_hot + slot)[:, None] * WORDS + word[None, :]
            tl.store(pool + into, moved, mask=there)
        if TELL and program == 0:
            tl.store(clock, tl.load(clock) + 2)
    elif count > 0:
        entry = (program - PROGRAMS) * BLOCK + tl.arange(0, BLOCK)
        place = tl.load(places + entry, mask=entry < total, other=_NONE)
        missed = place < _NONE
        slot = tl.load(slot_of + (-2 - place), mask=missed, other=0)
        tl.store(places + entry, first_hot + slot, mask=missed)


def find_rows(
    hot: HotRowTables,
    scratch: RowScratch,
    positions: torch.Tensor,  # [n, k] int32 position in the sequence, -1 for none
    seqs: torch.Tensor,  # [n] int32, the sequence of each list
    page_table: torch.Tensor,  # [seqs, pages] int32
    generations: torch.Tensor,  # [seqs, pages] int32, same stride as page_table
    frame_of: torch.Tensor,  # [pages] int32
    places: torch.Tensor,  # [n, k] int32
    *,
    page_size: int,
    first_hot: int,  # the row of the pool that is slot 0
) -> None:
    """Write where each row is in the pool to `places`, and the missing rows to the list of copies.
    `copy_rows` completes both. The hot cache is updated as if they were copied.

    There must be at least as many slots as distinct rows. Rows of the null page are read there.
    """
    k, total, slots = positions.shape[1], positions.numel(), len(hot.tags)
    assert page_table.stride(0) == generations.stride(0)
    stride, share = page_table.stride(0), _share(total)
    options = pdl_options(positions)
    _swap_find_kernel[(blocks_of(total, _ENTRIES),)](
        positions, seqs, page_table, generations, frame_of, hot.tags, hot.used, hot.clock,
        hot.slot_of, scratch.claims, scratch.missing, hot.totals, places, total, stride, first_hot,
        K=k, PAGE_SIZE=page_size, BLOCK=_ENTRIES, num_warps=4, **options,
    )  # fmt: skip
    _swap_list_kernel[(2 * _PROGRAMS,)](
        positions, seqs, generations, places, hot.used, hot.clock, scratch.claims,
        scratch.missing, scratch.listed, scratch.counts, scratch.ages, total, stride, share, slots,
        K=k, PAGE_SIZE=page_size, PROGRAMS=_PROGRAMS, BLOCK=_LISTED, BLOCK_SLOTS=_SLOTS,
        AGES=HOT_AGES, num_warps=4, **options,
    )  # fmt: skip
    _swap_give_kernel[(_PROGRAMS,)](
        hot.tags, hot.used, hot.clock, hot.slot_of, hot.totals, scratch.claims, scratch.missing,
        scratch.listed, scratch.counts, scratch.ends, scratch.ages, scratch.tasks,
        scratch.num_tasks, share, slots, scratch.tasks.shape[1],
        PROGRAMS=_PROGRAMS, BLOCK_SLOTS=_SLOTS, AGES=HOT_AGES, num_warps=8, **options,
    )  # fmt: skip


def copy_rows(
    hot: HotRowTables,
    scratch: RowScratch,
    host: torch.Tensor,  # [pages, page_size, width], readable by the device
    pool: torch.Tensor,  # [pages, page_size, width]
    places: torch.Tensor | None,  # what `find_rows` wrote; None in a layer that shares the plan
    *,
    first_hot: int,
    threads: int = COPY_THREADS,
) -> None:
    """Copy the missing rows of a layer into their slots."""
    tell = places is not None
    total = 0 if places is None else places.numel()
    row_bytes = pool.shape[2] * pool.element_size()
    word = torch.int32 if row_bytes % 4 == 0 else torch.int16
    words = row_bytes // word.itemsize
    block_words = power_of_two(words)
    _swap_rows_kernel[(_COPY_PROGRAMS + blocks_of(total, _ENTRIES),)](
        host.view(word), pool.view(word), scratch.tasks, scratch.num_tasks,
        scratch.num_tasks if places is None else places, hot.slot_of, hot.clock, total,
        scratch.tasks.shape[1], first_hot,
        WORDS=words, BLOCK_WORDS=block_words,
        ROWS=max(1, _COPY_WORDS * threads // COPY_THREADS // block_words),
        PROGRAMS=_COPY_PROGRAMS, BLOCK=_ENTRIES, TELL=tell, num_warps=threads // 32,
        **pdl_options(pool),
    )  # fmt: skip


def _share(entries: int) -> int:
    """Entries of a program that lists rows: whole blocks."""
    return blocks_of(blocks_of(entries, _PROGRAMS), _LISTED) * _LISTED
