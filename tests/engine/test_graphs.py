"""Steps that are padded to recorded sizes."""

from __future__ import annotations

from array import array

import numpy as np
import pytest

from cairn.engine.graphs import StepSize, mixed_sizes
from cairn.engine.inputs import StepInputs
from cairn.engine.plan import Advance, StepPlan
from cairn.engine.rows import build_rows
from cairn.memory.geometry import PageGeometry

PAGE = 16


def inputs(*chunks: tuple[int, int]) -> StepInputs:
    """Sequences with so many rows computed, and so many to compute."""
    advances = [
        Advance(str(s), s, past, past + new, array("q", [3] * new), past + new, samples=True)
        for s, (past, new) in enumerate(chunks)
    ]
    rows = build_rows(StepPlan(tuple(advances)), PageGeometry(PAGE, PAGE))
    tables = np.arange(1, 1 + len(chunks) * 8, dtype=np.int32).reshape(1, len(chunks), 8)
    return StepInputs.of(rows, PAGE, tables, tables, rows.kv_lens.copy())


@pytest.mark.parametrize(
    "size", [StepSize(48, 4), StepSize(42, 3), StepSize(43, 4), StepSize(9, 9)]
)
def test_a_mixed_step_has_its_padding_in_one_sequence(size: StepSize) -> None:
    """Also where as many rows are added as sequences."""
    chunks = ((5, 1), (0, 41)) if size.rows > 9 else ((5, 1), (0, 7))
    own = inputs(*chunks)
    padded = own.padded(size.rows, size.seqs, mixed=True)
    rows, more = padded.rows, size.rows - len(own.rows.token_ids)
    assert rows.query_lens.tolist() == [chunk[1] for chunk in chunks] + [more] + [0] * (
        size.seqs - 3
    )
    assert rows.kv_lens[2:].tolist() == [more] + [0] * (size.seqs - 3)
    assert rows.cu_query[-1] == len(rows.token_ids) == size.rows
    tables = padded.batch.groups[0].host_pages
    assert (tables[2:] == 0).all() and (tables[:2] == own.batch.groups[0].host_pages).all()
    assert padded.batch.kv_lens is rows.kv_lens and len(padded.batch.prompt_rows) == size.seqs
    assert (rows.seq[len(own.rows.seq) :] == 2).all()
    assert (rows.sources[len(own.rows.seq) :] == -1).all()


def test_a_decode_step_has_a_row_in_every_sequence() -> None:
    padded = inputs((5, 1), (9, 1)).padded(6, 6, mixed=False)
    assert padded.rows.query_lens.tolist() == [1] * 6
    assert padded.rows.kv_lens.tolist() == [6, 10, 1, 1, 1, 1]
    assert padded.rows.seq.tolist() == list(range(6))


@pytest.mark.parametrize("seqs", [1, 7, 8, 9, 63, 255, 256])
def test_mixed_sizes_leave_room_for_padding(seqs: int) -> None:
    sizes = mixed_sizes(4096, seqs)
    assert max(size.seqs for size in sizes) == seqs + 1
    assert max(size.rows for size in sizes) == 4096
    assert len(set(sizes)) == len(sizes)
