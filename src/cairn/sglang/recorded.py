"""Decode steps that SGLang records as CUDA graphs.

Everything that changes from step to step is computed on the device, from tensors whose addresses
SGLang keeps: page tables from its own, lengths, the lives of pages. A model with landmark rows gets
two rows for each sequence, of which the second is a landmark where a page is complete and is
written to the null page where none is.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from cairn.attention.batch import AttentionBatch, GroupTables
from cairn.memory.geometry import PageGeometry
from cairn.memory.pages import NULL_PAGE
from cairn.sglang.step import PageLives, Step


class RecordedSteps:
    def __init__(
        self,
        geometry: PageGeometry,
        lives: PageLives,
        num_groups: int,
        *,
        max_seqs: int,
        max_pages: int,
    ) -> None:
        self._geometry = geometry
        self._lives = lives
        self._num_groups = num_groups
        self._device = device = lives.counts.device
        self._per_seq = 2 if geometry.has_landmark_row else 1
        rows = max_seqs * self._per_seq

        def empty(*shape: int, dtype: torch.dtype = torch.int64) -> torch.Tensor:
            return torch.zeros(shape, dtype=dtype, device=device)

        # Token rows of all sequences come first, their landmark rows behind them.
        self._tables = empty(rows, max_pages, dtype=torch.int32)
        self._generations = empty(rows, max_pages, dtype=torch.int32)
        self._kv_lens = empty(rows, dtype=torch.int32)
        self._row_pages, self._offsets, self._positions = empty(rows), empty(rows), empty(rows)
        self._cu_query = torch.arange(rows + 1, dtype=torch.int32, device=device)
        self._places = torch.arange(max_pages, device=device)
        self._seqs = torch.arange(max_seqs, device=device)
        self._no_prompt = empty(rows, dtype=torch.int32)

    def step(self, num_seqs: int) -> Step:
        """A decode step of `num_seqs` sequences. Its host arrays are made up: backends that can be
        recorded do not read them."""
        rows = num_seqs * self._per_seq
        ones = np.ones(rows, dtype=np.int64)
        nowhere = np.zeros((rows, 1), dtype=np.int32)
        tables = GroupTables(
            host_pages=nowhere,
            host_generations=nowhere,
            page_table=self._tables[:rows],
            row_pages=self._row_pages[:rows],
            generations=self._generations[:rows],
        )
        batch = AttentionBatch(
            page_size=self._geometry.page_size,
            query_lens=ones,
            kv_lens=ones,
            cu_query=np.arange(rows + 1),
            groups=(tables,) * self._num_groups,
            row_offsets=self._offsets[:rows],
            device=self._device,
            prompt_rows=ones,
            traced_rows=np.zeros(0, dtype=np.int64),
            device_kv_lens=self._kv_lens[:rows],
            device_cu_query=self._cu_query[: rows + 1],
            device_prompt_rows=self._no_prompt[:rows],
            recorded="sparse",
        )
        token_rows = self._seqs[:num_seqs] if self._per_seq == 2 else None
        return Step(batch, self._positions[:rows], token_rows)

    def refresh(self, forward_batch: Any, req_to_token: torch.Tensor) -> None:
        size, tokens_per_page = self._geometry.page_size, self._geometry.tokens_per_page
        length = forward_batch.seq_lens.long()  # tokens, the new one included
        seqs = len(length)
        newest = length - 1
        rows = newest + newest // tokens_per_page * (size - tokens_per_page)  # in the cache
        slots = req_to_token[:, ::tokens_per_page][forward_batch.req_pool_indices]
        pages = (slots[:, : len(self._places)] // tokens_per_page).to(torch.int32)
        held = self._places[: pages.shape[1]] <= (rows // size)[:, None]
        pages.masked_fill_(~held, NULL_PAGE)
        own = forward_batch.out_cache_loc.long() // tokens_per_page
        self._put(0, pages, rows + 1, own, rows % size, newest)
        if self._per_seq == 2:
            complete = length % tokens_per_page == 0
            self._put(
                seqs,
                pages.masked_fill(~complete[:, None], NULL_PAGE),
                torch.where(complete, rows + 2, 1),
                torch.where(complete, own, NULL_PAGE),
                torch.where(complete, size - 1, 0),
                length,
            )
        count = seqs * self._per_seq
        self._lives.begin(self._row_pages[:count], self._offsets[:count])
        self._generations[:count] = self._lives.of(self._tables[:count])

    def _put(
        self,
        first: int,
        pages: torch.Tensor,  # [seqs, pages]
        kv_lens: torch.Tensor,  # [seqs] each
        row_pages: torch.Tensor,
        offsets: torch.Tensor,
        positions: torch.Tensor,
    ) -> None:
        some = slice(first, first + len(pages))
        self._tables[some, : pages.shape[1]] = pages
        self._kv_lens[some] = kv_lens.to(torch.int32)
        self._row_pages[some] = row_pages
        self._offsets[some] = offsets
        self._positions[some] = positions
