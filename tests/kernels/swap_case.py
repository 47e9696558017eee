"""Steps of random selections through the swap-in kernels and through the planner in torch."""

from __future__ import annotations

import torch

from cairn.kernels import swap_in
from cairn.kernels.interface import COPY_THREADS
from cairn.kernels.layer_memory import LayerMemory
from cairn.kernels.references import stage_reference
from cairn.kernels.swap_in import (
    HotTables,
    SwapScratch,
    copy_missed,
    copy_pages,
    pieces_of,
    plan_swap,
)
from cairn.memory.copies import CopyEdits, Transfer
from cairn.memory.device_swap import DeviceSwap, SwapShape
from cairn.memory.groups import LayerGroup
from cairn.memory.hisparse import HiSparseCoordinator
from cairn.memory.kv_pool import HostPool, KVPool
from cairn.memory.layout import CacheLayout
from tests.helpers import held_slices

SHAPES = [(2, 1, 3, 12), (1, 4, 2, 8), (3, 5, 7, 40), (8, 16, 32, 600)]
"""kv heads, sequences, pages each selects, hot slots."""
STAGED = [(1, 1, 3), (3, 5, 40), (2, 3, 1100)]
"""kv heads, blocks of rows, pages of each."""
LATE = swap_in._LATE.value


def check(
    kv_heads: int,
    seqs: int,
    topk: int,
    slots: int,
    device: torch.device,
    dtype: torch.dtype,
    steps: int = 6,
    clock: int = 0,
    page: tuple[int, int] = (4, 6),
    threads: int = COPY_THREADS,
) -> None:
    """Same slots, same misses, same bytes as the oracle, step after step; pages change lives and
    come and go on the device meanwhile. `clock`: how long the kernel's hot cache has been used;
    `page`: its rows and their width."""
    torch.manual_seed(seqs)
    width, frames, num_pages, (size, dim) = 3 * topk + 5, 6, 4 * slots, page
    layout = CacheLayout.of_heads(kv_heads, dim, dtype)
    groups = [LayerGroup("full", ()), LayerGroup("resident", (0,), 8, 0, layout)]
    cpu = torch.device("cpu")
    pools = [
        KVPool(groups, [num_pages, frames], size, where, hot_pages=slots) for where in (cpu, device)
    ]
    host = HostPool(groups[1], num_pages, size, device=device)
    host.part(0).copy_(torch.randn(host.part(0).shape))
    for pool in pools:
        pool.part(0).fill_(float("nan"))
    oracle = HiSparseCoordinator(
        pools[0], host, num_frames=frames, hot_slots=slots, asynchronous=False
    )
    hot = HotTables.empty(kv_heads, slots, num_pages + 1, device)
    hot.clock.fill_(clock)
    scratch = SwapScratch.empty(seqs + 2, kv_heads, topk, num_pages + 1, device)
    lives = torch.ones(num_pages + 1, dtype=torch.int32)
    for step in range(steps):
        # Sequences share some pages; each selects places in its own table.
        common = 1 + torch.randperm(num_pages)[: 2 * width]
        table = common[torch.rand(seqs, 2 * width).argsort(1)[:, :width]].int()
        selected = torch.rand(seqs, kv_heads, width).argsort(-1)[..., :topk].sort(-1).values.int()
        selected[torch.rand(selected.shape) < 0.2] = -1
        lives[torch.randperm(num_pages)[:3] + 1] += 1
        moved = torch.unique(table)[step : step + frames]
        edits = tuple(Transfer(int(page), i + 1) for i, page in enumerate(moved))
        gone = tuple(Transfer(page, 0) for page in range(num_pages + 1))
        oracle.begin_step(CopyEdits(gone))
        oracle.begin_step(CopyEdits(edits, edits))
        rows = torch.arange(seqs)[:, None, None]
        pages = torch.where(selected < 0, -1, table[rows, selected.clamp(min=0)]).long()
        found = oracle.swap_in(0, pages, lives[pages.clamp(min=0)]).places
        generations = lives[table.long()]
        plan_swap(
            hot,
            scratch,
            selected.to(device),
            table.to(device),
            generations.to(device),
            oracle._frame_of.to(device),
            frames + 1,
        )
        on_device = pools[1].part(0)
        copy_missed(
            scratch.misses,
            host.part(0),
            on_device,
            frames + 1,
            arrived=hot.arrived,
            programs=5,
            threads=threads,
        )
        located = scratch.located[:seqs].cpu().long()
        torch.testing.assert_close(located.abs(), found)
        for head, count in enumerate(scratch.misses.counts.tolist()):
            missed = scratch.misses.entries[head, 0, :count].cpu()
            assert torch.equal(located[:, head] < 0, torch.isin(pages[:, head], missed))
        held_slots = hot.pages >= 0
        assert (hot.arrived[held_slots] == pieces_of(on_device, threads)).all()
        assert (hot.arrived[~held_slots] == 0).all()
        held = [
            (head, slot, int(hot.pages[head, slot]), int(hot.generations[head, slot]))
            for head in range(kv_heads)
            for slot in range(slots)
            if hot.pages[head, slot] >= 0
        ]
        assert held == held_slices(oracle._hot[0])
        stats = oracle.stats
        assert scratch.totals.tolist() == [stats.resident, stats.hits, stats.misses, 0]
        assert torch.equal(
            pools[1].part(0)[frames + 1 :].cpu().nan_to_num(7),
            pools[0].part(0)[frames + 1 :].nan_to_num(7),
        )
    assert oracle.stats.misses > 0 and oracle.stats.hits > 0
    assert hot.used.max() < LATE


