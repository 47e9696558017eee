"""Layers that keep something else than keys and values of heads: a latent row, and index keys that
never leave the device. Everything that holds or moves pages follows from the layout."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from cairn.errors import ConfigError
from cairn.memory.cache import PagedCache, SequencePages
from cairn.memory.copies import CopyEdits, PageCopies, PageState, Transfer
from cairn.memory.geometry import PageGeometry
from cairn.memory.groups import LayerGroup, group_layers, split_budget
from cairn.memory.hisparse import HiSparseCoordinator
from cairn.memory.kv_pool import HostPool, KVPool
from cairn.memory.layout import CacheLayout, CachePart
from cairn.memory.radix import PrefixMatch
from cairn.models.spec import AttentionSpec, ModelSpec
from tests.helpers import stale_slices

CPU = torch.device("cpu")
PAGE = 4
LATENT = CachePart("latent", (6,))
INDEX = CachePart("index_key", (2, 3), torch.float16, may_leave=False)
SUMMARY = CachePart("summary", (5,), torch.float64, per="page", may_leave=False)
TOY = CacheLayout((LATENT, INDEX, SUMMARY)).of_type(torch.float32)
HEADS = CacheLayout.of_heads(2, 8, torch.bfloat16)


def test_a_part_says_what_a_page_looks_like() -> None:
    assert [part.page_shape(PAGE) for part in TOY.parts] == [(PAGE, 6), (2, PAGE, 3), (5,)]
    assert [part.page_bytes(PAGE) for part in TOY.parts] == [96, 48, 40]
    assert [part.dtype for part in TOY.parts] == [torch.float32, torch.float16, torch.float64]
    assert TOY.leaving.page_bytes(PAGE) == 96 and TOY.staying.page_bytes(PAGE) == 88
    assert HEADS.part("kv").page_shape(PAGE) == (4, PAGE, 8) and HEADS.heads == 2
    with pytest.raises(AssertionError, match="latent has no type yet"):
        LATENT.page_bytes(PAGE)
    with pytest.raises(KeyError, match="'kv'"):
        TOY.part("kv")


def test_layers_that_keep_other_things_have_other_pages() -> None:
    heads = AttentionSpec(4, 2, 8, 1.0)
    latent = AttentionSpec(4, 1, 8, 1.0, cache=CacheLayout((LATENT, INDEX, SUMMARY)))
    spec = ModelSpec("Toy", 10, (heads, latent, replace(heads, window=8), latent), 64)
    groups = spec.groups(torch.float32)
    assert [(group.name, group.layers) for group in groups] == [
        ("full", (0,)),
        ("full-2", (1, 3)),
        ("window-8", (2,)),
    ]
    assert groups[1].layout == TOY
    assert groups[0].layout == CacheLayout.of_heads(2, 8, torch.float32)
    assert [group.page_bytes(PAGE) for group in groups] == [512, 2 * 184, 512]


parts = st.builds(
    CachePart,
    st.sampled_from("abcdef"),
    st.lists(st.integers(1, 4), min_size=1, max_size=3).map(tuple),
    st.sampled_from([torch.float32, torch.float16, torch.uint8]),
    st.sampled_from(["row", "page"]),
    st.booleans(),
)
layouts = st.lists(parts, min_size=1, max_size=3, unique_by=lambda part: part.name).map(
    lambda own: CacheLayout(tuple(own))
)


@settings(max_examples=50, deadline=None)
@given(
    st.lists(layouts, min_size=1, max_size=4),
    st.lists(st.sampled_from([None, None, 8]), min_size=4, max_size=4),
    st.integers(2000, 20000),
)
def test_pools_take_what_page_bytes_promise(
    own: list[CacheLayout], windows: list[int | None], budget: int
) -> None:
    groups = group_layers(windows[: len(own)], own)
    page_bytes = [group.page_bytes(PAGE) for group in groups]
    try:
        pages = split_budget(budget, groups, page_bytes, [3] * len(groups))
    except ConfigError:
        assert sum(page_bytes) > budget
        return
    pool = KVPool(groups, pages, PAGE, CPU)
    null_pages = sum(page_bytes)
    nbytes = sum(tensor.nbytes for tensor in pool.tensors())
    assert nbytes == null_pages + sum(map(int.__mul__, pages, page_bytes))
    assert nbytes - null_pages <= budget
    for g, group in enumerate(groups):
        for layer in group.layers:
            for part in group.layout.parts:
                tensor = pool.part(layer, part.name)
                assert tensor.dtype == part.dtype and len(tensor) == pages[g] + 1


@settings(max_examples=30, deadline=None)
@given(layouts)
def test_copies_on_the_device_take_what_their_sizes_promise(layout: CacheLayout) -> None:
    """What may leave has frames and hot slots; what stays is kept for every page of the host."""
    frames = LayerGroup("resident", (0, 1), 8, 0, layout)
    pool = KVPool([LayerGroup("full", ()), frames], [20, 5], PAGE, CPU, hot_pages=3)
    host = HostPool(frames, 20, PAGE, device=CPU)
    on_device = (5 + 1 + 3) * frames.page_bytes(PAGE) + 21 * frames.staying_bytes(PAGE)
    assert sum(tensor.nbytes for tensor in pool.tensors()) == on_device
    on_host = sum(tensor.nbytes for tensor in host.tensors())
    assert on_host == 21 * frames.page_bytes(PAGE) == 21 * host.page_bytes


def rows_of(pages: SequencePages, g: int, begin: int, end: int) -> tuple[torch.Tensor, ...]:
    places = torch.arange(begin, end)
    return torch.tensor(pages.tables[g])[places // PAGE], places % PAGE


def compute(cache: PagedCache, pool: KVPool, tokens: list[int]) -> tuple[SequencePages, int]:
    """A request that writes, for each new token, rows that hold it; says how many were cached."""
    pages = cache.open(cache.match(PrefixMatch(None), tokens), len(tokens))
    cached = cache.geometry.tokens(len(pages.tables[0]))
    cache.grow(pages, len(tokens))
    for g, group in enumerate(cache.groups):
        ids, offsets = rows_of(pages, g, cached, len(tokens))
        new = torch.tensor(tokens[cached:], dtype=torch.float32)
        for layer in group.layers:
            for part in group.layout.parts:
                if part.per == "row":
                    shape = (len(new), *part.shape)
                    rows = (new + layer).view(-1, *[1] * len(part.shape)).expand(shape)
                    pool.write(layer, ids, offsets, rows.to(part.dtype), part.name)
    cache.commit(pages, tokens, len(tokens))
    cache.check()
    return pages, cached


def test_prefixes_are_shared_whatever_a_layer_keeps() -> None:
    """Three groups of two layouts over one radix tree; rows of a shared prefix are found in all."""
    spec = ModelSpec(
        "Toy",
        100,
        (
            AttentionSpec(4, 1, 8, 1.0, cache=TOY),
            AttentionSpec(4, 2, 8, 1.0),
            AttentionSpec(4, 1, 8, 1.0, window=6, cache=TOY),
        ),
        64,
    )
    groups = spec.groups(torch.float32)
    pages = [12] * len(groups)
    pool = KVPool(groups, pages, PAGE, CPU)
    for tensor in pool.tensors():
        tensor.fill_(float("nan"))
    cache = PagedCache(PageGeometry(PAGE, PAGE), groups, pages)
    first, none = compute(cache, pool, list(range(10)))
    second, cached = compute(cache, pool, [*range(8), 70, 71, 72])
    assert (none, cached) == (0, 8)
    for held, tokens in ((first, range(10)), (second, [*range(8), 70, 71, 72])):
        for g, group in enumerate(groups):
            reached = 0 if group.window is None else 5  # what the window of the last row reaches
            ids, offsets = rows_of(held, g, reached, len(tokens))
            for layer in group.layers:
                for part in group.layout.parts:
                    if part.per == "page":
                        continue
                    read = pool.part(layer, part.name).movedim(-2, 1)[ids, offsets]
                    expected = torch.tensor(list(tokens)[reached:]) + layer
                    assert (read.flatten(1) == expected[:, None]).all(), (layer, part.name)
    cache.close(first)
    cache.close(second)
    cache.check()


def test_clearing_a_page_clears_all_its_parts_and_no_other_page() -> None:
    groups = [LayerGroup("full", (0,)), LayerGroup("resident", (1,), 8, 0, TOY)]
    pool = KVPool(groups, [6, 2], PAGE, CPU, hot_pages=1)
    for tensor in pool.tensors():
        tensor.fill_(1)
    pool.clear(1, torch.tensor([2]))  # a frame
    pool.clear(0, torch.tensor([5]))  # a page id
    for name, home in (("latent", 2), ("index_key", 5), ("summary", 5)):
        zero = [page for page, held in enumerate(pool.part(1, name)) if not held.any()]
        assert zero == [home], name


@settings(max_examples=20, deadline=None)
@given(st.integers(0, 2**32 - 1), st.sampled_from([TOY, HEADS]))
def test_pages_go_to_the_host_and_come_back(seed: int, layout: CacheLayout) -> None:
    """Backed up, fetched whole and read page by page through the hot cache: always the same bytes;
    the parts that stay are not touched."""
    numbers = np.random.default_rng(seed)
    num_pages, num_frames, hot = 8, 3, 4
    groups = (LayerGroup("full", ()), LayerGroup("resident", (0, 1), 8, 0, layout))
    pool = KVPool(groups, [num_pages, num_frames], PAGE, CPU, hot_pages=hot)
    host = HostPool(groups[1], num_pages, PAGE, device=CPU)
    for tensor in (*pool.tensors(), *host.tensors()):
        tensor.fill_(float("nan"))
    stays = {
        (layer, part.name): pool.part(layer, part.name).normal_().clone()
        for layer in (0, 1)
        for part in layout.staying.parts
    }
    tier = HiSparseCoordinator(pool, host, num_frames=num_frames, hot_slots=hot, asynchronous=False)
    copies = PageCopies(num_pages, num_frames, tier)
    truth: dict[tuple[int, int, str], torch.Tensor] = {}
    for page in range(1, num_pages + 1):  # each written in frame 1, backed up, and given up
        copies.fill(page, 1)
        tier.begin_step(copies.take_edits())
        for layer in (0, 1):
            for part in layout.leaving.parts:
                truth[layer, page, part.name] = pool.part(layer, part.name)[1].normal_().clone()
        copies.complete(page, 1)
        copies.start()
        assert copies.poll() == [Transfer(page, 1)]
        copies.frame_freed(1)
        assert copies.state(page, 1) is PageState.HOST_ONLY
    tier.begin_step(copies.take_edits())
    kept = int(numbers.integers(1, num_pages + 1))
    tier.begin_step(CopyEdits((Transfer(kept, 2),), (Transfer(kept, 2),)))
    heads = layout.heads
    for _ in range(4):
        drawn = [numbers.permutation(num_pages)[:2] + 1 for _ in range(2 * heads)]
        pages = torch.from_numpy(np.array(drawn)).view(2, heads, 2)
        for layer in (0, 1):
            found = tier.swap_in(layer, pages, torch.ones_like(pages)).places
            assert (found[pages == kept] == 2).all()
            for (row, head, k), at in np.ndenumerate(found.numpy()):
                page = int(pages[row, head, k])
                for part in layout.leaving.parts:
                    own = part.by_head(truth[layer, page, part.name][None])[0, :, head]
                    here = part.by_head(pool.part(layer, part.name))[at, :, head]
                    assert torch.equal(own, here)
    assert not stale_slices(tier, [1] * (num_pages + 1))
    stats, slice_bytes = tier.stats, layout.leaving.page_bytes(PAGE) // heads
    assert stats.bytes_out == num_pages * host.page_bytes
    assert stats.bytes_in == host.page_bytes + stats.misses * slice_bytes
    for (layer, name), tensor in stays.items():
        assert torch.equal(pool.part(layer, name), tensor)
