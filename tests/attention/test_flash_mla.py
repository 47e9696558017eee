"""What FlashMLA is given; tests/gpu/test_backends.py and tests/gpu/test_rows.py run it."""

from __future__ import annotations

import numpy as np
import torch

from cairn.attention.flash_mla_backend import by_row
from cairn.engine.inputs import StepInputs


def test_each_row_of_a_chunk_reads_up_to_itself() -> None:
    new, total = np.array([1, 3, 2]), np.array([9, 3, 70])
    table = np.array([[1, 0], [2, 0], [3, 4]])
    batch = StepInputs.made_up(64, new, total, [table]).send(torch.device("cpu"), True).batch
    lens, (tables,) = by_row(batch)
    assert lens.tolist() == [9, 1, 2, 3, 69, 70] and lens.dtype == torch.int32
    assert tables.tolist() == table[[0, 1, 1, 1, 2, 2]].tolist()
