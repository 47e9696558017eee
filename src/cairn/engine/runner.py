"""Carries out a plan: builds the step's tensors, runs the model, samples."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import torch

from cairn.attention.backend import AttentionBackend
from cairn.attention.batch import AttentionBatch, GroupTables, Scoring
from cairn.engine.logprobs import TokenLogprob, token_logprobs
from cairn.engine.plan import StepPlan
from cairn.engine.rows import StepRows, build_rows
from cairn.engine.sampler import Draw, Sampler
from cairn.memory.geometry import PageGeometry
from cairn.memory.kv_pool import KVPool
from cairn.models.interface import LanguageModel
from cairn.sparsity.selection import Selection


@dataclass(frozen=True, slots=True)
class StepResult:
    """By request id, for those it concerns."""

    sampled: dict[str, int] = field(default_factory=dict)
    logprobs: dict[str, TokenLogprob] = field(default_factory=dict)
    prompt_logprobs: dict[str, list[TokenLogprob]] = field(default_factory=dict)
    distributions: dict[str, torch.Tensor] = field(default_factory=dict)
    """Log-probabilities [tokens of this step, vocab], float32 on the host."""
    selections: dict[str, dict[int, Selection]] = field(default_factory=dict)
    """Pages that the row of a sampled token read, by layer, of traced requests."""


class Runner:
    def __init__(
        self,
        model: LanguageModel,
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
        self._sampler = Sampler(num_slots, model.spec.vocab_size, device)
        # Host mirror of every running request's page tables, kept up to date by plan edits.
        self._tables = [np.zeros((num_slots, max_pages), dtype=np.int32) for _ in range(num_groups)]
        self._generations = [np.zeros_like(table) for table in self._tables]
        native = model.spec.sparsity
        self._landmark_id = None if native is None else native.landmark_id
        self._top_logprobs: list[int | None] = [None] * num_slots
        self._top_prompt_logprobs = [0] * num_slots

    @torch.inference_mode()
    def run(self, plan: StepPlan) -> StepResult:
        self._apply(plan)
        rows = build_rows(plan, self._geometry, self._landmark_id)
        batch = self._batch(plan, rows)
        try:
            return self._compute(plan, rows, batch)
        except BaseException:
            self._backend.abandon(batch)
            raise

    def _compute(self, plan: StepPlan, rows: StepRows, batch: AttentionBatch) -> StepResult:
        metadata = self._backend.prepare(batch)

        def attend(
            layer: int,
            query: torch.Tensor,
            key_value: torch.Tensor,
            scoring: Scoring | None = None,
        ) -> torch.Tensor:
            tables = batch.groups[self._pool.group_of[layer]]
            self._pool.write(layer, tables.row_pages, batch.row_offsets, key_value)
            return self._backend.forward(layer, query, metadata, scoring)

        sampling = [s for s, advance in enumerate(plan.advances) if advance.samples]
        scored = self._scored_rows(plan, rows)
        logit_rows = np.concatenate([rows.last_token_rows[sampling], *scored.values()])
        logits = self._model(
            self._to_device(rows.token_ids),
            self._to_device(rows.positions),
            self._to_device(rows.lengths),
            attend,
            self._to_device(logit_rows.astype(np.int64)),
        )
        result = StepResult()
        self._sample(plan, sampling, logits[: len(sampling)], result)
        begin = len(sampling)
        for s, wanted in scored.items():
            self._score(plan, s, logits[begin : begin + len(wanted)], result)
            begin += len(wanted)
        if len(batch.traced_rows):
            for s in sampling:
                if plan.advances[s].traced:
                    read = self._backend.selections(metadata, int(rows.last_token_rows[s]))
                    result.selections[plan.advances[s].request_id] = read
        return result

    def _apply(self, plan: StepPlan) -> None:
        for admission in plan.admissions:
            self._sampler.admit(admission)
            self._top_logprobs[admission.slot] = admission.params.logprobs
            self._top_prompt_logprobs[admission.slot] = admission.params.prompt_logprobs or 0
        for edit in plan.edits:
            stop = edit.first + len(edit.page_ids)
            self._tables[edit.group][edit.slot, edit.first : stop] = edit.page_ids
            self._generations[edit.group][edit.slot, edit.first : stop] = edit.generations

    def _batch(self, plan: StepPlan, rows: StepRows) -> AttentionBatch:
        size = self._geometry.page_size
        slots = np.array([advance.slot for advance in plan.advances])
        width = int(-(-rows.kv_lens.max() // size))
        prompts = [self._geometry.rows(advance.prompt_len) for advance in plan.advances]
        traced = [s for s, advance in enumerate(plan.advances) if advance.traced]
        groups = []
        for table, generations in zip(self._tables, self._generations, strict=True):
            host = table[slots, :width]  # [seqs, width]
            row_pages = host[rows.seq, rows.cache_rows // size].astype(np.int64)
            groups.append(
                GroupTables(
                    page_table=self._to_device(host),
                    row_pages=self._to_device(row_pages),
                    host_pages=host,
                    host_generations=generations[slots, :width],
                )
            )
        return AttentionBatch(
            page_size=size,
            query_lens=rows.query_lens,
            kv_lens=rows.kv_lens,
            cu_query=rows.cu_query,
            row_offsets=self._to_device(rows.cache_rows % size),
            groups=tuple(groups),
            device=self._device,
            prompt_rows=np.array(prompts),
            traced_rows=rows.last_token_rows[traced],
        )

    def _sample(
        self, plan: StepPlan, sampling: list[int], logits: torch.Tensor, result: StepResult
    ) -> None:
        if not sampling:
            return
        advances = [plan.advances[s] for s in sampling]
        draws = [Draw(a.slot, a.stop, a.stop - a.prompt_len) for a in advances]
        tokens = self._sampler.sample(logits, draws)
        result.sampled.update(zip((a.request_id for a in advances), tokens.tolist(), strict=True))
        wanted = [
            (row, advance, most)
            for row, advance in enumerate(advances)
            if (most := self._top_logprobs[advance.slot]) is not None
        ]
        if wanted:
            index = self._to_device(np.array([row for row, _, _ in wanted]))
            scores = token_logprobs(logits[index], tokens[index], [most for _, _, most in wanted])
            for (_, advance, _), score in zip(wanted, scores, strict=True):
                result.logprobs[advance.request_id] = score

    def _scored_rows(self, plan: StepPlan, rows: StepRows) -> dict[int, np.ndarray]:
        """Rows whose logits score the prompt, by sequence."""
        wanted = {}
        for s, advance in enumerate(plan.advances):
            if advance.prompt_scores != "none":
                begin, end = int(rows.cu_query[s]), int(rows.cu_query[s + 1])
                token_rows = begin + np.flatnonzero(rows.is_token[begin:end])
                if advance.prompt_scores == "top":
                    token_rows = token_rows[: len(advance.next_ids)]
                wanted[s] = token_rows
        return wanted

    def _score(self, plan: StepPlan, s: int, logits: torch.Tensor, result: StepResult) -> None:
        advance = plan.advances[s]
        if advance.prompt_scores == "whole":
            wide = logits.to(torch.promote_types(logits.dtype, torch.float32))
            result.distributions[advance.request_id] = wide.log_softmax(-1).float().cpu()
            return
        tokens = torch.tensor(advance.next_ids, dtype=torch.int64, device=self._device)
        most = [self._top_prompt_logprobs[advance.slot]] * len(tokens)
        result.prompt_logprobs[advance.request_id] = token_logprobs(logits, tokens, most)

    def _to_device(self, array: np.ndarray) -> torch.Tensor:
        return torch.from_numpy(np.ascontiguousarray(array)).to(self._device)
