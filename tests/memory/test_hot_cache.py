"""The hot cache against a cache that is a list, and against the bytes it should hold."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from cairn.errors import PageError
from cairn.memory import hot_cache
from cairn.memory.copies import CopyEdits, Transfer
from cairn.memory.device_swap import SwapBytes
from cairn.memory.groups import LayerGroup
from cairn.memory.hisparse import HiSparseCoordinator
from cairn.memory.hot_cache import HotCache
from cairn.memory.kv_pool import HostPool, KVPool
from cairn.memory.layout import LATENT, CacheLayout
from tests.helpers import held_slices, stale_slices

CPU = torch.device("cpu")


class ListCache:
    """One kv head's slots, least recently used first."""

    def __init__(self, slots: int) -> None:
        self.order: list[tuple[int, tuple[int, int] | None]] = [(i, None) for i in range(slots)]

    def read(self, wanted: list[tuple[int, int]]) -> tuple[dict[tuple[int, int], int], int]:
        """Where each (generation, page) is, and how many reads needed no copy."""
        asked = list(dict.fromkeys(wanted))
        hits = [entry for entry in self.order if entry[1] in asked]
        there = [entry[1] for entry in hits]
        missing = [tag for tag in asked if tag not in there]
        others = [entry for entry in self.order if entry not in hits]
        victims, rest = sorted(others[: len(missing)]), others[len(missing) :]
        loaded = [(slot, tag) for (slot, _), tag in zip(victims, missing, strict=True)]
        # Within one step slots keep their numbers' order, however they were used before.
        self.order = rest + sorted(loaded) + sorted(hits)
        places = {tag: slot for slot, tag in loaded + hits if tag is not None}
        return places, len(wanted) - len(missing)


@given(data=st.data())
def test_the_planner_is_a_list_ordered_by_last_use(data: st.DataObject) -> None:
    heads, slots = data.draw(st.integers(1, 3)), data.draw(st.integers(4, 9))
    cache = HotCache(heads, slots, CPU)
    models = [ListCache(slots) for _ in range(heads)]
    for _ in range(data.draw(st.integers(1, 12))):
        rows, k = data.draw(st.sampled_from([(1, 4), (2, 2), (4, 1)]))
        shape = (rows, heads, k)
        count = rows * heads * k
        numbers = st.lists(st.integers(-1, 12), min_size=count, max_size=count)
        dtype = data.draw(st.sampled_from([torch.int32, torch.int64]))
        pages = torch.tensor(data.draw(numbers), dtype=dtype).view(shape)
        lives = torch.tensor(data.draw(numbers), dtype=dtype).view(shape) % 2 + 1
        resident = torch.tensor(data.draw(numbers)).view(shape) > 9
        wanted = (pages >= 0) & ~resident
        assert cache.distinct(pages, lives, wanted) <= slots
        plan = cache.plan(pages, lives, wanted)
        hits = 0
        for head, model in enumerate(models):
            places, found = model.read(
                [
                    (int(lives[row, head, i]), int(pages[row, head, i]))
                    for row in range(rows)
                    for i in range(k)
                    if wanted[row, head, i]
                ]
            )
            hits += found
            for row in range(rows):
                for i in range(k):
                    tag = int(lives[row, head, i]), int(pages[row, head, i])
                    slot = places[tag] if wanted[row, head, i] else -1
                    assert int(plan.slots[row, head, i]) == slot
        assert plan.hits == hits
        held = [
            (head, slot, tag[1], tag[0])
            for head, model in enumerate(models)
            for slot, tag in sorted(model.order)
            if tag is not None
        ]
        assert held_slices(cache) == held


def test_what_was_just_loaded_outlives_what_nobody_asked_for() -> None:
    cache = HotCache(1, 3, CPU)

    def read(*pages: int) -> int:
        index = torch.tensor(pages).view(1, 1, -1)
        return cache.plan(index, torch.ones_like(index), index >= 0).hits

    assert read(1, 2) == 0
    assert read(1, 3) == 1  # 2 is the oldest now
    assert read(1, 4) == 1  # and makes room
    assert read(3) == 1
    assert read(2) == 0


