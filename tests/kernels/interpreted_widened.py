"""A cache of 8 bits whose pages are widened for chunks, in Triton's interpreter (see
`interpreted`)."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from cairn import LLM
from cairn.attention import widened
from cairn.attention.backend import AttentionShape
from cairn.attention.batch import AttentionBatch
from cairn.attention.triton_backend import TritonBackend
from cairn.attention.widened import Widened, WidePool, dense_backend
from cairn.engine.inputs import StepInputs
from cairn.kernels.fp8_rows import FP8, widen
from cairn.kernels.references import paged_attention
from cairn.kernels.widen_pages import WideTiles, widen_pages
from cairn.memory.groups import group_layers
from cairn.memory.kv_pool import KVPool
from cairn.memory.layout import CacheLayout
from cairn.models import layers, loader
from cairn.models.module import Factory
from tests.helpers import TINY_LLAMA, tokens_of, write_model
from tests.kernels.kernel_engines import use_kernels

CPU = torch.device("cpu")
HEADS, KV_HEADS, DIM = 2, 1, 24


def scattered(
    lengths: list[int], page_size: int, windows: list[int | None], dtype: torch.dtype = FP8
) -> tuple[KVPool, np.ndarray]:
    """A pool with rows of many sizes in scattered pages, and a page table."""
    layout = CacheLayout.of_heads(KV_HEADS, DIM, dtype)
    groups = group_layers(windows, [layout] * len(windows))
    counts = [-(-length // page_size) for length in lengths]
    pool = KVPool(groups, [sum(counts) + 2] * len(groups), page_size, CPU)
    order = 1 + np.random.default_rng(0).permutation(sum(counts) + 2)
    table = np.zeros((len(lengths), max(counts)), dtype=np.int32)
    for s, count in enumerate(counts):
        table[s, :count] = order[sum(counts[:s]) : sum(counts[: s + 1])]
    places = torch.arange(sum(counts) + 3).repeat_interleave(page_size)
    offsets = torch.arange(page_size).repeat(sum(counts) + 3)
    for layer in pool.group_of:
        rows = torch.randn(len(places), 2 * KV_HEADS, DIM) * 4.0 ** torch.randint(-6, 2, (1, 2, 1))
        pool.write(layer, places, offsets, rows)
    return pool, table


@pytest.mark.parametrize(
    ("page_size", "window", "cache"),
    [(16, None, FP8), (16, 100, torch.int8), (48, 100, FP8), (128, None, FP8)],
)
def test_pages_are_widened_into_tiles(
    page_size: int, window: int | None, cache: torch.dtype
) -> None:
    torch.manual_seed(0)
    lengths, new = [5, 400, 700, 129], [1, 7, 300, 129]
    is_wide = [False, True, True, True]
    pool, table = scattered(lengths, page_size, [None], cache)
    tile = 128 if 128 % page_size == 0 else page_size
    kv_lens, query_lens = (torch.tensor(own, dtype=torch.int32) for own in (lengths, new))
    most = -(-table.shape[1] * page_size // tile)
    tiles = WideTiles.of(kv_lens, query_lens, torch.tensor(is_wide), tile, most, window, room=100)
    first = [
        max(0, length - rows - window + 1) if window else 0
        for length, rows in zip(lengths, new, strict=True)
    ]
    firsts = [row // tile for row in first]
    counts = [
        -(-length // tile) - skipped if wide else 0
        for length, skipped, wide in zip(lengths, firsts, is_wide, strict=True)
    ]
    assert tiles.ends.tolist() == np.cumsum(counts).tolist()
    named = tiles.table[tiles.table > 0]
    assert sorted(named.tolist()) == list(range(1, sum(counts) + 1))
    out = torch.full((sum(counts) + 2, 2 * KV_HEADS, tile, DIM), float("nan"), dtype=torch.bfloat16)
    widen_pages(pool.part(0), torch.from_numpy(table), tiles, out, max_seqs=4)
    assert out[0].isnan().all() and out[-1].isnan().all() and not out[1:-1].isnan().any()
    known = widen(pool.part(0), torch.bfloat16)
    for s, (length, skipped, count) in enumerate(zip(lengths, firsts, counts, strict=True)):
        if count:
            own = tiles.table[s, skipped : skipped + count].long()
            rows = slice(skipped * tile, length)
            found = out[own].transpose(1, 2).flatten(0, 1)[: length - rows.start]
            expected = known[table[s]].transpose(1, 2).flatten(0, 1)[rows]
            # The interpreter cuts numbers off to bfloat16.
            torch.testing.assert_close(found, expected, rtol=2.0**-7, atol=0)


def test_tiles_without_room_are_not_widened() -> None:
    torch.manual_seed(0)
    pool, table = scattered([300, 600], 64, [None])
    lens = torch.tensor([300, 600], dtype=torch.int32)
    tiles = WideTiles.of(lens, lens, torch.tensor([True, True]), 128, 5, None, room=5)
    assert tiles.table.tolist() == [[1, 2, 3, 0, 0], [4, 5, 0, 0, 0]]
    assert tiles.ends.tolist() == [3, 5]
    out = torch.full((9, 2 * KV_HEADS, 128, DIM), float("nan"), dtype=torch.bfloat16)
    widen_pages(pool.part(0), torch.from_numpy(table), tiles, out, max_seqs=2)
    assert not out[1:6].isnan().any() and out[6:].isnan().all()


def batch_of(pool: KVPool, table: np.ndarray, lengths: list[int], new: list[int]) -> AttentionBatch:
    tables = [table] * len(set(pool.group_of.values()))
    inputs = StepInputs.made_up(pool.page_size, np.array(new), np.array(lengths), tables)
    return inputs.send(CPU, True).batch


STEPS = {
    "chunks": ([150, 60, 64], [30, 60, 3]),
    "mixed": ([140, 130, 33, 90], [1, 20, 33, 1]),
    "decode": ([140, 20], [1, 1]),
}


@pytest.mark.parametrize(
    ("step", "room"),
    [("chunks", "all"), ("chunks", "some"), ("mixed", "all"), ("mixed", "none"), ("decode", "all")],
)
def test_chunks_read_widened_pages(step: str, room: str, monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(0)
    page_size = 32
    lengths, new = STEPS[step]
    pool, table = scattered(lengths, page_size, [None, 50])
    groups = group_layers([None, 50], [CacheLayout.of_heads(KV_HEADS, DIM, FP8)] * 2)
    size = HEADS, KV_HEADS, DIM, DIM**-0.5, page_size, torch.float16, CPU, groups, len(new)
    shape = AttentionShape(*size, longest=max(lengths))
    if room != "all":
        tiles = 1 if room == "none" else 1 + -(-lengths[1] // widened._tile(shape))
        monkeypatch.setattr(widened, "_tiles", lambda _: tiles)
    backend = dense_backend([TritonBackend], shape, pool)
    assert isinstance(backend, Widened)
    batch = batch_of(pool, table, lengths, new)
    metadata = backend.prepare(batch)
    assert (metadata.wide is None) == (step == "decode" or room == "none")
    backend.begin(metadata)
    query = torch.randn(sum(new), HEADS, DIM).half()
    for layer, window in enumerate((None, 50)):
        out = backend.forward(layer, query, metadata).float()
        expected, _ = paged_attention(
            query,
            widen(pool.part(layer), torch.float16),
            torch.from_numpy(table),
            lengths,
            new,
            scale=DIM**-0.5,
            window=window,
        )
        ratio = (out - expected).norm() / expected.norm()
        assert ratio < 1e-2, f"layer {layer}: error ratio {ratio:.1e}"


def test_recorded_steps_follow_lengths_on_the_device() -> None:
    torch.manual_seed(0)
    lengths, new = [140, 130, 33, 4], [1, 20, 33, 4]
    pool, table = scattered(lengths, 16, [None])
    groups = group_layers([None], [CacheLayout.of_heads(KV_HEADS, DIM, FP8)])
    size = HEADS, KV_HEADS, DIM, DIM**-0.5, 16, torch.float16, CPU, groups, len(new)
    backend = dense_backend([TritonBackend], AttentionShape(*size, longest=max(lengths)), pool)
    batch = batch_of(pool, table, lengths, new)
    assert backend.graph_for(batch, mixed=True) is not None
    rows = np.array([sum(new), 0, 0, 0])  # what the host knows while a step is recorded
    recorded = replace(batch, recorded="dense", query_lens=rows, kv_lens=rows)
    metadata = backend.prepare(recorded)
    backend.begin(metadata)
    query = torch.randn(sum(new), HEADS, DIM).half()
    out = backend.forward(0, query, metadata).float()
    expected, _ = paged_attention(
        query,
        widen(pool.part(0), torch.float16),
        torch.from_numpy(table),
        lengths,
        new,
        scale=DIM**-0.5,
    )
    assert (out - expected).norm() / expected.norm() < 1e-2


def test_padding_of_a_recorded_step_stays_within_the_widened_pages(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    torch.manual_seed(0)
    lengths, new, padding = [200, 130], [20, 33], 147
    pool, table = scattered(lengths, 16, [None])
    groups = group_layers([None], [CacheLayout.of_heads(KV_HEADS, DIM, FP8)])
    size = HEADS, KV_HEADS, DIM, DIM**-0.5, 16, torch.float16, CPU, groups, 4
    monkeypatch.setattr(widened, "_tiles", lambda _: 5)  # just room for both sequences
    memory = torch.full((8, 2 * KV_HEADS, 128, DIM), 7.0).half()
    memory[0] = 0
    monkeypatch.setattr(WidePool, "part", lambda *_: memory[:5])
    backend = dense_backend([TritonBackend], AttentionShape(*size, longest=256), pool)
    host = StepInputs.made_up(16, np.array(new), np.array(lengths), [table])
    assert backend.graph_for(host.batch, mixed=True) is not None
    arrays = host.padded_arrays(sum(new) + padding, 4, mixed=True)
    packed = [torch.from_numpy(own.astype(np.int32)) for own in arrays]
    tables = torch.from_numpy(host.pack_tables(False, 4))
    rows = np.array([len(arrays[0]), 0, 0, 0])  # what the host knows while a step is recorded
    cu_query = np.array([0, *np.cumsum(rows)])
    recorded = replace(host.on_device(packed, tables).batch, recorded="dense", query_lens=rows)
    metadata = backend.prepare(replace(recorded, kv_lens=rows, cu_query=cu_query))
    backend.begin(metadata)
    query = torch.randn(len(arrays[0]), HEADS, DIM).half()
    out = backend.forward(0, query, metadata).float()[: sum(new)]
    assert (memory[1:5] != 7).any((1, 2, 3)).all() and (memory[5:] == 7).all()
    known = widen(pool.part(0), torch.float16)
    expected, _ = paged_attention(
        query[: sum(new)], known, torch.from_numpy(table), lengths, new, scale=DIM**-0.5
    )
    assert (out - expected).norm() / expected.norm() < 1e-2


def test_steps_that_do_not_fit_are_not_recorded(monkeypatch: pytest.MonkeyPatch) -> None:
    lengths, new = [300, 200], [40, 40]
    pool, table = scattered(lengths, 16, [None])
    groups = group_layers([None], [CacheLayout.of_heads(KV_HEADS, DIM, FP8)])
    size = HEADS, KV_HEADS, DIM, DIM**-0.5, 16, torch.float16, CPU, groups, len(new)
    for tiles, fits in ((6, True), (5, False)):
        monkeypatch.setattr(widened, "_tiles", lambda _, tiles=tiles: tiles)
        backend = dense_backend([TritonBackend], AttentionShape(*size), pool)
        graph = backend.graph_for(batch_of(pool, table, lengths, new), mixed=True)
        assert (graph is not None) == fits
        assert backend.graph_for(batch_of(pool, table, lengths, [1, 1]), mixed=False) is not None


def test_a_whole_engine_mixes_columns(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Chunks of a prompt and decode over keys that were multiplied by a Hadamard matrix, by kernels
    and in torch."""
    folder = write_model(tmp_path, {**TINY_LLAMA, "num_hidden_layers": 1, "head_dim": 32})
    options: dict[str, Any] = {"device": "cpu", "dtype": "float32", "kv_cache_gib": 0.02}
    options |= {"page_size": 16, "chunked_prefill_size": 16, "quantization": "none"}
    options |= {"kv_cache_dtype": "fp8", "max_running_requests": 1}
    scores, answers = [], []
    for in_kernels in (False, True):
        if in_kernels:
            use_kernels(monkeypatch)
            monkeypatch.setattr(
                loader, "Factory", lambda dtype, device, *_: Factory(dtype, device, fused=True)
            )
            monkeypatch.setattr(layers, "_column_blocks", lambda _: 0)  # weights lie as on a GPU
        backend = "triton" if in_kernels else "torch"
        with LLM(folder, attention_backend=backend, **options) as llm:
            assert llm.engine.runner.stepper.pool.hadamard == {0}
            scores.append(llm.logprobs(tokens_of(20)))
            answers.append(llm.generate(tokens_of(20), max_tokens=3, ignore_eos=True).token_ids)
    torch.testing.assert_close(*scores, rtol=0, atol=1e-3)
    assert answers[0] == answers[1]
