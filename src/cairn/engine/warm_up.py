"""Made-up steps of every kind, run before the engine is ready.

Kernels are compiled for constants that depend on the sizes of a step, and tell at which sizes these
constants change. There is a step here for each such size. All steps run first without launching
anything, which tells the kernels they need; those are then compiled in parallel. Then some of the
steps run for real, which sets up libraries.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from cairn.attention.backend import AttentionBackend, SparseBackend
from cairn.engine.inputs import StepInputs
from cairn.kernels.packing import table_width

_CHUNK = 40  # rows of a chunk where only the rows before it matter


@dataclass(frozen=True, slots=True)
class Rehearsal:
    """A made-up step."""

    new: Sequence[int]
    """New rows of each sequence."""
    past: Sequence[int]
    """Rows of each sequence that are in the cache already."""
    prompt: bool
    """The rows are a prompt's; else generated ones."""
    for_real: bool = False
    """Also run it with its kernels launched."""

    def inputs(self, groups: int, page_size: int, *, resident: bool) -> StepInputs:
        """All pages are the null page."""
        total = np.add(self.new, self.past)
        tables = np.zeros((groups, len(total), table_width(-(-int(total.max()) // page_size))))
        return StepInputs.made_up(
            page_size,
            self.new,
            total,
            list(tables),
            prompt_rows=total if self.prompt else np.zeros_like(total),
            resident=resident,
            generation=0,  # that of the null page, so that it can be selected
        )


@dataclass(frozen=True, slots=True)
class Rungs:
    """Sizes of a step from which on kernels need another compiled form."""

    rows: Sequence[int]
    seqs: Sequence[int]
    pages: Sequence[int]
    """Of its longest sequence."""


def rungs_of(backend: AttentionBackend, max_seqs: int, max_pages: int) -> Rungs:
    """Those of all kernels, the backend's own included."""
    from cairn.kernels import gemv, paged_decode, rope_kv

    rows = {*gemv.row_rungs(), *rope_kv.row_rungs()}
    seqs, pages = {*paged_decode.seq_rungs(), max_seqs}, {1, max_pages}
    own = backend.rungs(max_seqs, max_pages) if isinstance(backend, SparseBackend) else None
    if own is not None:
        seqs.update(own[0])
        pages.update(own[1])
    return Rungs(
        sorted(rows),
        sorted(count for count in seqs if count <= max_seqs),
        sorted(count for count in pages if count <= max_pages),
    )


def rehearsals(
    rungs: Rungs, *, page_size: int, max_pages: int, chunk: int, dense_below: int
) -> Iterator[Rehearsal]:
    """`dense_below`: generated rows at this position and behind it are not dense."""
    longest = max_pages * page_size
    # A row that is not dense, and one that completes a page.
    beyond = min(longest - 1, -(-dense_below // page_size) * page_size + page_size - 1)
    some = min(_CHUNK, longest)
    for pages in rungs.pages:
        past = max(0, min((pages - 1) * page_size, longest - some))
        yield Rehearsal([some], [past], prompt=True)
        yield Rehearsal([some], [past], prompt=False)
    for count, past in itertools.product(rungs.seqs, sorted({0, beyond})):
        yield Rehearsal([1] * count, [past] * count, prompt=False)
        if count > 1:
            for prompt in (False, True):
                new = [1] * (count - 1) + [some]
                yield Rehearsal(new, [min(past, longest - some)] * count, prompt=prompt)
    for count in rungs.rows:
        if 1 < count <= longest:
            yield Rehearsal([count], [0], prompt=True)
    most = min(chunk, longest)
    yield Rehearsal([most], [longest - most], prompt=True)
    for rows in {min(rows, most) for rows in (1024, 2048, 4096, chunk)}:
        yield Rehearsal([rows], [0], prompt=True, for_real=True)
        yield Rehearsal([rows], [min(longest - rows, beyond)], prompt=False, for_real=True)
