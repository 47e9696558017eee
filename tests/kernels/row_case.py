"""Index scan, selection of rows and attention over them, against references, on any device."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import numpy as np
import torch

from cairn.kernels.fp8_rows import store_rows, widen
from cairn.kernels.index_scan import RowList, cut_items, index_scan, plan_scan, rows_per_item
from cairn.kernels.list_rows import ListedRows, list_rows
from cairn.kernels.references import (
    index_scan_reference,
    list_rows_reference,
    row_attention_reference,
)
from cairn.kernels.row_attention import row_attention
from cairn.kernels.store_rows import store_narrow_rows
from cairn.kernels.top_rows import slots_of, top_rows
from cairn.memory.layout import INDEX, LATENT, CacheLayout
from tests.kernels import latent_case


class Sizes(NamedTuple):
    heads: int
    width: int
    page_size: int


def make_list(lengths: list[int], new: list[int], per_item: int, device: torch.device) -> RowList:
    """The last `new` rows of sequences, as rows of a step in which others lie between them. Two
    items are empty, if items have several rows."""
    seqs = np.repeat(np.arange(len(new)), new)
    limits = np.concatenate([np.arange(n - m, n) + 1 for n, m in zip(lengths, new, strict=True)])
    rows = np.arange(len(seqs)) + seqs
    empty = [len(seqs)] * (2 if per_item > 1 else 0)
    items = np.append(cut_items(np.array(new), per_item), empty)
    arrays = (rows, np.append(seqs, 0), limits, items)
    own = [torch.from_numpy(array.astype(np.int32)).to(device) for array in arrays]
    tiles = torch.full((len(items) + 1,), -1, dtype=torch.int32, device=device)
    return RowList(own[0], own[1][:-1], own[2], own[3], tiles, per_item)


LISTS = [
    ([70], [64], 64),
    ([90, 70, 5, 1, 300], [9, 1, 5, 1, 40], 16),
    ([8, 0, 600, 0, 0], [8, 0, 504, 0, 0], 512),  # padded, as recorded steps are
    ([200] * 40, [1] * 39 + [20], 32),
]
"""Lengths of sequences, new rows of each, and rows of a tile."""


def check_list(
    lengths: list[int], new: list[int], at_once: int, device: torch.device, *, per_item: int = 4
) -> None:
    """The last `new` rows of sequences. Items are those of `cut_items`, tile by tile."""
    cu_query = torch.tensor([0, *np.cumsum(new).tolist()], dtype=torch.int32)
    kv_lens = torch.tensor(lengths, dtype=torch.int32)
    listed = ListedRows.empty(sum(new), len(new), at_once, per_item, device)
    for own in (listed.seqs, listed.limits, listed.items, listed.plans):
        own.fill_(-9)
    list_rows(cu_query.to(device), kv_lens.to(device), listed)
    seqs, limits, items = list_rows_reference(cu_query, kv_lens, listed)
    assert listed.seqs[:-1].tolist() == seqs.tolist()
    assert listed.limits.tolist() == limits.tolist()
    assert listed.items[:, : items.shape[1]].tolist() == items.tolist()
    assert seqs.tolist() == np.repeat(np.arange(len(new)), new).tolist()
    for tile, begin in enumerate(range(0, sum(new), listed.at_once)):
        counts = np.unique(seqs[begin : begin + listed.at_once], return_counts=True)[1]
        wanted = cut_items(counts, per_item).tolist()
        assert items[tile, : len(wanted)].tolist() == wanted
        assert set(items[tile, len(wanted) :].tolist()) <= {counts.sum()}


def check_scan(
    lengths: list[int],
    new: list[int],
    sizes: Sizes,
    device: torch.device,
    dtype: torch.dtype,
    *,
    tolerance: float,
    per_item: int | None = None,
    narrow: torch.dtype | None = None,
) -> None:
    """One query at a time, and as many as share keys. `narrow` is the type of keys, if they have 8
    bits."""
    torch.manual_seed(0)
    heads, width, page_size = sizes
    paged = latent_case.Sizes(1, width, 0, page_size)
    pool, table = latent_case.paged(lengths, paged, device, dtype)
    kept = pool
    if narrow is not None:
        pool, kept = narrow_keys(pool, narrow)
    count = sum(new) + len(new)
    query = torch.randn(count, heads, width, device=device).to(dtype)
    weights = torch.randn(count, heads, device=device)
    longest = -(-max(lengths) // 128) * 128
    for per in (1, per_item or rows_per_item(dtype)):
        listed = make_list(lengths, new, per, device)
        scores = torch.full((sum(new), longest), float("nan"), device=device)
        plan_scan(listed, dtype)
        if device.type == "cuda":
            torch.cuda.synchronize()  # in a step, another kernel runs between plan and scan
        index_scan(query, weights, pool, table, listed, scores)
        own = (listed.rows.tolist(), listed.seqs.tolist(), listed.limits.tolist())
        for place, (row, seq, limit) in enumerate(zip(*own, strict=True)):
            keys = kept[table[seq].long()].flatten(0, 1)[:limit]
            expected = index_scan_reference(
                query[row].double(), weights[row].double(), keys.double()
            )
            error = (scores[place, :limit].double() - expected).norm() / expected.norm()
            assert error < tolerance, f"error ratio {error:.1e}"
            assert scores[place, limit:].isnan().all()


def narrow_keys(pool: torch.Tensor, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    """A pool of keys as it is kept in a type of 8 bits, and what is read from it."""
    pages, page_size, width = pool.shape
    shape = CacheLayout.of_latents(8, width).of_type(dtype).part(INDEX).page_shape(page_size)
    narrow = torch.zeros(pages, *shape, dtype=dtype)
    place = torch.arange(pages * page_size)
    rows = torch.nan_to_num(pool).flatten(0, 1).cpu()
    store_rows(narrow, place // page_size, place % page_size, rows)
    return narrow.to(pool.device), widen(narrow, torch.float64).to(pool.device)


def check_store(
    width: int, device: torch.device, narrow: torch.dtype, *, wrong: float = 0.0
) -> None:
    """Latent rows and index keys, byte by byte as torch stores them on a CPU, but for a share of
    `wrong` ones."""
    torch.manual_seed(0)
    layout = CacheLayout.of_latents(width, 24).of_type(narrow)
    place = torch.randperm(48)[:30]
    for name, columns in ((LATENT, width), (INDEX, 24)):
        rows = torch.randn(30, columns) * torch.exp(4 * torch.randn(30, 1))
        rows[0], rows[1] = 0.0, 448.0
        kept = []
        for store, on in ((store_rows, torch.device("cpu")), (store_narrow_rows, device)):
            pages = torch.zeros(3, *layout.part(name).page_shape(16), dtype=narrow, device=on)
            places = (place // 16).int().to(on), (place % 16).int().to(on)
            store(pages, *places, rows.to(on))
            kept.append(pages.view(torch.uint8).cpu())
        assert (kept[0] != kept[1]).float().mean() <= wrong


def make_scores(kind: str, rows: int, length: int, device: torch.device) -> torch.Tensor:
    """Scores [rows, length] of some distribution."""
    scores = torch.randn(rows, length, device=device)
    if kind == "plateau":  # most are exactly zero, of both signs
        scores = torch.where(scores.abs() > 1.5, scores, scores.sign() * 0.0)
    elif kind == "equal":
        scores.fill_(-2.5)
    elif kind == "rounded":
        scores = (scores * 4).round() / 4
    elif kind == "narrow":
        scores = 1000 + scores * 1e-3
    elif kind == "rising":  # a sample misleads: the best are few and together
        scores[:, length // 3 : length // 3 + 50] += 1e4
        scores += torch.arange(length, device=device)
    elif kind == "hidden":  # the sample sees small ones only
        scores.fill_(-1.0)
        scores[:, 1::2] = torch.rand(rows, length // 2, device=device)
    elif kind == "infinite":
        scores[:, ::3] = float("-inf")
        scores[:, 1::7] = float("inf")
    elif kind == "mostly -inf":
        scores[:, 9:] = float("-inf")
    return scores


KINDS = (
    *("random", "plateau", "equal", "rounded", "narrow", "rising", "hidden", "infinite"),
    "mostly -inf",
)


def check_top(
    kind: str,
    limits: list[int],
    k: int,
    device: torch.device,
    *,
    choose: Callable[..., None] | None = None,
) -> None:
    """Against a stable sort of (score, position). `choose` is another kernel to check."""
    torch.manual_seed(0)
    page_size = 16
    length = -(-max(limits) // 128) * 128
    scores = make_scores(kind, len(limits), length, device)
    own = torch.tensor(limits, dtype=torch.int32, device=device)
    behind = torch.arange(length, device=device) >= own[:, None]
    scores = scores.masked_fill_(behind, float("nan"))
    seqs = torch.arange(len(limits), dtype=torch.int32, device=device).flip(0)
    table = torch.randperm(len(limits) * length // page_size, device=device).int()
    table = table.view(len(limits), -1)
    positions, slots = (
        torch.full((len(limits), k), -7, dtype=torch.int32, device=device) for _ in range(2)
    )
    again = slots
    if choose is None:
        listed = torch.empty_like(scores, dtype=torch.int32)
        top_rows(scores, own, seqs, table, positions, slots, listed, page_size=page_size)
        again = torch.empty_like(slots)
        slots_of(positions, seqs, table, again, page_size=page_size)
    else:
        choose(scores, own, seqs, table, positions, slots, page_size=page_size)
    for row, limit in enumerate(limits):
        seen = scores[row, :limit].cpu()
        order = seen.sort(descending=True, stable=True).indices[:k]
        if limit > k:  # otherwise all are read, whatever their score
            order = order[seen[order] > float("-inf")]
        expected = order.sort().values.tolist()
        found = positions[row].tolist()
        assert found == expected + [-1] * (k - len(expected)), (kind, limit)
        pages = table[int(seqs[row])].tolist()
        places = [pages[n // page_size] * page_size + n % page_size for n in expected]
        assert slots[row].tolist() == again[row].tolist() == places + [-1] * (k - len(expected))


def check_attention(
    counts: list[int],
    k: int,
    sizes: latent_case.Sizes,
    device: torch.device,
    dtype: torch.dtype,
    *,
    tolerance: float,
    attend: Callable[..., torch.Tensor] | None = None,
    narrow: torch.dtype | None = None,
) -> None:
    """Each query has `counts` rows of the pool in its list; a list may have holes. `attend`
    (query, pool, slots, scale) is another kernel to check. `narrow` is the cache's type, if it has
    8 bits."""
    torch.manual_seed(0)
    heads, latent, rope, page_size = sizes
    pages = -(-2 * k // page_size) + 1
    pool = torch.full((pages, page_size, latent + rope), float("nan"), device=device, dtype=dtype)
    flat = pool.view(-1, latent + rope)
    slots = torch.full((len(counts), k), -1, dtype=torch.int32, device=device)
    for row, count in enumerate(counts):
        chosen = torch.randperm(len(flat), device=device)[:count]
        flat[chosen] = torch.randn(count, latent + rope, device=device).to(dtype)
        where = torch.arange(count) if row % 2 else torch.randperm(k)[:count].sort().values
        slots[row, where.to(device)] = chosen.int()
    if narrow is not None:
        pool, clean = latent_case.narrowed(pool, narrow)
        flat = clean.view(-1, latent + rope)
    query = torch.randn(len(counts), heads, latent + rope, device=device).to(dtype)
    scale = 0.7 * (latent + rope) ** -0.5
    out = torch.full((len(counts), heads, latent), float("nan"), device=device, dtype=dtype)
    if attend is None:
        row_attention(query, pool, slots, out, scale=scale)
    else:
        out = attend(query, pool, slots, scale)
    for row, count in enumerate(counts):
        own = slots[row][slots[row] >= 0].long()
        assert len(own) == count
        expected = row_attention_reference(
            query[row].double(), flat[own].double(), latent=latent, scale=scale
        )
        error = (out[row].double() - expected).norm() / expected.norm().clamp(min=1e-30)
        assert error < tolerance, f"error ratio {error:.1e}"
