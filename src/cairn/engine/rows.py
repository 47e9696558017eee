"""Turns a plan into the flat rows that the model computes, one request after the other."""

from __future__ import annotations

from array import array
from dataclasses import dataclass

import numpy as np

from cairn.engine.plan import StepPlan
from cairn.memory.geometry import PageGeometry


@dataclass(frozen=True, slots=True)
class StepRows:
    """Host arrays over the rows of a step; sequence s is plan.advances[s]."""

    token_ids: np.ndarray  # [rows]
    sources: np.ndarray  # [rows] slot whose newest token to use, -1 to use token_ids
    positions: np.ndarray  # [rows] for rope; a landmark row has the next token's position
    lengths: np.ndarray  # [rows] sequence length that rope assumes, see Rotary
    cache_rows: np.ndarray  # [rows] index in the sequence's cache
    seq: np.ndarray  # [rows] sequence of each row
    query_lens: np.ndarray  # [seqs] rows of each sequence
    kv_lens: np.ndarray  # [seqs] rows in the cache after the step
    cu_query: np.ndarray  # [seqs + 1]
    is_token: np.ndarray  # [rows] False for landmark rows
    last_token_rows: np.ndarray  # [seqs] row of each sequence's last token

    @property
    def only_decodes(self) -> bool:
        """Every sequence adds one token, and possibly a landmark row after it."""
        seqs = len(self.kv_lens)
        return bool(self.is_token.sum() == seqs and self.is_token[self.cu_query[:-1]].all())


def build_rows(plan: StepPlan, geometry: PageGeometry, landmark_id: int | None = None) -> StepRows:
    """The rows of a plan. If the model has landmark rows, a page's landmark row is computed in the
    same step as the page's last token."""
    size, per_page = geometry.page_size, geometry.tokens_per_page
    starts = np.array([advance.start for advance in plan.advances], dtype=np.int64)
    stops = np.array([advance.stop for advance in plan.advances], dtype=np.int64)
    prompts = np.array([advance.prompt_len for advance in plan.advances], dtype=np.int64)
    first_rows = starts // per_page * size + starts % per_page
    kv_lens = stops // per_page * size + stops % per_page
    query_lens = kv_lens - first_rows
    cu_query = np.concatenate(([0], np.cumsum(query_lens)))
    seq = np.repeat(np.arange(len(plan.advances)), query_lens)
    cache_rows = np.arange(cu_query[-1]) - cu_query[seq] + first_rows[seq]
    positions = cache_rows - cache_rows // size * (size - per_page)
    is_token = cache_rows % size < per_page
    token_ids = np.full(cu_query[-1], -1 if landmark_id is None else landmark_id, dtype=np.int64)
    known, unknown = array("q"), []
    for s, advance in enumerate(plan.advances):
        known += advance.token_ids
        if len(advance.token_ids) < advance.stop - advance.start:
            unknown.append(s)
            known.append(0)
    token_ids[is_token] = known
    last_tokens = stops - 1
    last_rows = last_tokens // per_page * size + last_tokens % per_page
    last_token_rows = cu_query[:-1] + last_rows - first_rows
    sources = np.full(cu_query[-1], -1, dtype=np.int64)
    sources[last_token_rows[unknown]] = [plan.advances[s].slot for s in unknown]
    return StepRows(
        token_ids=token_ids,
        sources=sources,
        positions=positions,
        lengths=np.maximum(prompts[seq], positions + 1),
        cache_rows=cache_rows,
        seq=seq,
        query_lens=query_lens,
        kv_lens=kv_lens,
        cu_query=cu_query,
        is_token=is_token,
        last_token_rows=last_token_rows,
    )
