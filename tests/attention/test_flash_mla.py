"""What FlashMLA is given; tests/gpu/test_backends.py and tests/gpu/test_rows.py run it."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from cairn.attention.flash_mla_backend import by_row
from cairn.attention.flash_mla_rows import parts_of
from cairn.engine.inputs import StepInputs


def test_each_row_of_a_chunk_reads_up_to_itself() -> None:
    new, total = np.array([1, 3, 2]), np.array([9, 3, 70])
    table = np.array([[1, 0], [2, 0], [3, 4]])
    batch = StepInputs.made_up(64, new, total, [table]).send(torch.device("cpu"), True).batch
    lens, (tables,) = by_row(batch)
    assert lens.tolist() == [9, 1, 2, 3, 69, 70] and lens.dtype == torch.int32
    assert tables.tolist() == table[[0, 1, 1, 1, 2, 2]].tolist()


@pytest.mark.parametrize(
    ("rows", "topk", "parts"),
    [(1, 2048, 16), (4, 2048, 16), (16, 2048, 4), (33, 2048, 2), (34, 2048, 1), (1, 384, 1)],
)
def test_lists_are_cut_while_processors_are_idle(rows: int, topk: int, parts: int) -> None:
    """Into whole tiles of 128 rows. 128 heads on 132 processors are 66 queries at once."""
    assert parts_of(rows, topk, 66) == parts
