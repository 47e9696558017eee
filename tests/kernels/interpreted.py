"""Triton kernels in the interpreter, against their references. Run by test_kernels.py, since the
interpreter is chosen when a process first imports triton."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest
import torch
import triton
import triton.language as tl

from cairn import LLM, SamplingParams
from cairn.attention.backend import Graph
from cairn.attention.hsa.backend import HSABackend
from cairn.attention.hsa.kernel_sparse import KernelSparse
from cairn.attention.triton_backend import TritonBackend
from cairn.bench.drift import DriftState, drift
from cairn.bench.hsa import _watched
from cairn.bench.tier_engines import drift as drift_in_decode
from cairn.bench.tier_engines import stop_copying
from cairn.engine import graphs
from cairn.engine.drafting import Drafting
from cairn.engine.graphs import StepGraphs, StepSize
from cairn.kernels import paged_decode as paged_decode_module
from cairn.kernels import paged_extend as paged_extend_module
from cairn.kernels import rope_kv as rope_kv_module
from cairn.kernels import sparse_decode, sparse_extend, sparse_scratch, sparse_select, swap_in
from cairn.kernels.activation import silu_and_mul
from cairn.kernels.fp8_rows import FP8, quantize, rows_and_scales, scale_rows, widen
from cairn.kernels.gather_pages import gather_pages
from cairn.kernels.gemv import gemv
from cairn.kernels.interface import ScoringHeads
from cairn.kernels.norm import add_rms_norm, rms_norm
from cairn.kernels.paged_decode import DecodeSplits, paged_decode, plan_splits
from cairn.kernels.paged_extend import ExtendBlocks, paged_extend
from cairn.kernels.references import (
    gather_pages_reference,
    gemv_reference,
    paged_attention,
    rms_norm_reference,
    rope_angles_reference,
    rope_kv_reference,
    sample_reference,
    silu_and_mul_reference,
)
from cairn.kernels.rope_angles import rope_angles
from cairn.kernels.rope_kv import rope_kv
from cairn.kernels.sampling import sample
from cairn.kernels.sparse_shape import SparseShape
from cairn.kernels.top_pages import keep_best, threshold_in_memory, threshold_of_rows
from cairn.memory import prompt_stage
from cairn.sparsity.selection import top_positions
from tests.engine.lanes import tier_of
from tests.engine.test_speculation import Always, Liar
from tests.engine.tiered import check_clean, tiered
from tests.helpers import (
    TINY_HILS,
    TINY_LLAMA,
    TINY_OLMO3,
    poison_free_memory,
    tokens_of,
    write_model,
)
from tests.kernels import located_case, swap_case
from tests.kernels.sparse_case import CASES, run

CPU = torch.device("cpu")
NAN = float("nan")


def paged(
    lengths: list[int], kv_heads: int, dim: int, page_size: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """A pool with scattered pages and NaN in all that is not the sequences'; their page tables."""
    counts = [-(-length // page_size) for length in lengths]
    pages = sum(counts) + 3
    pool = torch.full((pages + 1, 2 * kv_heads, page_size, dim), NAN)
    free = (1 + torch.randperm(pages)).tolist()
    table = torch.zeros(len(lengths), max(counts) + 1, dtype=torch.int32)
    for s, (length, count) in enumerate(zip(lengths, counts, strict=True)):
        for index in range(count):
            page = table[s, index] = free.pop()
            rows = min(page_size, length - index * page_size)
            pool[page, :, :rows] = torch.randn(2 * kv_heads, rows, dim)
    return pool, table


def narrow_pages(pool: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """The same pages with rows of 8 bits. NaN stays NaN, in scales too."""
    pages, heads, size, dim = pool.shape
    found = torch.empty(pages, heads, size + scale_rows(size, dim), dim, dtype=dtype)
    rows, scales = rows_and_scales(found)
    stored, own = quantize(pool, dtype=dtype)
    rows.copy_(stored)
    scales.copy_(own.masked_fill(pool.isnan().any(-1), NAN))
    return found


SHAPES = [
    # lengths, new rows, heads, kv heads, head size, page size, window, hide last
    ([1, 15, 16, 17, 300], [1, 1, 1, 1, 1], 4, 2, 16, 16, None, False),
    ([1, 63, 64, 65, 700], [1, 1, 1, 1, 1], 4, 1, 32, 64, None, False),
    ([5, 200], [1, 1], 8, 2, 24, 16, 20, True),
    ([130], [1], 2, 2, 8, 512, None, False),
    ([5, 17, 300, 16, 33], [5, 3, 5, 1, 2], 4, 2, 16, 16, None, False),
    ([700, 64, 66, 9], [4, 1, 3, 0], 6, 2, 32, 64, None, False),
    ([5, 200, 39, 37], [3, 3, 3, 1], 8, 2, 24, 16, 20, True),
    ([70, 130, 3, 1], [70, 5, 3, 1], 4, 2, 16, 16, None, False),
    ([70, 200], [70, 64], 4, 2, 16, 64, 33, True),
    ([40], [40], 2, 1, 80, 16, None, False),
    ([200], [70], 2, 1, 16, 64, None, False),
    ([100], [70], 2, 1, 80, 64, None, False),
    ([100], [70], 1, 1, 8, 64, None, False),
]


@pytest.mark.parametrize(
    ("case", "cache"),
    [
        *((case, None) for case in SHAPES),
        *((case, FP8) for case in SHAPES[::2]),
        *((SHAPES[i], torch.int8) for i in (1, 6, 8)),
    ],
)
def test_paged_attention(
    case: tuple[list[int], list[int], int, int, int, int, int, bool],
    cache: torch.dtype | None,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(paged_decode_module, "target_items", lambda *_: 40)  # many splits
    monkeypatch.setattr(paged_decode_module, "_LEAST_PAGES", 0)
    monkeypatch.setattr(paged_extend_module, "can_describe", lambda *_: cache is None)
    torch.manual_seed(0)
    lengths, new, heads, kv_heads, dim, page_size, window, hide = case
    pool, table = paged(lengths, kv_heads, dim, page_size)
    query = torch.randn(sum(new), heads, dim)
    options = {"scale": dim**-0.5, "window": window, "hide_last": hide}
    if cache is not None:
        sizes = torch.tensor([0.0, 1e-4, 1.0, 3.0])[torch.randint(4, pool.shape[:3])]
        pool = narrow_pages(pool * sizes[..., None], cache)
        query = query.half()
    clean = torch.nan_to_num(widen(pool, torch.float32))
    expected, expected_lse = paged_attention(query, clean, table, lengths, new, **options)
    kv_lens = torch.tensor(lengths, dtype=torch.int32)
    out, lse = torch.full_like(query, NAN), torch.full(query.shape[:2], NAN)
    cu_query = torch.tensor([0, *np.cumsum(new)], dtype=torch.int32)
    if (few := max(new)) <= 5:
        splits = DecodeSplits.empty(len(lengths), heads, kv_heads, dim, CPU, few)
        paging = {"kv_heads": kv_heads, "page_size": page_size, "window": window}
        plan_splits(splits, kv_lens, rows_per_seq=few, **paging)
        options |= {"rows_per_seq": few}
        paged_decode(query, pool, table, kv_lens, cu_query, splits, out, lse=lse, **options)
        assert not splits.arrivals.any() and not splits.group_arrivals.any()
    else:
        blocks = ExtendBlocks.of(np.array(new), np.arange(len(new)), CPU)
        paged_extend(query, pool, table, kv_lens, cu_query, blocks, out, lse=lse, **options)
    error = 1e-5 if cache is None else 6e-3
    torch.testing.assert_close(out.float(), expected.float(), rtol=0, atol=error)
    torch.testing.assert_close(lse, expected_lse, rtol=0, atol=error)


@pytest.mark.parametrize(
    "lengths",
    [[1], [5000], [64] * 9, [1, 100, 9000, 0, 64, 3000], [90 * i % 777 for i in range(70)]],
)
@pytest.mark.parametrize("window", [None, 100])
def test_splits_cover_every_sequence_once_long_ones_first(
    lengths: list[int], window: int | None
) -> None:
    splits = DecodeSplits.empty(len(lengths), 2, 2, 16, CPU)
    splits.item_seq.fill_(77)
    kv_lens = torch.tensor(lengths, dtype=torch.int32)
    plan_splits(splits, kv_lens, kv_heads=2, page_size=16, window=window)
    sizes: dict[int, int] = {}  # of each item
    for s, (first, count) in enumerate(
        zip(splits.item_begin.tolist(), splits.item_count.tolist(), strict=True)
    ):
        assert (count > 0) == (lengths[s] > 0)
        assert splits.item_seq[first : first + count].tolist() == [s] * count
        seen = 0 if window is None else max(0, lengths[s] - window) // 16
        sizes |= dict.fromkeys(
            range(first, first + count), -(-(-(-lengths[s] // 16) - seen) // max(count, 1))
        )
    total = int(splits.item_count.sum())
    assert sorted(sizes) == list(range(total))
    assert all(sizes[i] >= sizes[i + 1] for i in range(total - 1))
    programs = len(lengths) + paged_decode_module.target_items(2, len(lengths), CPU)
    assert total <= programs <= len(splits.item_seq)
    assert (splits.item_seq[total:programs] == -1).all()


@pytest.mark.parametrize("ratio", [1, 2, 4])
def test_gathered_pages(ratio: int) -> None:
    pool = torch.randn(9, 4, 16, 24)
    pages = torch.randint(0, 9, (4 * ratio,), dtype=torch.int32)
    out = torch.full((4, 4, ratio * 16, 24), NAN)
    gather_pages(pool, pages, ratio, out)
    assert torch.equal(out, gather_pages_reference(pool, pages, ratio))
    third = torch.cat([pool[int(page)] for page in pages[2 * ratio : 3 * ratio]], 1)
    assert torch.equal(out[2], third)


def test_norms() -> None:
    torch.manual_seed(0)
    x, stream, weight = torch.randn(5, 40), torch.randn(5, 40), torch.randn(40)
    torch.testing.assert_close(rms_norm(x, weight, 1e-6), rms_norm_reference(x, weight, 1e-6))
    strided = torch.randn(5, 64)[:, :40]
    expected = rms_norm_reference(strided, weight, 1e-6)
    torch.testing.assert_close(rms_norm(strided, weight, 1e-6), expected)
    total = x + stream
    normed = add_rms_norm(x, stream, weight, 1e-2)
    torch.testing.assert_close(normed, rms_norm_reference(total, weight, 1e-2))
    torch.testing.assert_close(stream, total)
    parts, stream = torch.randn(3, 5, 40), torch.randn(5, 40)
    total = parts.sum(0) + stream
    normed = add_rms_norm(parts, stream, weight, 1e-2)
    torch.testing.assert_close(normed, rms_norm_reference(total, weight, 1e-2))
    torch.testing.assert_close(stream, total)


def test_silu_and_mul() -> None:
    gate_up = torch.randn(3, 100)
    torch.testing.assert_close(silu_and_mul(gate_up), silu_and_mul_reference(gate_up))


@pytest.mark.parametrize(("rows", "width"), [(1, 50), (1, 4100), (2, 50), (7, 1030), (8, 50)])
@pytest.mark.parametrize("before", ["nothing", "silu", "norm"])
@pytest.mark.parametrize("adds", [False, True])
def test_gemv(rows: int, width: int, before: str, adds: bool) -> None:
    weight = torch.randn(37, width)
    x = torch.randn(rows, 2 * width if before == "silu" else width)
    norm = (torch.randn(width), 1e-2) if before == "norm" else None
    streams = [torch.ones(rows, 37) if adds else None for _ in range(2)]
    found, expected = (
        product(x, weight, silu=before == "silu", norm=norm, add_to=stream)
        for product, stream in zip((gemv, gemv_reference), streams, strict=True)
    )
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)
    assert not adds or found is streams[0]


def test_rope_angles() -> None:
    positions = torch.tensor([0, 1, 17, 5000], dtype=torch.int32)
    frequencies = torch.tensor([1.0, 0.1, 0.0])
    found = rope_angles(positions, frequencies, 1.5, torch.float32)
    expected = rope_angles_reference(positions, frequencies, 1.5, torch.float32)
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("norm", [False, True])
@pytest.mark.parametrize("dim", [16, 24])
@pytest.mark.parametrize("scores", ["", "added", "own"])
@pytest.mark.parametrize(("many", "cache"), [(5, None), (1024, None), (5, FP8), (5, torch.int8)])
def test_rope_and_kv_write(
    norm: bool,
    dim: int,
    scores: str,
    many: int,
    cache: torch.dtype | None,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    if scores and not norm:
        pytest.skip("scoring heads come with norms")
    monkeypatch.setattr(rope_kv_module, "_MANY_ROWS", many)
    heads, kv_heads = 5, 2
    qkv = torch.randn(5, (heads + 2 * kv_heads) * dim + heads * dim)
    scoring = None
    if scores:
        scoring = ScoringHeads(qkv[:, -heads * dim :], scores == "added", torch.randn(dim))
    cos, sin = torch.randn(5, dim), torch.randn(5, dim)
    q_weight, k_weight = (torch.randn(dim), torch.randn(dim)) if norm else (None, None)
    pages, offsets = torch.tensor([1, 2, 2, 3, 1]), torch.tensor([0, 1, 2, 3, 7])
    pools = [torch.zeros(4, 2 * kv_heads, 8, dim) for _ in range(2)]
    if cache is not None:
        pools = [narrow_pages(pool, cache) for pool in pools]
        qkv[1] *= 1e-4
        qkv[2] = 0.0
    given = (2.0**-9, 0.0) if cache == FP8 and norm else (0.0, 0.0)
    found, expected = (
        kernel(qkv, cos, sin, q_weight, k_weight, 1e-6, pool, pages, offsets, heads, scoring, given)
        for kernel, pool in zip((rope_kv, rope_kv_reference), pools, strict=True)
    )
    torch.testing.assert_close(found, expected)
    assert (found[0] is found[1]) == (scoring is None)
    if cache is None:
        torch.testing.assert_close(pools[0], pools[1])
        return
    # The interpreter rounds 1.97 to 1.0 instead of 2.0, and so on.
    (rows, scales), (expected_rows, expected_scales) = map(rows_and_scales, pools)
    torch.testing.assert_close(scales, expected_scales, rtol=1e-6, atol=0)
    wrong = (rows.float() != expected_rows.float()).float().mean()
    assert wrong < (0.01 if cache == FP8 else 0.001)


def test_sampling_takes_what_the_reference_takes() -> None:
    logits = torch.randn(40, 9000)
    logits[4, [7, 8000]] = 50.0  # a tie: the lower id
    logits[5:10, :8500] = float("-inf")  # two blocks without a token
    logits[10:20, 1:] = float("-inf")
    temperatures = torch.tensor([0.0, 1.0, 0.5, 2.0, 0.0]).repeat(8)
    seeds = torch.arange(40) * 0x1234567890ABCDEF % 2**62
    tokens = sample(logits, temperatures, seeds)
    assert tokens.tolist() == sample_reference(logits, temperatures, seeds).tolist()
    assert tokens[0] == logits[0].argmax() and tokens[4] == 7
    assert (tokens[5:10] >= 8500).all() and (tokens[10:20] == 0).all()
    assert len(set(tokens[20:].tolist())) > 10


_PROMPTS = [name for name, case in CASES.items() if max(case.new) > 1]


@pytest.mark.parametrize(
    ("name", "few"),
    [
        *((name, 0) for name in CASES),
        *(
            pytest.param(name, 128, marks=[pytest.mark.slow] * (i % 3 > 0))
            for i, name in enumerate(_PROMPTS)
        ),
    ],
)
def test_sparse_attention(name: str, few: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows of prompts select in one launch where they have few candidates, and in five."""
    for module in (sparse_decode, sparse_scratch):
        monkeypatch.setattr(module, "CHUNK", 16)  # several chunks, on few pages
    _use_few_programs(monkeypatch)
    monkeypatch.setattr(sparse_select, "_GROUPS", 4)
    monkeypatch.setattr(sparse_select, "_FEW", few)
    described = list(CASES).index(name) % 2 == 0  # half of the cases load tiles by descriptor
    monkeypatch.setattr(sparse_select, "can_describe", lambda *_: described)
    whole = described and CASES[name].cache is None
    monkeypatch.setattr(sparse_extend, "_worth_describing", lambda *_: whole)
    found, expected = (run(CASES[name], CPU, kernels=kernels) for kernels in (True, False))
    error = 1e-5 if CASES[name].dtype == torch.float32 else 3e-3
    torch.testing.assert_close(found.out, expected.out, rtol=0, atol=error)
    torch.testing.assert_close(found.vectors, expected.vectors, rtol=0, atol=error, equal_nan=True)
    assert torch.equal(found.sealed, expected.sealed)
    for row, selection in expected.selections.items():
        k = selection.page_index.shape[-1]
        assert torch.equal(found.selections[row].page_index[..., :k], selection.page_index)
        torch.testing.assert_close(
            found.selections[row].weights[..., :k], selection.weights, rtol=0, atol=1e-5
        )


@pytest.mark.parametrize(("entries", "ways"), [(1024, 16), (8, 2)])
@pytest.mark.parametrize(
    "shape", [*swap_case.SHAPES[:2], pytest.param(swap_case.SHAPES[2], marks=pytest.mark.slow)]
)
def test_swap_in(
    shape: tuple[int, int, int, int], entries: int, ways: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also where a selection is looked at in several parts, and slots are searched in halves."""
    monkeypatch.setattr(swap_in, "_ENTRIES", (entries,))
    monkeypatch.setattr(swap_in, "plan_ways", lambda _: ways)
    swap_case.check(*shape, CPU, torch.float32)


@pytest.mark.slow
def test_swap_in_after_a_month() -> None:
    """Ages are set back in the third of six steps, and slots are given up in the same order."""
    swap_case.check(3, 5, 7, 40, CPU, torch.float32, clock=swap_case.LATE - 6)


def test_swap_in_of_pages_in_several_pieces() -> None:
    swap_case.check_pieces(CPU)


@pytest.mark.parametrize(
    "shape",
    [swap_case.STAGED[0], *(pytest.param(s, marks=pytest.mark.slow) for s in swap_case.STAGED[1:])],
)
def test_swap_in_for_prompts(shape: tuple[int, int, int]) -> None:
    swap_case.check_stage(*shape, CPU, torch.float32)


@pytest.mark.slow
def test_made_up_selections_drift() -> None:
    shape = SparseShape(
        heads=4, kv_heads=2, head_dim=16, page_size=16, landmark_heads=2, landmark_width=32,
        topk=5, window=32, scale=1.0, strategy="group", by_lse=True, sinks=0, null_split=False,
        hide_last=False,
    )  # fmt: skip
    state = DriftState.empty(shape, 2, 4, CPU)
    lengths = torch.tensor([40 * 16, 60, 1000], dtype=torch.int32)
    limits = [(length - 32) // 16 for length in (40 * 16, 60, 1000)]
    last, changed, steps = None, 0, 12
    for _ in range(steps):
        drift(shape, state, lengths, change=0.2)
        selected = state.selected[:, :3]
        assert (state.selected[:, 3] == -1).all()
        # Fewer candidates than it selects: all of them.
        assert (selected[:, 1] == torch.tensor([0, -1, -1, -1, -1])).all()
        for row in (0, 2):
            places = selected[:, row]
            assert (places.diff(dim=-1) > 0).all() and (places >= 0).all()
            assert (places < limits[row]).all()
        now = selected[:, [0, 2]].clone()
        changed += 0 if last is None else int((now != last).sum())
        last = now
    assert 0.1 < changed / (steps * 40) < 0.25
    assert (selected[0, 0] != selected[1, 0]).any()  # every layer draws its own
    # Pages that are added move nothing but what stands at the edge of a part.
    for _ in range(10):
        before = state.selected[:, 0].clone()
        lengths[0] += 16
        drift(shape, state, lengths, change=0.0)
        assert (state.selected[:, 0] != before).sum() <= 4
        assert (state.selected[:, 0].diff(dim=-1) > 0).all()


@pytest.mark.parametrize(
    ("parts", "by_lse"), [(1, True), (2, False), pytest.param(3, True, marks=pytest.mark.slow)]
)
def test_pages_that_come_late(parts: int, by_lse: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """However few programs share them."""
    monkeypatch.setattr(sparse_decode, "_parts_beside_copies", lambda *_: parts)
    located_case.check(CPU, torch.float32, seqs=2, kv_heads=1, topk=6, by_lse=by_lse)


def test_small_pages_that_come_late(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sparse_decode, "_parts_beside_copies", lambda *_: 2)
    located_case.check(CPU, torch.float32, seqs=2, kv_heads=1, topk=19, page_size=8)


def test_whole_pages_between_host_and_device() -> None:
    swap_case.check_pages(CPU, torch.float32)


@pytest.mark.parametrize(
    ("n", "block", "slack"), [(1, 64, 0), (5, 1024, 0), (64, 64, 2), (64, 1024, 2)]
)
def test_best_ranks_are_those_of_the_reference(n: int, block: int, slack: int) -> None:
    """However counts are packed, for few or for many; with slack, a lower threshold will do."""
    torch.manual_seed(n)
    rank = torch.randint(-3, 4, (16, n)).float()  # many ties
    rank[torch.rand(16, n) < 0.2] = float("-inf")
    rank[0] = float("-inf")
    rank[1, : n // 2] = float("inf")
    keep = torch.zeros(16, n, dtype=torch.int32)
    _keep_each[(16,)](rank, keep, n, block, 4)
    # What the kernels that choose for many rows search in: a rank's bits above its place.
    bits = rank.view(torch.int32)
    keys = bits ^ ((bits >> 31) & 0x7FFFFFFF)
    entries = torch.zeros(16, n, dtype=torch.int64)
    counts = (rank > float("-inf")).sum(1).int()
    for row in range(16):
        places = (rank[row] > float("-inf")).nonzero().flatten()
        entries[row, : len(places)] = (bits[row, places].long() << 32) | places
    threshold, key = torch.zeros(16), torch.zeros(16, dtype=torch.int32)
    few = block == 64
    _thresholds[(1,)](rank, entries, counts, threshold, key, n, 16, block, 16, 4, slack, few)
    for row in range(16):
        places = top_positions(rank[row], 4)
        expected = places[places >= 0].tolist()
        assert keep[row].nonzero().flatten().tolist() == expected
        for reached, exceeded, most in (
            (rank[row] >= threshold[row], rank[row] > threshold[row], 4 + slack),
            (keys[row] >= key[row], keys[row] > key[row], 4),
        ):
            assert reached[expected].all() and exceeded.sum() <= most
        assert (threshold[row] > float("-inf")) == (len(expected) == 4)


@triton.jit
def _thresholds(
    rank,
    entries,
    counts,
    threshold,
    key,
    n,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
    SMALL: tl.constexpr,
    K: tl.constexpr,
    SLACK: tl.constexpr,
    FEW: tl.constexpr,
):
    row = tl.arange(0, ROWS)
    column = tl.arange(0, BLOCK)[None, :]
    value = tl.load(rank + row[:, None] * n + column, mask=column < n, other=float("-inf"))
    tl.store(threshold + row, threshold_of_rows(value, K, SLACK))
    count = tl.load(counts + row)
    own = entries + row[:, None] * n
    tl.store(key + row, threshold_in_memory(own, count, K, SMALL, FEW))


@triton.jit
def _keep_each(rank, keep, n, BLOCK: tl.constexpr, K: tl.constexpr):
    column = tl.arange(0, BLOCK)
    place = tl.program_id(0) * n + column
    value = tl.load(rank + place, mask=column < n, other=float("-inf"))
    tl.store(keep + place, keep_best(value, K).to(tl.int32), mask=column < n)


@pytest.mark.slow
def test_a_whole_engine_on_sparse_kernels(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Chunked prefill, mixed steps, decode across a page's end and a prefix hit, against torch."""
    _use_few_programs(monkeypatch)
    folder = write_model(tmp_path, {**TINY_HILS, "hidden_size": 64, "full_attn_interleave": 2})
    prompts = [tokens_of(40) + tokens_of(n, seed=n) for n in (19, 45)]
    answers = []
    for refused in ("for comparison", None):
        monkeypatch.setattr(KernelSparse, "refusal", staticmethod(lambda *_, why=refused: why))
        with LLM(
            folder, device="cpu", dtype="float32", kv_cache_gib=0.05, chunked_prefill_size=48
        ) as llm:
            poison_free_memory(llm.engine)
            watched = _watched(llm)
            texts = llm.generate(prompts, max_tokens=4, ignore_eos=True)
            assert (watched is None) == (refused is not None)
            assert watched is None or watched.reuse
            texts += llm.generate(prompts[:1], max_tokens=2, ignore_eos=True)
            answers.append([text.token_ids for text in texts])
            backend = llm.engine.runner.backend
            assert isinstance(backend, HSABackend)
            assert (backend.launches > 0) == (refused is None)
            llm.engine.scheduler.check()
    assert answers[0] == answers[1]


class _Rerun:
    """Stands in for a CUDA graph: runs the step again, on the same buffers."""

    def __init__(self, call: Callable[[], tuple[torch.Tensor, torch.Tensor]]) -> None:
        self._call = call
        self.result: tuple[torch.Tensor, torch.Tensor] | None = None
        self.replays = 0

    def replay(self) -> None:
        self.replays += 1
        assert self.result is not None
        for kept, new in zip(self.result, self._call(), strict=True):
            kept.copy_(new)


def rerun_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let steps that were recorded run again where CUDA would replay them."""

    def capture(own: StepGraphs, call: Callable[[], Any], pool: Any) -> tuple[_Rerun, Any]:
        rerun = _Rerun(call)
        step: Any = call
        if len(step.args) == 1:  # its logits go to a place that steps share
            (step,) = step.args
        seqs = len(step.args[1].places)
        rerun.result = torch.zeros(seqs, 64), torch.zeros(seqs, dtype=torch.int64)
        return rerun, rerun.result

    monkeypatch.setattr(StepGraphs, "_capture", capture)
    monkeypatch.setattr(StepGraphs, "_aside", nullcontext)


def test_a_whole_engine_on_recorded_steps(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Decode and mixed steps with dense rows, sparse rows and both, padded to recorded sizes,
    against the same steps as they are."""
    _use_few_programs(monkeypatch)
    monkeypatch.setattr(KernelSparse, "refusal", staticmethod(lambda *_: None))
    monkeypatch.setattr(TritonBackend, "unavailable_reason", staticmethod(lambda _: None))
    monkeypatch.setattr(graphs, "_MIXED_TOKENS", (32, 48))
    config = {**TINY_LLAMA, "hidden_size": 64, "num_hidden_layers": 1, "vocab_size": 64}
    folder = write_model(tmp_path, config)
    rerun_steps(monkeypatch)
    prompts = [tokens_of(n, seed=n, vocab=64) for n in (45, 23)]
    options: dict[str, Any] = {"attention_backend": "triton,hsa", "page_size": 16, "hsa_topk": 2}
    options |= {"hsa_window": 16, "hsa_dense_below": 26}
    answers, used = [], set()
    for records in (False, True):
        with LLM(
            folder,
            device="cpu",
            dtype="float32",
            kv_cache_gib=0.05,
            chunked_prefill_size=32,
            max_running_requests=2,
            **options,
        ) as llm:
            runner = llm.engine.runner
            if records:
                runner.record_graphs(64)
            poison_free_memory(llm.engine)
            results = llm.generate(prompts, max_tokens=6, ignore_eos=True)
            answers.append([result.token_ids for result in results])
            llm.engine.scheduler.check()
            if records:
                assert runner.graphs is not None
                for (graph, _), step in runner.graphs._graphs.items():
                    rerun: Any = step.graph
                    if rerun.replays:
                        used.add((graph.mixed, graph.kind))
    assert answers[0] == answers[1]
    assert used == {(True, "dense"), (True, "both"), (False, "both"), (False, "sparse")}


def test_prompts_that_select_pages_in_recorded_steps(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Prompts of a HiLS model, beside decoding rows and alone, padded to recorded sizes, against
    the same steps as they are. Chunks with more candidates than recorded steps have run as they
    are too."""
    _use_few_programs(monkeypatch)
    monkeypatch.setattr(KernelSparse, "refusal", staticmethod(lambda *_: None))
    monkeypatch.setattr(TritonBackend, "unavailable_reason", staticmethod(lambda _: None))
    monkeypatch.setattr(graphs, "_MIXED_TOKENS", (12, 40))
    monkeypatch.setattr(sparse_select, "_FEW", 2)
    config = {**TINY_HILS, "hidden_size": 64, "num_hidden_layers": 2, "full_attn_interleave": 2}
    config |= {"vocab_size": 64, "hils_sliding_window": 20, "hils_topk": 1}
    folder = write_model(tmp_path, config)
    rerun_steps(monkeypatch)
    prompts = [tokens_of(n, seed=n, vocab=64) for n in (20, 45, 75)]
    answers, replayed = [], {}
    for records in (False, True):
        with LLM(
            folder,
            device="cpu",
            dtype="float32",
            kv_cache_gib=0.05,
            attention_backend="hsa",
            chunked_prefill_size=50,
            max_running_requests=2,
        ) as llm:
            runner = llm.engine.runner
            if records:
                runner.record_graphs(50)
            poison_free_memory(llm.engine)
            results = llm.generate(prompts[:2], max_tokens=4, ignore_eos=True)
            results += llm.generate(prompts[2:], max_tokens=2, ignore_eos=True)
            answers.append([result.token_ids for result in results])
            llm.engine.scheduler.check()
            if records:
                assert runner.graphs is not None
                steps: Any = runner.graphs._graphs.items()
                replayed = {key: step.graph.replays for key, step in steps if step.graph.replays}
    assert answers[0] == answers[1]
    mixed = Graph("sparse", mixed=True)
    assert replayed[mixed, StepSize(50, 3)] == 2  # not the second chunk of the longest prompt
    assert replayed[mixed, StepSize(42, 3)] == 1  # beside a decoding row
    assert {graph for graph, _ in replayed} == {mixed, Graph("sparse", mixed=False)}


def test_drafts_are_checked_in_recorded_steps(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rows of a sequence read its past together, also behind a window."""
    _use_few_programs(monkeypatch)
    monkeypatch.setattr(TritonBackend, "unavailable_reason", staticmethod(lambda _: None))
    monkeypatch.setattr(graphs, "_MIXED_TOKENS", (32,))
    config = {**TINY_OLMO3, "hidden_size": 64, "vocab_size": 64, "sliding_window": 20}
    config |= {"num_hidden_layers": 2, "layer_types": ["sliding_attention", "full_attention"]}
    folder = write_model(tmp_path, config)
    rerun_steps(monkeypatch)
    prompts = [tokens_of(n, seed=n, vocab=64) for n in (45, 23)]
    options: dict[str, Any] = {"attention_backend": "triton", "page_size": 16}
    options |= {"device": "cpu", "dtype": "float32", "kv_cache_gib": 0.05}
    options |= {"chunked_prefill_size": 32, "max_running_requests": 3}
    asked = SamplingParams(max_tokens=9, ignore_eos=True)
    with LLM(folder, **options) as llm:
        expected = [result.token_ids for result in llm.generate(prompts, asked)]
    truth = [(*prompt, *own) for prompt, own in zip(prompts, expected, strict=True)]
    with LLM(folder, **options, speculative="ngram", speculative_tokens=3) as llm:
        speculation, runner = llm.engine.scheduler.speculation, llm.engine.runner
        assert speculation is not None
        speculation.pace, speculation.drafter = Always(), Liar(truth, 1, honest=0.8)
        runner.record_graphs(32)
        poison_free_memory(llm.engine)
        assert [result.token_ids for result in llm.generate(prompts, asked)] == expected
        assert runner.graphs is not None and llm.engine.scheduler.stats.accepted > 4
        replayed: Any = {
            key: step.graph for key, step in runner.graphs._graphs.items() if key[0].few
        }
        assert sum(step.replays for step in replayed.values()) > 2


def test_drafts_read_the_pages_that_the_first_one_selected(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """There are as many pages before the window as are selected, so all drafts come true. Those of
    the next step read the same pages, unless other steps came between."""
    _use_few_programs(monkeypatch)
    monkeypatch.setattr(KernelSparse, "refusal", staticmethod(lambda *_: None))
    monkeypatch.setattr(TritonBackend, "unavailable_reason", staticmethod(lambda _: None))
    monkeypatch.setattr(graphs, "_MIXED_TOKENS", (32,))
    config = {**TINY_LLAMA, "hidden_size": 64, "num_hidden_layers": 2, "vocab_size": 64}
    folder = write_model(tmp_path, config)
    rerun_steps(monkeypatch)
    prompts = [tokens_of(n, seed=n, vocab=64) for n in (55, 52)]
    asked = SamplingParams(max_tokens=7, ignore_eos=True)
    with LLM(
        folder,
        device="cpu",
        dtype="float32",
        kv_cache_gib=0.05,
        max_running_requests=2,
        attention_backend="triton",
        page_size=16,
        speculative="sparse",
        speculative_tokens=3,
        hsa_topk=2,
        hsa_window=20,
        hsa_dense_below=0,
    ) as llm:
        speculation, runner = llm.engine.scheduler.speculation, llm.engine.runner
        assert speculation is not None
        speculation.pace = Always()
        speculation.drafts_ahead = True
        drafted: list[Drafting] = []
        draft, backend = runner._draft, cast(Any, runner.backend)

        def watched(drafting: Drafting) -> None:
            draft(drafting)
            drafted.append(drafting)
            if len(drafted) == 2:  # once more, as if the shorter text were dense
                assert runner._selected is not None
                config = replace(backend._config, dense_below=int(drafting.starts.min()) + 1)
                with monkeypatch.context() as patch:
                    patch.setattr(backend, "_config", config)
                    draft(drafting)
                assert runner._selected is None

        monkeypatch.setattr(runner, "_draft", watched)
        poison_free_memory(llm.engine)
        plain = llm.generate(prompts, replace(asked, speculation=False))
        runner.record_graphs(32)
        results = llm.generate(prompts, asked, cache_salt="drafts")
        assert [own.token_ids for own in results] == [own.token_ids for own in plain]
        stats = llm.engine.scheduler.stats
        assert stats.accepted == stats.drafted >= 8
        assert runner.graphs is not None
        steps: Any = runner.graphs._graphs.items()
        replays = {"kept": 0, "sparse": 0, "both": 0}
        for (graph, _), recorded in steps:
            if graph.kind in replays:
                replays[graph.kind] += recorded.graph.replays
        assert replays["sparse"] == 1 and replays["kept"] >= 3 and replays["both"] == 1
        llm.engine.scheduler.check()


def test_a_whole_engine_on_sparse_kernels_with_a_host_tier(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Pages leave the device, are read through the hot cache, staged for prompts, and fetched."""
    _use_few_programs(monkeypatch)
    config = {**TINY_HILS, "hidden_size": 64, "num_hidden_layers": 1}
    folder = write_model(tmp_path / "hils", config)
    prompt = tokens_of(100)
    with LLM(folder, device="cpu", dtype="float32", kv_cache_gib=0.05) as llm:
        expected = llm.generate(prompt, max_tokens=4, ignore_eos=True).token_ids
    monkeypatch.setattr(KernelSparse, "refusal", staticmethod(lambda *_: None))
    options: dict[str, Any] = {"dtype": "float32", "chunked_prefill_size": 64}
    with tiered(folder, frames=6, hot=8, pages=20, max_running_requests=1, **options) as llm:
        for traced in (False, True):
            result = llm.generate(prompt, max_tokens=4, ignore_eos=True, trace=traced)
            assert result.token_ids == expected
        tier = llm.engine.tier()
        assert tier is not None and tier.totals.misses > 0 and tier.totals.hits > 0
        swap = tier_of(llm.engine).swap
        assert swap is not None and swap.totals[3] > 0
        check_clean(llm.engine)
        _check_made_up_reads(llm)
    # Where everything fits on the device nothing is looked up, staged or copied in.
    with tiered(folder, frames=20, hot=8, pages=20, max_running_requests=1, **options) as llm:
        assert llm.generate(prompt, max_tokens=4, ignore_eos=True).token_ids == expected
        swap = tier_of(llm.engine).swap
        assert swap is not None and swap.totals[0] > 0 and swap.totals[1:] == [0, 0, 0]


@pytest.mark.parametrize(("policy", "size"), [("quest", 16), ("spread", 8)])
def test_a_whole_engine_on_kernels_with_dense_prompts_in_a_host_tier(
    policy: str, size: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Pages of prompts are gathered in the stage, where kernels attend to all of them."""
    _use_few_programs(monkeypatch)
    config = {**TINY_LLAMA, "hidden_size": 64}
    folder = write_model(tmp_path / "dense", config)
    prompt = tokens_of(100)
    sparse: dict[str, Any] = {"hsa_policy": policy, "hsa_dense_below": 0, "page_size": size}
    sparse |= {"dtype": "float32", "device": "cpu"}
    sparse |= {"hsa_topk": 2, "hsa_window": 20, "hsa_sinks": 1}
    with LLM(folder, attention_backend="torch,hsa", kv_cache_gib=0.05, **sparse) as llm:
        expected = llm.generate(prompt, max_tokens=4, ignore_eos=True).token_ids
    monkeypatch.setattr(KernelSparse, "refusal", staticmethod(lambda *_: None))
    monkeypatch.setattr(TritonBackend, "unavailable_reason", staticmethod(lambda _: None))
    monkeypatch.setattr(prompt_stage, "_MOST_RUNS", 0)  # a kernel copies what is on the host
    options = {**sparse, "attention_backend": "triton,hsa", "chunked_prefill_size": 32}
    options |= {"frames": 80 // size, "hot": 128 // size, "pages": 320 // size}
    with tiered(folder, max_running_requests=1, **options) as llm:
        for _ in range(2):
            result = llm.generate(prompt, max_tokens=4, ignore_eos=True)
            assert result.token_ids == expected
        stage = tier_of(llm.engine).stage
        assert stage is not None and stage.bytes_in > 0
        check_clean(llm.engine)


def _check_made_up_reads(llm: LLM) -> None:
    """What benchmarks put in the place of kernels and swap: drifting pages, copies left out."""
    drift_in_decode(llm, change=0.0)
    swap = tier_of(llm.engine).swap
    assert swap is not None
    before = swap.totals
    llm.generate(tokens_of(100), max_tokens=5, ignore_eos=True)
    hits = swap.totals[1] - before[1]
    assert hits > swap.totals[2] - before[2]  # pages stay the same, so most reads are hits
    assert stop_copying(llm)
    not_copying = tier_of(llm.engine).swap
    assert type(not_copying) is not type(swap) and isinstance(not_copying, type(swap))
    llm.generate(tokens_of(90, seed=5), max_tokens=2, ignore_eos=True)


def _use_few_programs(monkeypatch: pytest.MonkeyPatch) -> None:
    """They are slow here. Of the strips of candidates, the first is never empty and the last is."""
    for rows in ("_THRESHOLD_ROWS", "_CHOOSE_ROWS"):
        monkeypatch.setattr(sparse_select, rows, 64)
    for module in (sparse_decode, sparse_scratch):
        monkeypatch.setattr(module, "strips_of", lambda *_: 2)
