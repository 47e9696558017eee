"""Dense attention over pages, and gathered pages, in Triton's interpreter. Run by
test_kernels.py."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from cairn.kernels import paged_decode as paged_decode_module
from cairn.kernels import paged_extend as paged_extend_module
from cairn.kernels.fp8_rows import FP8, page_rows, widen
from cairn.kernels.gather_pages import gather_pages
from cairn.kernels.paged_decode import DecodeSplits, paged_decode, plan_splits
from cairn.kernels.paged_extend import ExtendBlocks, paged_extend
from cairn.kernels.references import (
    gather_pages_reference,
    paged_attention,
)
from tests.kernels.kernel_engines import narrow_pages

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
    for least in ("_LEAST_PAGES", "_LEAST_OF_MANY"):
        monkeypatch.setattr(paged_decode_module, least, 0)
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
        splits = DecodeSplits.empty(len(lengths), heads, kv_heads, dim, CPU, pool.dtype, few)
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
@pytest.mark.parametrize("cache", [torch.float16, FP8])
def test_splits_cover_every_sequence_once_long_ones_first(
    lengths: list[int], window: int | None, cache: torch.dtype
) -> None:
    splits = DecodeSplits.empty(len(lengths), 2, 2, 16, CPU, cache)
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
    target = paged_decode_module.target_items(2, len(lengths), CPU, cache == FP8)
    programs = len(lengths) + target
    assert total <= programs <= len(splits.item_seq)
    assert (splits.item_seq[total:programs] == -1).all()


@pytest.mark.parametrize(
    ("lengths", "count"),
    [([32768] * 32, 4), ([32768] * 20, 6), ([32768] * 63, 2), ([131072], 64), ([1024] * 200, 1)],
)
def test_splits_of_8_bits_fill_the_device_twice(
    lengths: list[int], count: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """66 run at the same time: 5 splits of 32 sequences would leave most of a third turn idle."""
    monkeypatch.setattr(paged_decode_module, "processors", lambda _: 132)
    splits = DecodeSplits.empty(len(lengths), 16, 8, 16, CPU, FP8)
    kv_lens = torch.tensor(lengths, dtype=torch.int32)
    plan_splits(splits, kv_lens, kv_heads=8, page_size=64, window=None)
    assert splits.item_count.tolist() == [count] * len(lengths)


@pytest.mark.parametrize(("seqs", "count"), [(128, 1), (64, 3)])
def test_short_sequences_are_split_if_there_are_few(
    seqs: int, count: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(paged_decode_module, "processors", lambda _: 132)
    splits = DecodeSplits.empty(seqs, 9, 3, 16, CPU, torch.bfloat16)
    kv_lens = torch.full((seqs,), 820, dtype=torch.int32)
    plan_splits(splits, kv_lens, kv_heads=3, page_size=64, window=None)
    assert splits.item_count.tolist() == [count] * seqs


@pytest.mark.parametrize("ratio", [1, 2, 4])
def test_gathered_pages(ratio: int) -> None:
    pool = torch.randn(9, 4, 16, 24)
    pages = torch.randint(0, 9, (4 * ratio,), dtype=torch.int32)
    out = torch.full((4, 4, ratio * 16, 24), NAN)
    gather_pages(pool, pages, ratio, out)
    assert torch.equal(out, gather_pages_reference(pool, pages, ratio))
    third = torch.cat([pool[int(page)] for page in pages[2 * ratio : 3 * ratio]], 1)
    assert torch.equal(out[2], third)


def test_gathered_pages_of_8_bits_leave_scales_behind() -> None:
    pool = torch.randint(0, 100, (9, 4, 17, 64), dtype=torch.uint8).view(FP8)
    rows = pool[:, :, : page_rows(pool)]
    pages = torch.randint(0, 9, (6,), dtype=torch.int32)
    out = torch.zeros(2, 4, 48, 64, dtype=FP8)
    gather_pages(rows, pages, 3, out)
    expected = gather_pages_reference(rows.view(torch.uint8), pages, 3)
    assert rows.shape[2] == 16 and torch.equal(out.view(torch.uint8), expected)