def check_pieces(device: torch.device) -> None:
    """A slice has 320 words, and 256 of them are moved at once."""
    check(2, 3, 4, 24, device, torch.float32, page=(16, 20), threads=32)


def check_stage(
    kv_heads: int, blocks: int, width: int, device: torch.device, dtype: torch.dtype
) -> None:
    """Every entry is told where its page is, each page is staged once, and its bytes are there."""
    torch.manual_seed(blocks)
    num_pages, frames, size, dim = 60, 20, 4, 6
    layout = CacheLayout.of_heads(kv_heads, dim, dtype)
    groups = [LayerGroup("full", ()), LayerGroup("resident", (0, 1), 8, 0, layout)]
    pool = KVPool(groups, [num_pages, frames], size, device, hot_pages=4)
    host = HostPool(groups[1], num_pages, size, device=device)
    for tensor in host.tensors():
        tensor.copy_(torch.randn(tensor.shape))
    frame_of = torch.zeros(num_pages + 1, dtype=torch.int32, device=device)
    swap = DeviceSwap(
        pool,
        host,
        frame_of,
        first_hot=frames + 1,
        hot_slots=4,
        shape=SwapShape(max_seqs=1, topk=2, stage_pages=num_pages),
    )
    totals = 0
    for layer, here in ((0, frames), (1, 0), (0, frames // 2)):
        frame_of.zero_()
        resident = 1 + torch.randperm(num_pages)[:here]
        frame_of[resident.to(device)] = 1 + torch.arange(here, dtype=torch.int32, device=device)
        # Entries behind their count are left over from somebody else.
        pages = 1 + torch.randint(num_pages, (blocks, kv_heads, width), dtype=torch.int32)
        pages[0, 0, 0] = 0
        counts = torch.randint(1, width + 1, (blocks, kv_heads), dtype=torch.int32)
        pages, counts = pages.to(device), counts.to(device)
        found = swap.fill_stage(layer, pages, counts).cpu()
        staged, expected = stage_reference(pages, counts, frame_of)
        totals += sum(map(len, staged))
        entries = swap._tables.staged.entries[:, 0].cpu()
        for head, own in enumerate(staged):
            assert entries[head, : len(own)].sort().values.tolist() == own.tolist()
            for block in range(blocks):
                count = int(counts[block, head])
                now, then = found[block, head, :count], expected[block, head, :count].cpu()
                assert torch.equal(now[then >= 0], then[then >= 0])
                ids = pages[block, head, :count].cpu()[then < 0].long()
                for half in (head, kv_heads + head):
                    there = host.part(layer)[ids, half]
                    assert torch.equal(swap.stage.cpu()[-1 - now[then < 0], half], there)
        assert swap.totals == [0, 0, 0, totals]
    frame_of[1:] = torch.arange(1, num_pages + 1, device=device)
    found = swap.in_frames(pages, counts)
    there = torch.arange(width, device=device) < counts[..., None]
    assert torch.equal(found[there], pages[there])
    assert swap.totals[3] == totals > 0
    host.close()


def check_pages(device: torch.device, dtype: torch.dtype) -> None:
    """Whole pages of all layers go where they should, both ways, and nowhere else."""
    torch.manual_seed(0)
    layers = (3, 1, 2)
    host = HostPool(
        LayerGroup("kv", layers, layout=CacheLayout.of_heads(2, 6, dtype)), 8, 5, device=device
    )
    for tensor in host.tensors():
        tensor.copy_(torch.randn(tensor.shape))
    there = {layer: host.part(layer).clone() for layer in host.layers}
    here = {layer: torch.zeros(6, 4, 5, 6, dtype=dtype, device=device) for layer in host.layers}
    on_host = LayerMemory.of(host.tensors(), device)
    on_device = LayerMemory.of(here.values(), device)
    pages, frames = torch.tensor([7, 2, 5], device=device), torch.tensor([1, 5, 2], device=device)
    copy_pages(on_host, on_device, pages, frames)
    for layer in layers:
        expected = torch.zeros(here[layer].shape, dtype=dtype)
        expected[[1, 5, 2]] = there[layer][[7, 2, 5]]
        assert torch.equal(here[layer].cpu(), expected)
        here[layer] += layer
    copy_pages(on_device, on_host, frames, pages, programs=2, threads=64)
    if device.type == "cuda":
        torch.cuda.synchronize()
    for layer in layers:
        there[layer][[7, 2, 5]] = here[layer].cpu()[[1, 5, 2]]
        assert torch.equal(host.part(layer), there[layer])
    host.close()
