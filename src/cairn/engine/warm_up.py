"""Synthetic steps of every kind, run before the engine is ready.

Kernels are compiled for constants that depend on the size of a step. Each kernel reports the sizes
at which its constants change, and there is a step here for each such size. First all steps run
without launching anything, which collects the kernels they need. These are compiled in parallel.
Then some of the steps run for real, which sets up libraries.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from cairn.attention.backend import AttentionBackend, SparseBackend
from cairn.engine.inputs import StepInputs
from cairn.kernels.packing import table_width
from cairn.models import layers

_CHUNK = 40  # rows of a chunk in steps where only the past matters


@dataclass(frozen=True, slots=True)
class Rehearsal:
    """A synthetic step."""

    new: Sequence[int]
    """New rows of each sequence."""
    past: Sequence[int]
    """Rows of each sequence that are already in the cache."""
    prompt: bool
    """The rows belong to a prompt; otherwise they are generated."""
    for_real: bool = False
    """Also run it with kernels launched."""

    def inputs(self, groups: int, page_size: int, *, resident: bool) -> StepInputs:
        """The step's inputs; all pages are the null page."""
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
    """Step sizes at which kernels switch to another compiled form."""

    rows: Sequence[int]
    seqs: Sequence[int]
    pages: Sequence[int]
    """Pages of the longest sequence."""


def rungs_of(backend: AttentionBackend, max_seqs: int, max_pages: int) -> Rungs:
    """The rungs of all kernels, including the backend's own."""
    from cairn.kernels import experts, few_rows, fp8, gemv, packed, paged_decode, rope_kv

    rows = {*gemv.row_rungs(), *rope_kv.row_rungs(), *experts.row_rungs()}
    rows |= {*fp8.row_rungs(), *packed.row_rungs(), *layers.row_rungs()}
    rows |= {*few_rows.row_rungs()}
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
    rungs: Rungs,
    *,
    page_size: int,
    max_pages: int,
    chunk: int,
    dense_below: int,
    overflowing: int,
) -> Iterator[Rehearsal]:
    """The steps to rehearse. Generated rows at position `dense_below` or later are not dense.
    `overflowing` of the longest sequences are too many for widened pages; 0 if there are none."""
    longest = max_pages * page_size
    # The position of a row that is not dense and completes a page.
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
        if 1 < count <= min(longest, max(chunk, *rungs.seqs)):
            yield Rehearsal([count], [0], prompt=True)
    if 0 < overflowing <= max(rungs.seqs):
        yield Rehearsal([2] * overflowing, [longest - 2] * overflowing, prompt=True)
    most = min(chunk, longest)
    yield Rehearsal([most], [longest - most], prompt=True)
    for rows in {min(rows, most) for rows in (1024, 2048, 4096, chunk)}:
        yield Rehearsal([rows], [0], prompt=True, for_real=True)
        yield Rehearsal([rows], [min(longest - rows, beyond)], prompt=False, for_real=True)
