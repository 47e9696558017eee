"""Made-up steps of every shape that matters, run before the engine is ready.

What kernels are compiled for depends on a few classes of sizes: how many sequences a step has, how
long the longest is, whether a sequence has one new row or several. Each class has a step here. The
steps are run twice: first without launching anything, to learn which kernels they need, so that
those can be compiled side by side; then, some of them, for real, which sets up libraries.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from cairn.engine.inputs import TABLE_COLUMNS, HostInputs
from cairn.engine.rows import StepRows

_CHUNK = 16  # rows of a chunk where only the rows before it matter
_PAST_OF_MANY = 16  # pages before the rows of steps with many sequences

Progress = Callable[[int, int], None]


@dataclass(frozen=True, slots=True)
class Rehearsal:
    """A step with these numbers of new rows, each with so many rows before them."""

    new: Sequence[int]
    past: Sequence[int]
    prompt: bool
    """The rows are a prompt's; else generated ones."""
    for_real: bool = False

    def inputs(self, groups: int, page_size: int, *, resident: bool) -> HostInputs:
        """All pages are the null page."""
        query_lens = np.array(self.new, dtype=np.int64)
        kv_lens = query_lens + np.array(self.past, dtype=np.int64)
        cu_query = np.concatenate(([0], np.cumsum(query_lens)))
        seq = np.repeat(np.arange(len(query_lens)), query_lens)
        cache_rows = np.arange(cu_query[-1]) + (kv_lens - cu_query[1:])[seq]
        zeros = np.zeros_like(cache_rows)
        rows = StepRows(
            token_ids=zeros,
            sources=zeros - 1,
            positions=cache_rows,
            lengths=cache_rows + 1,
            cache_rows=cache_rows,
            seq=seq,
            query_lens=query_lens,
            kv_lens=kv_lens,
            cu_query=cu_query,
            is_token=zeros == 0,
            last_token_rows=cu_query[1:] - 1,
        )
        pages = int(-(-kv_lens.max() // page_size))
        width = -(-pages // TABLE_COLUMNS) * TABLE_COLUMNS
        tables = np.zeros((groups, len(query_lens), width), dtype=np.int32)
        prompt_rows = kv_lens if self.prompt else np.zeros_like(kv_lens)
        none = np.zeros(0, dtype=np.int64)
        return HostInputs(rows, page_size, tables, tables, prompt_rows, none, resident)


def rehearsals(
    *, page_size: int, max_pages: int, chunk: int, max_seqs: int, dense_below: int
) -> Iterator[Rehearsal]:
    """`dense_below`: generated rows at this position and behind it are not dense."""
    longest = max_pages * page_size
    pasts = [0]
    pages = 1
    while pages * page_size + _CHUNK <= longest:
        pasts.append(pages * page_size)
        pages *= 2
    pasts.append(max(0, longest - _CHUNK))
    for past in pasts:
        yield Rehearsal([_CHUNK], [past], prompt=True)
        yield Rehearsal([_CHUNK], [past], prompt=False)
        yield Rehearsal([1], [past], prompt=False)
        yield Rehearsal([1, _CHUNK], [past, past], prompt=False)
        yield Rehearsal([1, 1], [past, past], prompt=True)
    beyond = min(longest - 1, dense_below + _PAST_OF_MANY * page_size)
    seqs = 2
    while seqs < max_seqs:
        yield Rehearsal([1] * seqs, [beyond] * seqs, prompt=False)
        yield Rehearsal([1] * seqs + [_CHUNK], [beyond] * seqs + [0], prompt=False)
        seqs *= 2
    yield Rehearsal([1] * max_seqs, [beyond] * max_seqs, prompt=False)
    # A page that is complete, and numbers of rows for which kernels other than attention differ.
    yield Rehearsal([1], [page_size - 1], prompt=False)
    for rows in (2, 8, 9):
        yield Rehearsal([rows], [0], prompt=True)
    for rows in (1024, 2048, 4096, chunk):
        if rows <= min(chunk, longest):
            yield Rehearsal([rows], [0], prompt=True, for_real=True)
            yield Rehearsal([rows], [min(longest - rows, beyond)], prompt=False, for_real=True)
