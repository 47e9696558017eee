"""Carries out a plan: builds the step's tensors, runs the model, samples."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np
import torch

from cairn.attention.backend import AttentionBackend
from cairn.attention.batch import AttentionBatch, GroupTables
from cairn.engine.plan import StepPlan
from cairn.engine.rows import StepRows, build_rows
from cairn.engine.sampler import Draw, sample
from cairn.memory.geometry import PageGeometry
from cairn.memory.kv_pool import KVPool
from cairn.models.decoder import CausalLM


@dataclass(frozen=True, slots=True)
class StepResult:
    sampled: Mapping[str, int]  # request id -> next token
    scores: Mapping[str, torch.Tensor] = field(default_factory=dict)
    """request id -> log-probabilities [tokens of this step, vocab], float32 on the host."""


class Runner:
    def __init__(
        self,
        model: CausalLM,
        pool: KVPool,
        backend: AttentionBackend,
        geometry: PageGeometry,
        *,
        num_groups: int,
        num_slots: int,
        max_pages: int,
        device: torch.device,
    ) -> None:
        self._model = model
        self._pool = pool
        self._backend = backend
        self._geometry = geometry
        self._device = device
        # Host mirror of every running request's page tables, kept up to date by plan edits.
        self._tables = [np.zeros((num_slots, max_pages), dtype=np.int32) for _ in range(num_groups)]

    @torch.inference_mode()
    def run(self, plan: StepPlan) -> StepResult:
        for edit in plan.edits:
            stop = edit.first + len(edit.page_ids)
            self._tables[edit.group][edit.slot, edit.first : stop] = edit.page_ids
        rows = build_rows(plan, self._geometry)
        batch = self._batch(plan, rows)
        metadata = self._backend.prepare(batch)

        def attend(
            layer: int, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor
        ) -> torch.Tensor:
            tables = batch.groups[self._pool.group_of[layer]]
            self._pool.write(layer, tables.row_pages, batch.row_offsets, key, value)
            return self._backend.forward(layer, query, metadata)

        hidden = self._model(
            self._to_device(rows.token_ids),
            self._to_device(rows.positions),
            self._to_device(rows.lengths),
            attend,
        )
        return StepResult(self._sample(plan, rows, hidden), self._score(plan, rows, hidden))

    def _batch(self, plan: StepPlan, rows: StepRows) -> AttentionBatch:
        size = self._geometry.page_size
        slots = np.array([advance.slot for advance in plan.advances])
        width = int(-(-rows.kv_lens.max() // size))
        groups = []
        for table in self._tables:
            host = table[slots, :width]  # [seqs, width]
            row_pages = host[rows.seq, rows.cache_rows // size].astype(np.int64)
            groups.append(GroupTables(self._to_device(host), self._to_device(row_pages)))
        return AttentionBatch(
            page_size=size,
            query_lens=rows.query_lens,
            kv_lens=rows.kv_lens,
            cu_query=rows.cu_query,
            row_offsets=self._to_device(rows.cache_rows % size),
            groups=tuple(groups),
            device=self._device,
        )

    def _sample(self, plan: StepPlan, rows: StepRows, hidden: torch.Tensor) -> dict[str, int]:
        sampling = [s for s, advance in enumerate(plan.advances) if advance.samples]
        if not sampling:
            return {}
        logits = self._model.logits(hidden[self._to_device(rows.last_token_rows[sampling])])
        advances = [plan.advances[s] for s in sampling]
        tokens = sample(logits, [Draw(a.params, a.seed, a.stop) for a in advances])
        return dict(zip((a.request_id for a in advances), tokens.tolist(), strict=True))

    def _score(
        self, plan: StepPlan, rows: StepRows, hidden: torch.Tensor
    ) -> dict[str, torch.Tensor]:
        scores = {}
        for s, advance in enumerate(plan.advances):
            if advance.score_prompt:
                begin, end = int(rows.cu_query[s]), int(rows.cu_query[s + 1])
                wanted = self._to_device(begin + np.flatnonzero(rows.is_token[begin:end]))
                logits = self._model.logits(hidden[wanted])
                wide = logits.to(torch.promote_types(logits.dtype, torch.float32))
                scores[advance.request_id] = wide.log_softmax(-1).float().cpu()
        return scores

    def _to_device(self, array: np.ndarray) -> torch.Tensor:
        return torch.from_numpy(np.ascontiguousarray(array)).to(self._device)
