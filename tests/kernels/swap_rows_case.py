"""Steps of random selections of rows through swap-in kernels and through the planner in torch."""

from __future__ import annotations

import torch

from cairn.memory.copies import CopyEdits, Transfer
from cairn.memory.device_swap import SwapShape
from cairn.memory.groups import LayerGroup
from cairn.memory.hisparse import HiSparseCoordinator
from cairn.memory.kv_pool import HostPool, KVPool
from cairn.memory.layout import LATENT, CacheLayout
from tests.helpers import held_slices, stale_slices

SHAPES = [(1, 3, 5, 4), (4, 2, 9, 16), (5, 40, 300, 16), (3, 300, 1000, 64)]
"""Sequences, rows each selects, hot slots, page size."""
LAYERS = (0, 5, 6)  # 6 reads what 5 selects


def check(
    seqs: int,
    topk: int,
    slots: int,
    page_size: int,
    device: torch.device,
    dtype: torch.dtype,
    steps: int = 6,
    width: int = 6,
    repeat: float = 0.7,
) -> None:
    """Same places, same misses, same bytes and same tags as the oracle, step after step; pages
    change lives and come and go on the device meanwhile. Of a selection, `repeat` is that of the
    step before."""
    torch.manual_seed(seqs)
    pages_each = 2 * topk // page_size + 3
    frames = max(1, seqs * pages_each // 4)
    num_pages = seqs * pages_each + frames + 3
    layout = CacheLayout.of_latents(width).of_type(dtype)
    groups = [LayerGroup("full", ()), LayerGroup("resident", LAYERS, 8, 0, layout)]
    host = HostPool(groups[1], num_pages, page_size, device=device)
    for tensor in host.tensors():
        tensor.copy_(torch.randn(tensor.shape))
    tiers: list[HiSparseCoordinator] = []
    pools: list[KVPool] = []
    for where in (torch.device("cpu"), device):
        hot_pages = -(-slots // page_size)
        pool = KVPool(groups, [num_pages, frames], page_size, where, hot_pages=hot_pages)
        for tensor in pool.tensors():
            tensor.fill_(float("nan"))
        tier = HiSparseCoordinator(
            pool,
            host,
            num_frames=frames,
            hot_slots=slots,
            asynchronous=False,
            kernels=SwapShape(seqs + 2, topk, 1) if tiers else None,
            rows=True,
            selectors={6: 5},
        )
        pools.append(pool)
        tiers.append(tier)
    oracle, tested = tiers
    swap = tested.row_swap
    assert swap is not None and oracle.row_swap is None
    lives = torch.ones(num_pages + 1, dtype=torch.int32)
    length = pages_each * page_size
    positions = torch.rand(seqs, length).argsort(1)[:, :topk]
    # Sequences share some pages.
    table = torch.stack([1 + torch.randperm(num_pages)[:pages_each] for _ in range(seqs)]).int()
    for step in range(steps):
        drawn = torch.rand(seqs, length).argsort(1)[:, :topk]
        positions = torch.where(torch.rand(seqs, topk) < repeat, positions, drawn)
        asked = positions.masked_fill(torch.rand(seqs, topk) < 0.1, -1)
        order = torch.randperm(seqs)  # lists of sequences in any order
        lives[torch.randperm(num_pages)[:1] + 1] += 1
        moved = torch.unique(table)[step : step + frames]
        edits = tuple(Transfer(int(page), i + 1) for i, page in enumerate(moved))
        gone = tuple(Transfer(page, 0) for page in range(num_pages + 1))
        for tier in tiers:
            tier.begin_step(CopyEdits(gone))
            tier.begin_step(CopyEdits(edits, edits))
        own = asked[order]
        pages = table[order].long().gather(1, own.clamp(min=0) // page_size)
        rows = torch.where(own < 0, -1, pages * page_size + own % page_size)
        for layers in ((0,), (5, 6)):
            swapped = oracle.swap_in(layers[0], rows[:, None], lives[pages][:, None])
            for layer in layers[1:]:
                oracle.swap_in_again(layer, swapped)
            places = torch.full((seqs, topk), -7, dtype=torch.int32, device=device)
            on_device = table.to(device), lives[table.long()].to(device)
            lists = own.int().to(device), order.int().to(device)
            swap.locate(layers[0], *lists, *on_device, places)
            for layer in layers[1:]:
                swap.locate_again(layer)
            found = places.cpu().long()
            assert torch.equal(found < 0, own < 0)
            assert torch.equal(found.clamp(min=0), swapped.places[:, 0])
            for layer in layers:
                assert held_slices(tested._hot[layer]) == held_slices(oracle._hot[layer])
                here, there = (pool.part(layer, LATENT).flatten(0, 1) for pool in pools)
                assert torch.equal(
                    here[tested._first_hot :].cpu().nan_to_num(7),
                    there[oracle._first_hot :].cpu().nan_to_num(7),
                )
                in_use = found[own >= 0]
                assert torch.equal(here.cpu()[in_use], there.cpu()[in_use])
        for name in ("resident", "hits", "misses"):
            assert getattr(tested.stats, name) == getattr(oracle.stats, name), name
        assert stale_slices(tested, lives.tolist()) == []
        assert (swap._scratch.claims == swap._scratch.claims.max()).all()
    assert oracle.stats.misses > 0 and oracle.stats.hits > 0 and oracle.stats.resident > 0
    host.close()


def check_null_rows(device: torch.device) -> None:
    """Rows that pad a recorded step read the null page, and take no slot."""
    page_size, layout = 4, CacheLayout.of_latents(6).of_type(torch.float32)
    groups = [LayerGroup("full", ()), LayerGroup("resident", (0,), 8, 0, layout)]
    pool = KVPool(groups, [3, 1], page_size, device, hot_pages=1)
    host = HostPool(groups[1], 3, page_size, device=device)
    tier = HiSparseCoordinator(
        pool,
        host,
        num_frames=1,
        hot_slots=4,
        asynchronous=False,
        kernels=SwapShape(2, 2, 1),
        rows=True,
    )
    assert tier.row_swap is not None
    positions = torch.tensor([[1, 2], [0, -1]], dtype=torch.int32, device=device)
    table = torch.tensor([[2], [0]], dtype=torch.int32, device=device)
    places = torch.empty_like(positions)
    seqs = torch.arange(2, dtype=torch.int32, device=device)
    tier.row_swap.locate(0, positions, seqs, table, torch.ones_like(table), places)
    assert places.tolist() == [[8, 9], [0, -1]]
    assert [own[1:] for own in held_slices(tier._hot[0])] == [(0, 9, 1), (1, 10, 1)]
    assert (tier.stats.resident, tier.stats.hits, tier.stats.misses) == (0, 0, 2)
    host.close()