@pytest.mark.parametrize("steps", [1, 3, 4, 200])
def test_slots_that_were_not_used_for_long_are_equally_old(
    steps: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(hot_cache, "HOT_AGES", 10)
    cache = HotCache(1, 3, CPU)

    def read(page: int) -> int:
        """The slot that the page is in."""
        index = torch.tensor(page).view(1, 1, 1)
        return int(cache.plan(index, torch.ones_like(index), index >= 0).slots)

    assert [read(page) for page in (1, 2, 1, 3)] == [0, 1, 0, 2]
    for _ in range(steps - 1):
        assert read(3) == 2
    assert read(4) == (1 if steps < 4 else 0)


def test_more_than_fits_is_refused_and_rows_are_cut_so_that_it_does_not_happen() -> None:
    cache = HotCache(1, 3, CPU)
    pages = torch.arange(4).view(1, 1, 4)
    with pytest.raises(PageError, match="4 slices of one kv head"):
        cache.plan(pages, torch.ones_like(pages), pages >= 0)


HEADS, SIZE, DIM = 2, 4, 3


def make(
    pages: int, frames: int, hot: int, *, rows: bool = False
) -> tuple[HiSparseCoordinator, HostPool, KVPool]:
    """Slots hold pages of keys and values, or latent rows. Layer 6 reads what layer 5 selects."""
    layout = CacheLayout.of_heads(HEADS, DIM, torch.float32)
    if rows:
        layout = CacheLayout.of_latents(DIM).of_type(torch.float32)
    groups = [LayerGroup("full", ()), LayerGroup("resident", (0, 5, 6), 8, 0, layout)]
    pool = KVPool(groups, [pages, frames], SIZE, CPU, hot_pages=-(-hot // SIZE) if rows else hot)
    host = HostPool(groups[1], pages, SIZE, device=CPU)
    for tensor in (*pool.tensors(), *host.tensors()):
        tensor.fill_(float("nan"))
    tier = HiSparseCoordinator(
        pool,
        host,
        num_frames=frames,
        hot_slots=hot,
        asynchronous=False,
        rows=rows,
        selectors={6: 5},
    )
    return tier, host, pool


@given(data=st.data(), by_row=st.booleans())
def test_what_is_read_is_what_the_host_has(data: st.DataObject, by_row: bool) -> None:
    tier, host, pool = make(pages=12, frames=3, hot=5 if by_row else 4, rows=by_row)
    (kept,) = host.layout.parts
    heads, per_page = kept.heads, SIZE if by_row else 1
    for layer in host.layers:
        tensor = host.part(layer, kept.name)
        tensor[1:] = torch.randn(tensor[1:].shape) + layer
    frames = {
        page: i + 1 for i, page in enumerate(data.draw(st.sets(st.integers(1, 12), max_size=3)))
    }
    moves = tuple(Transfer(page, frame) for page, frame in frames.items())
    tier.begin_step(CopyEdits(moves, moves))
    for _ in range(data.draw(st.integers(1, 5))):
        layers = data.draw(st.sampled_from([(0,), (5, 6)]))
        rows, k = data.draw(st.integers(1, 6)), data.draw(st.integers(1, 4))
        count = rows * heads * k
        number = st.integers(per_page - 1, 13 * per_page - 1)
        slices = torch.tensor(data.draw(st.lists(number, min_size=count, max_size=count)))
        slices = slices.view(rows, heads, k)
        slices[slices == per_page - 1] = -1
        lives = torch.ones_like(slices)
        covered = 0
        swaps = []
        for part in tier.parts(layers[0], slices, lives, most_rows=4):
            assert part.start == covered and part.stop - part.start <= 4
            covered = part.stop
            swaps.append((part, tier.swap_in(layers[0], slices[part], lives[part])))
            check_read(tier, host, pool, layers[0], slices[part], swaps[-1][1].places)
        assert covered == rows
        for layer in layers[1:]:  # the same plans, in the same order
            for part, swapped in swaps:
                tier.swap_in_again(layer, swapped)
                check_read(tier, host, pool, layer, slices[part], swapped.places)
        assert stale_slices(tier, [1] * 13) == []


def check_read(
    tier: HiSparseCoordinator,
    host: HostPool,
    pool: KVPool,
    layer: int,
    slices: torch.Tensor,
    found: torch.Tensor,
) -> None:
    (kept,) = host.layout.parts
    there, here = (
        kept.by_head(tensors.part(layer, kept.name), tier._per_page) for tensors in (host, pool)
    )
    for (row, head, i), at in np.ndenumerate(found.numpy()):
        number = int(slices[row, head, i])
        assert at == 0 if number < 0 else torch.equal(here[at, :, head], there[number, :, head])


def test_backups_go_out_and_counters_tell() -> None:
    tier, host, pool = make(pages=4, frames=2, hot=2)
    pool.part(0)[1], pool.part(5)[1], pool.part(6)[1] = 1.0, 5.0, 6.0
    tier.begin_step(CopyEdits((Transfer(3, 1),)))
    tier.back_up([Transfer(3, 1)])
    assert tier.poll() == [Transfer(3, 1)] and tier.wait() == []
    assert (host.part(0)[3] == 1).all() and (host.part(5)[3] == 5).all()
    size = 2 * HEADS * SIZE * DIM * 4
    assert tier.stats.bytes_out == 3 * size
    pages = torch.tensor([[[3], [-1]]])
    tier.swap_in(0, pages, torch.ones_like(pages))
    assert (tier.stats.resident, tier.stats.hits, tier.stats.misses) == (1, 0, 0)
    tier.begin_step(CopyEdits((Transfer(3, 0),)))
    for _ in range(2):
        tier.swap_in(0, pages, torch.ones_like(pages))
    assert (tier.stats.resident, tier.stats.hits, tier.stats.misses) == (1, 1, 1)
    assert tier.stats.bytes_in == size // HEADS
    tier.begin_step(CopyEdits((Transfer(3, 2),), (Transfer(3, 2),)))
    assert (pool.part(5)[2] == 5).all()
    assert tier.stats.bytes_in == size // HEADS + 3 * size


def test_a_slot_is_known_by_page_offset_and_generation() -> None:
    """Whoever asks; and each row counts, not its page."""
    tier, host, _ = make(pages=4, frames=2, hot=4, rows=True)
    for layer in host.layers:
        host.part(layer, LATENT).fill_(layer)

    def misses(layer: int, *asked: tuple[int, int, int]) -> int:
        before = tier.stats.misses
        rows = torch.tensor([[page * SIZE + offset for page, offset, _ in asked]])[:, None]
        lives = torch.tensor([[life for *_, life in asked]])[:, None]
        swapped = tier.swap_in(layer, rows, lives)
        if layer == 5:
            tier.swap_in_again(6, swapped)
        return tier.stats.misses - before

    assert misses(0, (1, 0, 7), (1, 3, 7)) == 2
    assert misses(0, (1, 3, 7), (1, 0, 7)) == 0  # another request on the same page
    assert misses(0, (1, 2, 7)) == 1  # another row of it
    assert misses(0, (1, 0, 8)) == 1  # the id is another page's now
    assert misses(5, (1, 0, 7)) == 2  # each layer that reads a row copies it
    assert tier.stats.bytes_in == 6 * DIM * 4
    tier.forget()
    assert misses(5, (1, 0, 7)) == 2


def test_copies_beside_the_engine_are_waited_for_and_failures_tried_again(
    caplog: pytest.LogCaptureFixture,
) -> None:
    from cairn.memory.movers import HostMover

    seen: list[Transfer] = []
    mover = HostMover(seen.extend, asynchronous=True)
    mover.back_up([Transfer(1, 2), Transfer(3, 4)])
    done = mover.wait()
    assert done == seen == [Transfer(1, 2), Transfer(3, 4)]
    assert mover.poll() == []
    mover.close()

    tries = []

    def fail_once(transfers: object) -> None:
        tries.append(transfers)
        if len(tries) == 1:
            raise OSError("not now")

    failing = HostMover(fail_once, asynchronous=True)
    failing.back_up([Transfer(1, 2)])
    assert failing.wait() == []  # told, and tried again
    assert "not now" in caplog.text
    assert failing.wait() == [Transfer(1, 2)] and len(tries) == 2
    failing.close()


def test_what_a_hot_slot_takes_besides_its_page() -> None:
    """As whoever sizes the tier is told."""
    swap_in = pytest.importorskip("cairn.kernels.swap_in")
    layers, heads, cpu = 3, 2, torch.device("cpu")

    def nbytes(slots: int) -> int:
        tables = swap_in.HotTables.empty(heads, slots, 10, cpu)
        held = [getattr(tables, field.name) for field in dataclasses.fields(tables)]
        held += vars(HotCache(heads, slots, cpu)).values()
        return sum(value.nbytes for value in held if isinstance(value, torch.Tensor))

    assert SwapBytes.of(layers, heads).per_slot == layers * (nbytes(11) - nbytes(10))


def test_what_tables_of_hot_rows_take() -> None:
    swap_rows = pytest.importorskip("cairn.kernels.swap_rows")
    selectors = 3

    def nbytes(slots: int, pages: int) -> int:
        held = [torch.zeros(pages, dtype=torch.int32)]  # frames
        for _ in range(selectors):
            hot = HotCache(1, slots, CPU)
            tables = swap_rows.HotRowTables.over(hot.tags[0], hot.used[0], pages * SIZE)
            held += [getattr(tables, field.name) for field in dataclasses.fields(tables)]
        held.append(swap_rows.RowScratch.empty(8, pages * SIZE, CPU).claims)
        return sum(value.nbytes for value in held)

    told = SwapBytes.of_rows(selectors, SIZE)
    assert told.per_slot == nbytes(11, 5) - nbytes(10, 5)
    assert told.per_page == nbytes(10, 6) - nbytes(10, 5)
