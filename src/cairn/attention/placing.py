"""Where the pages of sequences are read with a host tier: in frames, or in the stage.

A sequence whose pages are all in frames is read there. The pages of other sequences are gathered in
the stage (`memory/prompt_stage.py`), in runs of sequences that fit into it together.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from cairn.attention.batch import AttentionBatch
from cairn.memory.hisparse import HiSparseCoordinator
from cairn.memory.prompt_stage import StagedPages


class Placed(NamedTuple):
    """Sequences that are read at once."""

    seqs: np.ndarray  # [n] int64
    table: np.ndarray
    """[all sequences, pages] int32: where each page of these sequences is, in the pool or the
    stage."""
    staged: StagedPages | None  # what to stage; None if all pages are in frames


def place(batch: AttentionBatch, chosen: np.ndarray, tier: HiSparseCoordinator) -> list[Placed]:
    """Split the sequences `chosen` [seqs] bool by where they are read, those in frames first."""
    assert tier.stage is not None
    ids = batch.groups[tier.page_group].host_pages
    counts = -(-batch.kv_lens // batch.page_size)
    held = np.arange(ids.shape[1]) < counts[:, None]
    frames = np.where(held, tier.frames[ids], 0)
    away = chosen & (held & (frames == 0)).any(1)
    resident = np.flatnonzero(chosen & ~away)
    found = [Placed(resident, frames, None)] if len(resident) else []
    together: list[np.ndarray] = []
    if away.any():
        together = fitting_runs(np.flatnonzero(away), counts[away], tier.stage.room)
    for seqs in together:
        which = held & np.isin(np.arange(batch.num_seqs), seqs)[:, None]
        pages, places = tier.stage.arrange(ids[which])
        table = np.zeros_like(ids)
        table[which] = places
        found.append(Placed(seqs, table, pages))
    return found


def fitting_runs(seqs: np.ndarray, pages: np.ndarray, room: int) -> list[np.ndarray]:
    """Split sequences into runs of at most `room` pages each. `pages` [seqs] is the number of pages
    of each sequence, at most `room`."""
    runs: list[list[int]] = [[]]
    left = room
    for seq, count in zip(seqs, pages, strict=True):
        if count > left and runs[-1]:
            runs.append([])
            left = room
        runs[-1].append(int(seq))
        left -= int(count)
    return [np.array(run, dtype=np.int64) for run in runs]
