"""Runs single steps: from a step's inputs to logits and sampled tokens.

A step runs from a CUDA graph if one fits (`form`, then `replay`), otherwise as it is (`eager`).
Sampled tokens stay on the device, where the next step can read them before the host knows them.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import fields
from itertools import repeat
from types import MappingProxyType
from typing import NamedTuple

import numpy as np
import torch

from cairn.attention.attend import Attend
from cairn.attention.backend import AttentionBackend, Graph, SparseBackend
from cairn.attention.batch import AttentionBatch, to_device
from cairn.engine.drafters.drafter import FIRST_DRAFTS
from cairn.engine.graphs import StepGraphs, StepSize, most_decode_rows, recorded_sizes
from cairn.engine.inputs import Draws, StepInputs
from cairn.engine.logprobs import token_logprobs
from cairn.engine.plan import Admission, Advance
from cairn.engine.resolve import EngineChoices
from cairn.engine.sampler import Sampler
from cairn.engine.step_result import StepResult
from cairn.kernels.interface import FEW_ROWS
from cairn.memory.kv_pool import KVPool
from cairn.models.interface import LanguageModel
from cairn.models.parallel import Parallel
from cairn.sparsity.selection import Selection

NO_ROWS: Mapping[str, np.ndarray] = MappingProxyType({})


class Stepper:
    def __init__(
        self,
        choices: EngineChoices,
        tables: tuple[int, int, int],
        model: LanguageModel,
        pool: KVPool,
        backend: AttentionBackend,
        parallel: Parallel,
    ) -> None:
        """`tables` is the shape [groups, slots, pages] of the page tables of all requests."""
        self.device = device = choices.device
        self.model = model
        self.pool = pool
        self.backend = backend
        self.sparse = backend if isinstance(backend, SparseBackend) else None
        self.reads_generations = self.sparse is not None and self.sparse.reads_generations
        self.parallel = parallel
        self.samples = parallel.rank == 0
        """Rank 0 samples for all ranks, so that all have the same tokens."""
        self._geometry = choices.geometry
        self._draft_tokens = choices.draft_tokens
        self._table_shape = tables
        _, num_slots, _ = tables
        self.per_slot = 1 + choices.draft_tokens if choices.sparse_drafts else 1
        """Tokens of a slot that the device keeps: the newest one, and the drafts that the model
        makes."""
        self.newest = torch.zeros(num_slots * self.per_slot + 1, dtype=torch.int64, device=device)
        """These tokens of every slot, and a spare place for tokens that nobody needs."""
        self.sampler = Sampler(num_slots, model.spec.vocab_size, device, self.per_slot)
        self._top_logprobs: list[int | None] = [None] * num_slots
        self.graphs: StepGraphs | None = None
        """Recorded steps; None if none are recorded."""
        self.activation_bytes = 0
        """Most bytes that tensors of a step without a graph take on the device."""

    def admit(self, admission: Admission) -> None:
        self.sampler.admit(admission)
        self._top_logprobs[admission.slot] = admission.params.logprobs

    # -- recorded steps -----------------------------------------------------------------------

    @torch.inference_mode()
    def record_graphs(self, most_rows: int, reserve: int = 0) -> None:
        """Record the kinds of steps that the backend supports; mixed ones have up to `most_rows`
        rows, or fewer to leave `reserve` bytes of the device free."""
        self.graphs = self.make_graphs(most_rows)
        self.graphs.record(reserve)

    def make_graphs(self, most_rows: int) -> StepGraphs:
        """Graphs of these steps, not recorded yet."""
        _, num_slots, max_pages = self._table_shape
        drafts = self._draft_tokens
        return StepGraphs(
            self._recorded_step,
            sizes=recorded_sizes(
                self.backend.graphs,
                self._geometry,
                decode_rows=most_decode_rows(num_slots, self.model.spec.sparsity is not None),
                mixed_rows=min(most_rows, max_pages * self._geometry.page_size),
                seqs=num_slots,
                # Where drafts keep failing, requests have one draft.
                few_rows={1 + own for own in (1, min(drafts, FIRST_DRAFTS), drafts)},
                selecting_rows=None if self.sparse is None else self.sparse.selecting_rows,
            ),
            page_size=self._geometry.page_size,
            tables=self._table_shape,
            device=self.device,
            generations=self.reads_generations,
            spare=len(self.newest) - 1,
            samples=1 + drafts,
        )

    def _recorded_step(
        self, inputs: StepInputs, draws: Draws[torch.Tensor], logit_rows: torch.Tensor | None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """The step that is recorded. Returns logits, and tokens sampled without filters."""
        from cairn.kernels.sampling import sample

        logits = self.forward(inputs, self.backend.prepare(inputs.batch), logit_rows)
        tokens = sample(logits, draws.temperatures, draws.seeds, self.newest, draws.places)
        return logits, tokens

    def form(self, host: StepInputs, *, drafted: bool) -> Form | None:
        """How to replay a step from a graph; None if no graph fits."""
        if self.graphs is None:
            return None
        for step, mixed in _forms(host, drafted=drafted):
            graph = self.backend.graph_for(step.batch, mixed=mixed)
            size = None if graph is None else self.graphs.size_for(graph, step)
            if graph is not None and size is not None:
                return Form(step, graph, size)
        return None

    def replay(
        self,
        host: StepInputs,
        form: Form,
        draws: Draws[np.ndarray] | None,
        *,
        new_tables: bool = True,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Replay a step. Returns the logits of the sampled rows, and their tokens if there are
        `draws`."""
        assert self.graphs is not None
        with self.launching(host.batch, form.graph):
            return self.graphs.run(*form, draws, new_tables=new_tables)

    # -- any step -----------------------------------------------------------------------------

    @contextmanager
    def launching(self, batch: AttentionBatch, graph: Graph | None) -> Iterator[None]:
        """Notify a sparse backend before a step, after a replay, and if the step fails."""
        if self.sparse is None:
            yield
            return
        try:
            self.sparse.launching(batch, graph)
            yield
            if graph is not None:
                self.sparse.replayed(batch, graph)
        except BaseException:  # Ctrl-C too
            self.sparse.abandon(batch)
            raise

    def eager(
        self,
        sampling: Sequence[Advance],
        host: StepInputs,
        logit_rows: np.ndarray,
        result: StepResult,
        pooled: Mapping[str, np.ndarray] = NO_ROWS,
    ) -> torch.Tensor:
        """Run a step without a graph. Returns the logits of `logit_rows`. Hidden states are summed
        over the rows `pooled` of each request, which go to `result` with the pages that traced rows
        read."""
        inputs = host.send(self.device, self.reads_generations)
        with self.launching(inputs.batch, None):
            metadata = self.backend.prepare(inputs.batch)
            wanted = to_device(logit_rows.astype(np.int64), self.device)
            if not pooled:
                logits = self.forward(inputs, metadata, wanted)
            else:
                hidden = self.forward(inputs, metadata, wanted, headless=True)
                logits = self.model.head(hidden[wanted])
                for request_id, rows in pooled.items():
                    total = hidden[to_device(rows, self.device)].float().sum(0)
                    result.hidden_sums[request_id] = total.cpu()
        if self.sparse is not None and len(host.batch.traced_rows):
            for own, row in zip(_each_sample(sampling), host.sampled_rows.tolist(), strict=True):
                if own.traced:
                    read = self.sparse.selections(metadata, row)
                    whole = {layer: self._of_all_heads(part) for layer, part in read.items()}
                    result.selections.setdefault(own.request_id, []).append(whole)
        return logits

    def _of_all_heads(self, selection: Selection) -> Selection:
        """Concatenate the selections of all ranks; each rank selects for its own heads."""
        if self.parallel.size == 1:
            return selection
        parts = (getattr(selection, part.name) for part in fields(selection))
        return Selection(*(self.parallel.concat(part, 1) for part in parts))

    def forward(
        self,
        inputs: StepInputs,
        metadata: object,
        logit_rows: torch.Tensor | None,
        *,
        headless: bool = False,
    ) -> torch.Tensor:
        """The device work of a step; all of it can be recorded. `headless` returns the hidden
        states of all rows instead of logits."""
        self.backend.begin(metadata)
        token_ids, sources, positions, lengths = inputs.sent
        if self.sampler.fused:
            from cairn.kernels.newest import known_tokens

            token_ids = known_tokens(token_ids, sources, self.newest)
        else:
            newest = self.newest[sources.clamp(min=0)]
            token_ids = torch.where(sources >= 0, newest, token_ids)
        attend = Attend(self.pool, self.backend, inputs.batch, metadata)
        if headless:
            return self.model.hidden(token_ids, positions, lengths, attend)
        return self.model(token_ids, positions, lengths, attend, logit_rows)

    def sample(
        self, sampling: Sequence[Advance], logits: torch.Tensor, result: StepResult
    ) -> torch.Tensor:
        """Sample tokens [samples] on the device, and store the first one of each slot there for the
        next step."""
        if not sampling:
            return torch.empty(0, dtype=torch.int64)
        if self.samples:
            tokens = self.sampler.sample(logits, sampling, self.newest)
        else:
            tokens = torch.empty(len(logits), dtype=torch.int64, device=self.device)
        tokens = self.parallel.from_first(tokens)
        self.newest[to_device(self.sampler.places(sampling), self.device)] = tokens
        wanted = [
            (row, own, most)
            for row, own in enumerate(_each_sample(sampling))
            if (most := self._top_logprobs[own.slot]) is not None and not own.guess
        ]
        if wanted:
            index = to_device(np.array([row for row, _, _ in wanted]), self.device)
            scores = token_logprobs(logits[index], tokens[index], [most for _, _, most in wanted])
            for (_, own, _), score in zip(wanted, scores, strict=True):
                result.logprobs.setdefault(own.request_id, []).append(score)
        return tokens


class Form(NamedTuple):
    """How a step is replayed."""

    step: StepInputs
    graph: Graph
    size: StepSize


def _forms(host: StepInputs, *, drafted: bool) -> Iterator[tuple[StepInputs, bool]]:
    """The ways to replay a step, best first, and whether they need a mixed graph."""
    if not host.only_decodes:
        yield host, True
    elif not drafted:
        yield host.as_sequences(), False
        yield host, True
    else:
        yield host, False  # rows of a sequence read its past together
        # Drafts as sequences of their own each read the past again. That costs little where one
        # sequence runs, and products of few rows have kernels of their own.
        apart = host.batch.num_rows <= FEW_ROWS
        for mixed in (not apart, apart):
            yield (host if mixed else host.as_sequences()), mixed


def _each_sample(advances: Sequence[Advance]) -> Iterator[Advance]:
    """The advance of each sampled token."""
    for advance in advances:
        yield from repeat(advance, advance.samples)
