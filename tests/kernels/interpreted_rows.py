"""Kernels of an index and of attention over single rows in the interpreter. Run by
test_kernels.py."""

from __future__ import annotations

import pytest
import torch

from cairn.kernels import index_scan as scan_module
from cairn.kernels import top_rows as top_module
from tests.kernels import latent_case, row_case
from tests.kernels.row_case import Sizes

CPU = torch.device("cpu")

SCANS = [
    ([1, 31, 32, 33, 300], [1, 1, 1, 1, 1], Sizes(3, 24, 16)),
    ([400], [1], Sizes(16, 64, 64)),
    ([70, 130], [1, 1], Sizes(5, 128, 128)),
    ([90, 70, 5, 1], [9, 1, 5, 1], Sizes(2, 16, 16)),
]


@pytest.mark.parametrize("described", [False, True])
@pytest.mark.parametrize("case", SCANS, ids=str)
def test_index_scan(
    case: tuple[list[int], list[int], Sizes], described: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Shares end within items, at their ends, and span several. Pages are smaller and larger than
    a tile of keys; those that are whole tiles are loaded through descriptors."""
    monkeypatch.setattr(scan_module, "_LEAST", 1)
    monkeypatch.setattr(scan_module, "can_describe", lambda *_: described)
    row_case.check_scan(*case, CPU, torch.float32, tolerance=1e-6, per_item=4)


@pytest.mark.parametrize("kind", row_case.KINDS)
def test_top_rows(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """With a sample, lists and blocks so small that every path is taken."""
    for name, size in (("_SAMPLE", 128), ("_BLOCK", 64), ("_FEW", 64), ("_MANY", 256)):
        monkeypatch.setattr(top_module, name, size)
    monkeypatch.setattr(top_module, "_PROGRAMS", 30)
    for k in (1, 17) if kind == "random" else (17,):
        row_case.check_top(kind, [1, k, k + 1, 130, 700], k, CPU)


def test_top_rows_of_one_long_row() -> None:
    row_case.check_top("random", [30_000], 300, CPU)


@pytest.mark.parametrize("sizes", [(4, 32, 16, 16), (20, 24, 8, 64)])
@pytest.mark.parametrize(
    ("counts", "k"), [([40], 40), ([1, 0, 17, 50], 50), ([5, 33, 70, 64, 2, 1, 70], 70)]
)
def test_row_attention(counts: list[int], k: int, sizes: tuple[int, int, int, int]) -> None:
    """In one part and in several; lists that are empty, short and full."""
    own = latent_case.Sizes(*sizes)
    row_case.check_attention(counts, k, own, CPU, torch.float32, tolerance=1e-5)
