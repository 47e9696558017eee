"""Steps that are padded to recorded sizes."""

from __future__ import annotations

from array import array

import numpy as np
import pytest
import torch

from cairn.attention.backend import Graph
from cairn.attention.hsa.metadata import SparseGroups, completed_on_device, completed_pages
from cairn.engine.graphs import StepSize, mixed_sizes, recorded_sizes
from cairn.engine.inputs import StepInputs
from cairn.engine.plan import Advance, StepPlan
from cairn.memory.geometry import PageGeometry

PAGE = 16


def inputs(*chunks: tuple[int, int]) -> StepInputs:
    """Sequences with so many rows computed, and so many to compute."""
    advances = [
        Advance(str(s), s, past, past + new, array("q", [3] * new), past + new, samples=True)
        for s, (past, new) in enumerate(chunks)
    ]
    tables = np.arange(1, 1 + len(chunks) * 8, dtype=np.int32).reshape(1, len(chunks), 8)
    return StepInputs.of(StepPlan(tuple(advances)), PageGeometry(PAGE, PAGE), tables, tables)


@pytest.mark.parametrize(
    "size", [StepSize(48, 4), StepSize(42, 3), StepSize(43, 4), StepSize(9, 9)]
)
def test_a_mixed_step_has_its_padding_in_one_sequence(size: StepSize) -> None:
    """Also where as many rows are added as sequences."""
    chunks = ((5, 1), (0, 41)) if size.rows > 9 else ((5, 1), (0, 7))
    own = inputs(*chunks)
    arrays = own.padded_arrays(*size, mixed=True)
    _, sources, _, _, _, pages, kv_lens, cu_query, prompt_rows = arrays
    begin, more = own.batch.num_rows, size.rows - own.batch.num_rows
    assert np.diff(cu_query)[2:].tolist() == [more] + [0] * (size.seqs - 3)
    assert kv_lens[2:].tolist() == prompt_rows[2:].tolist() == [more] + [0] * (size.seqs - 3)
    for before, after in zip(own.arrays(), arrays, strict=True):
        assert (after[: len(before)] == before).all()
    assert cu_query[-1] == len(sources) == size.rows
    assert (sources[begin:] == -1).all() and (pages[begin:] == 0).all()
    tables = own.pack_tables(True, size.seqs)
    assert tables.shape == (2, size.seqs, 8)
    assert (tables[:, 2:] == 0).all() and (tables[:, :2] == own.batch.groups[0].host_pages).all()


def test_a_decode_step_has_a_row_in_every_sequence() -> None:
    arrays = inputs((5, 1), (9, 1)).padded_arrays(6, 6, mixed=False)
    *_, kv_lens, cu_query, _ = arrays
    assert cu_query.tolist() == list(range(7))
    assert kv_lens.tolist() == [6, 10, 1, 1, 1, 1]


@pytest.mark.parametrize("most", [10, 5000, 8192, 8322])
@pytest.mark.parametrize("seqs", [1, 7, 8, 9, 63, 255, 256])
def test_mixed_sizes_leave_room_for_padding(seqs: int, most: int) -> None:
    """And have the longest chunks, and some numbers of tokens with their landmark rows."""
    for geometry in (PageGeometry(64, 64), PageGeometry(64, 63)):
        sizes = mixed_sizes(most, seqs, geometry)
        assert max(size.seqs for size in sizes) == seqs + 1
        assert max(sizes) == StepSize(most, seqs + 1)
        assert len(set(sizes)) == len(sizes)
        assert most < 5000 or geometry.rows(4096) in {size.rows for size in sizes}


def test_mixed_steps_that_select_may_have_fewer_rows() -> None:
    kinds = [Graph("dense", True), Graph("sparse", True), Graph("sparse", False)]
    geometry = PageGeometry(64, 64)
    sizes = recorded_sizes(
        kinds, geometry, decode_rows=600, mixed_rows=4096, seqs=600, selecting_rows=512
    )
    largest = [max(sizes[kind]) for kind in kinds]
    assert largest == [StepSize(4096, 601), StepSize(512, 601), StepSize(600, 600)]
    assert set(sizes[kinds[1]]) < set(sizes[kinds[0]])
    sizes = recorded_sizes(kinds, geometry, decode_rows=8, mixed_rows=0, seqs=8, selecting_rows=512)
    assert [bool(sizes[kind]) for kind in kinds] == [False, False, True]


@pytest.mark.parametrize("seed", range(4))
def test_the_device_lists_what_the_host_lists(seed: int) -> None:
    """Blocks of rows and completed pages, and nothing but surplus beside them."""
    pytest.importorskip("triton")
    from cairn.kernels.paged_extend import ExtendBlocks

    draw = np.random.default_rng(seed)
    new, past = draw.integers(1, 60, 5), draw.integers(0, 40, 5)
    tables = [1 + draw.permutation(8 * 5).reshape(5, 8)]
    host = StepInputs.made_up(PAGE, new, new + past, tables).send(torch.device("cpu"), True)
    batch, groups = host.batch, SparseGroups(0, 0)
    found = completed_on_device(batch, groups)
    seq, place, rows = completed_pages(batch, 1)
    real = found.pages > 0
    assert found.pages[real].tolist() == tables[0][seq, place].tolist()
    assert found.last_rows[real].tolist() == rows.tolist()
    assert not found.kv_pages[~real].any() and not found.last_rows[~real].any()
    listed = ExtendBlocks.of(new, np.arange(5), batch.device, 16)
    counted = ExtendBlocks.on_device(torch.from_numpy(new), int(new.sum()), 16)
    there = counted.begin >= 0
    assert counted.begin[there].tolist() == listed.begin.tolist()
    assert counted.seq[there].tolist() == listed.seq.tolist()
