"""From SGLang's batch to Cairn's: the rows of a step, and the page tables they read.

SGLang counts tokens. Where a model ends each page with a landmark row, that row rides in the step
of the page's last token. SGLang never sees it, its KV is in the page behind the tokens, and page
ids are SGLang's.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from cairn.attention.batch import AttentionBatch, GroupTables, to_device
from cairn.memory.geometry import PageGeometry
from cairn.memory.pages import NULL_PAGE


@dataclass(frozen=True, slots=True)
class Step:
    batch: AttentionBatch
    positions: torch.Tensor  # [rows] for rope
    token_rows: torch.Tensor | None  # [tokens] row of each; None where every row is a token

    def token_ids(self, given: torch.Tensor, landmark_id: int) -> torch.Tensor:
        """[tokens] -> [rows]"""
        if self.token_rows is None:
            return given
        ids = given.new_full((len(self.positions),), landmark_id)
        ids[self.token_rows] = given
        return ids

    def of_tokens(self, rows: torch.Tensor) -> torch.Tensor:
        """[rows, ...] -> [tokens, ...]"""
        return rows if self.token_rows is None else rows[self.token_rows]


class PageLives:
    """Counts how often each page was allocated, so that a landmark of an earlier life is not used.

    SGLang does not say when it recycles a page. But the first row of a page is written once per
    life, through the backend, and in stream order before anything reads the page. That write raises
    the count, and landmarks made before it no longer match.
    """

    def __init__(self, num_pages: int, device: torch.device) -> None:
        """For page ids 0..num_pages, 0 being the page that padding is written to."""
        self.counts = torch.zeros(num_pages + 1, dtype=torch.int32, device=device)

    def begin(self, pages: torch.Tensor, offsets: torch.Tensor) -> None:
        """Rows [n] are about to be written to `pages` at `offsets`."""
        self.counts.index_add_(0, pages, (offsets == 0).to(torch.int32))

    def of(self, pages: torch.Tensor) -> torch.Tensor:
        return self.counts[pages.long()]


def read_step(
    forward_batch: Any,
    req_to_token: torch.Tensor,  # [slots, tokens] where SGLang put each token
    geometry: PageGeometry,
    lives: PageLives,
    num_groups: int,
) -> Step:
    """An unrecorded step, prefill, decode or both. Pages that it begins start a new life."""
    device = req_to_token.device
    size, tokens_per_page = geometry.page_size, geometry.tokens_per_page
    seq_lens = forward_batch.seq_lens_cpu.numpy().astype(np.int64)
    decodes = forward_batch.forward_mode.is_decode()
    if decodes:
        new_tokens = np.ones_like(seq_lens)
    else:
        new_tokens = np.asarray(forward_batch.extend_seq_lens_cpu, dtype=np.int64)
    extra = size - tokens_per_page  # landmark rows of a page
    kv_lens = seq_lens + seq_lens // tokens_per_page * extra
    past = seq_lens - new_tokens
    past_rows = past + past // tokens_per_page * extra
    query_lens = kv_lens - past_rows
    cu_query = np.concatenate(([0], np.cumsum(query_lens)))
    seq = np.repeat(np.arange(len(seq_lens)), query_lens)
    cache_rows = np.arange(cu_query[-1]) + (past_rows - cu_query[:-1])[seq]
    offsets = cache_rows % size
    is_token = offsets < tokens_per_page
    # A landmark row lies in the page of the token before it, which is part of the same step.
    source = to_device(np.cumsum(is_token) - 1, device)
    row_pages = forward_batch.out_cache_loc[source].long() // tokens_per_page
    row_offsets = to_device(offsets, device)
    lives.begin(row_pages, row_offsets)

    # What a request generated and lost to a retraction is prompt when it is computed again.
    generated = decodes | (forward_batch.forward_mode.is_mixed() & (new_tokens == 1))
    prompt_rows = np.where(generated, 0, kv_lens)
    width = -(-int(kv_lens.max()) // size)
    slots = req_to_token[
        forward_batch.req_pool_indices, : width * tokens_per_page : tokens_per_page
    ]
    held = np.arange(width) < -(-kv_lens[:, None] // size)  # [seqs, pages]
    pages = (slots // tokens_per_page).masked_fill(~to_device(held, device), NULL_PAGE)
    pages = pages.to(torch.int32)
    generations = lives.of(pages)
    tables = GroupTables(
        host_pages=pages.cpu().numpy(),
        host_generations=generations.cpu().numpy(),
        page_table=pages,
        row_pages=row_pages,
        generations=generations,
    )
    batch = AttentionBatch(
        page_size=size,
        query_lens=query_lens,
        kv_lens=kv_lens,
        cu_query=cu_query,
        groups=(tables,) * num_groups,
        row_offsets=row_offsets,
        device=device,
        prompt_rows=prompt_rows,
        traced_rows=np.zeros(0, dtype=np.int64),
        device_kv_lens=to_device(kv_lens.astype(np.int32), device),
        device_cu_query=to_device(cu_query.astype(np.int32), device),
        device_prompt_rows=to_device(prompt_rows.astype(np.int32), device),
    )
    return Step(
        batch=batch,
        positions=to_device(cache_rows - cache_rows // size * extra, device),
        token_rows=None if is_token.all() else to_device(np.flatnonzero(is_token), device),
    )
