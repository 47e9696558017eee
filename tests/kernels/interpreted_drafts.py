"""Kernels for drafts in Triton's interpreter, against their references. Run by test_kernels.py."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from cairn.engine.sampler import _seeds
from cairn.kernels.draft_rows import keep_newest, move_rows
from cairn.kernels.interface import RowInputs
from cairn.kernels.kept_pages import kept_tables
from cairn.kernels.references import (
    keep_newest_reference,
    kept_tables_reference,
    move_rows_reference,
)


@pytest.mark.parametrize("groups", [1, 2])
def test_draft_rows_move_on_by_what_came_true(groups: int) -> None:
    """Some of the drafts, the first of them wrong, none to check; and rows without room."""
    rng = np.random.default_rng(groups)
    count, padded, size, most = 150, 152, 16, 3
    results = []
    checked = torch.from_numpy(rng.integers(0, most + 1, count).astype(np.int32))
    first = torch.cumsum(checked + 1, 0).int() - checked - 1
    places = torch.arange(count, dtype=torch.int32) * (most + 1)
    tokens = torch.from_numpy(rng.integers(0, 2, int((checked + 1).sum())))
    newest = torch.from_numpy(rng.integers(0, 2, count * (most + 1)))
    seeds = torch.from_numpy(rng.integers(0, 2**63, count))
    positions = torch.from_numpy(rng.integers(0, 60, padded).astype(np.int32))
    room = positions[:count] + torch.from_numpy(rng.integers(1, 9, count).astype(np.int32))
    tables = torch.arange(groups * padded * 8, dtype=torch.int32).view(groups, padded, 8)
    for keep, move in (
        (keep_newest, move_rows),
        (keep_newest_reference, move_rows_reference),
    ):
        right, kept = torch.zeros_like(checked), newest.clone()
        keep(tokens, kept, first, checked, places, right, most)
        row = torch.arange(padded, dtype=torch.int32)
        pages = torch.full((groups, padded), -1, dtype=torch.int32)
        rows = RowInputs(
            seeds=torch.zeros(padded, dtype=torch.int64),
            places=row + 1,
            sources=row.clone(),
            positions=positions.clone(),
            lengths=positions + 1,
            offsets=row.clone(),
            pages=tuple(pages),
            kv_lens=positions + 1,
            tables=tables,
        )
        move(rows, seeds, room, right, 1, size)
        move(rows, seeds, room, None, 1, size)
        results.append((right, kept, pages, *rows[:6], rows.kv_lens))
    for own, expected in zip(*results, strict=True):
        assert torch.equal(own, expected)
    assert 0 < results[0][0].sum() < checked.sum() and (results[0][2] == 0).any()
    mixed = _seeds(seeds.numpy().astype(np.uint64), rows.positions[:count].numpy() + 1)
    assert rows.seeds[:count].tolist() == mixed.tolist()


def test_tables_of_kept_pages() -> None:
    """Fewer selected pages than there is room for, and windows up to the end of the table."""
    layers, seqs, kv_heads, topk, width, pages = 2, 3, 3, 5, 16, 12
    kept = torch.randint(-1, width, (layers, seqs + 2, kv_heads, topk), dtype=torch.int32)
    kept_from = torch.tensor([0, 4, 13, 99, 99], dtype=torch.int32)
    table = torch.randperm(seqs * width).int().view(seqs, width)
    lens = torch.tensor([30, 90, 250], dtype=torch.int32)
    given = (kept, kept_from, table, lens)
    found = kept_tables(*given, pages=pages, page_size=16)
    expected = kept_tables_reference(*given, pages=pages, page_size=16)
    for own, other in zip(found, expected, strict=True):
        assert torch.equal(own, other)
