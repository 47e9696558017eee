"""Clears new pages, because unwritten rows may hold NaN: a masked row has weight zero, but zero
times NaN is NaN."""

from __future__ import annotations

import numpy as np

from cairn.attention.batch import AttentionBatch, to_device
from cairn.memory.kv_pool import KVPool


def clear_begun_pages(pool: KVPool, batch: AttentionBatch) -> None:
    """Zero the last page of each sequence if this step begins that page and does not fill it."""
    size = batch.page_size
    last_page = (batch.kv_lens - 1) // size
    begun = last_page * size >= batch.kv_lens - batch.query_lens
    seqs = np.flatnonzero(begun & (batch.kv_lens % size != 0))
    if len(seqs):
        for g, tables in enumerate(batch.groups):
            pages = tables.host_pages[seqs, last_page[seqs]].astype(np.int64)
            pool.clear(g, to_device(pages, batch.device))
