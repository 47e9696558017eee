"""Carries out a plan: builds the step's tensors, runs the model, samples.

`launch` launches a step on the device and returns; `finish` waits for its tokens. The next step may
be launched in between: it reads tokens that the host does not know yet from the device, where the
sampler stored them.
"""

from __future__ import annotations

import hashlib
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import fields, replace
from itertools import repeat
from typing import NamedTuple

import numpy as np
import torch

from cairn.attention.attend import Attend
from cairn.attention.backend import AttentionBackend, Graph, SparseBackend
from cairn.attention.batch import AttentionBatch, to_device
from cairn.attention.widened import overflowing_seqs
from cairn.engine.drafters.drafter import FIRST_DRAFTS
from cairn.engine.drafting import Drafting, Made, Selected, Unseen
from cairn.engine.graphs import StepGraphs, StepSize, most_decode_rows, recorded_sizes
from cairn.engine.inputs import Draws, StepInputs
from cairn.engine.logprobs import token_logprobs
from cairn.engine.memory_plan import MemoryPlan
from cairn.engine.plan import Advance, StepPlan
from cairn.engine.prompt_scores import pooled_rows, score_prompt, scored_rows
from cairn.engine.resolve import EngineChoices
from cairn.engine.sampler import Sampler
from cairn.engine.step_result import InFlight, StepResult
from cairn.engine.step_time import step_sizes
from cairn.engine.warm_up import Rehearsal, rehearsals, rungs_of
from cairn.kernels.compilations import CompilationCounts, Compilations
from cairn.kernels.packing import table_width
from cairn.memory.copies import Mover
from cairn.memory.hisparse import HiSparseCoordinator, TierStats
from cairn.memory.kv_pool import KVPool
from cairn.memory.residency import Residency
from cairn.models.interface import LanguageModel
from cairn.models.layers import warm_up_products
from cairn.models.loader import Progress
from cairn.models.parallel import Parallel
from cairn.sparsity.selection import Selection

_MOST_RECORDED_TOKENS = 8192
"""Tokens of the largest mixed step that is recorded. With more the device takes longer than the
host needs to launch the kernels, so a graph saves nothing."""


_MOST_ROWS_APART = 8
"""Rows of the largest step with drafts in which every row is a sequence. Products of so few rows
have kernels of their own, and reading a past twice costs little where one sequence runs."""


class Runner:
    def __init__(
        self,
        choices: EngineChoices,
        memory: MemoryPlan,
        model: LanguageModel,
        pool: KVPool,
        backend: AttentionBackend,
        tier: HiSparseCoordinator | None,
        parallel: Parallel,
    ) -> None:
        self._choices = choices
        self._limits = memory.limits
        self._max_pages = memory.max_pages
        self._device = device = choices.device
        self._compilations = Compilations(device)
        self._parallel = parallel
        self._model = model
        self._pool = pool
        self.backend = backend
        self._sparse = backend if isinstance(backend, SparseBackend) else None
        self._reads_generations = self._sparse is not None and self._sparse.reads_generations
        self._geometry = choices.geometry
        # Rank 0 samples for all ranks, so that all have the same tokens.
        self._samples = parallel.rank == 0
        num_slots = memory.limits.max_running_requests
        self._per_slot = 1 + choices.draft_tokens if choices.sparse_drafts else 1
        self._sampler = Sampler(num_slots, model.spec.vocab_size, device, self._per_slot)
        # Page tables of all running requests on the host; plans carry the edits.
        size = (len(choices.groups), num_slots, table_width(memory.max_pages))
        self._tables = np.zeros(size, dtype=np.int32)
        self._generations = np.zeros_like(self._tables)
        native = model.spec.sparsity
        self._landmark_id = None if native is None else native.landmark_id
        self._top_logprobs: list[int | None] = [None] * num_slots
        self._top_prompt_logprobs = [0] * num_slots
        # The newest token of every slot, the drafts that the model makes, and a spare place for
        # tokens that nobody needs.
        self._spare = num_slots * self._per_slot
        self._newest = torch.zeros(self._spare + 1, dtype=torch.int64, device=device)
        self._ahead: dict[int, Made] = {}  # drafts that were made ahead, by slot
        self._followed: StepPlan | None = None  # the step behind which drafts are launched already
        self._selected: Selected | None = None  # whose pages drafts selected last
        self.graphs: StepGraphs | None = None
        """Recorded steps; None if none are recorded."""
        self.warm_up_seconds: dict[str, float] = {}
        """How long each part of `warm_up` took."""
        self.tier = tier
        """The host tier; None if all pages are on the device."""
        self.mover: Mover | None = tier
        """Copies complete pages to host memory; None without a host tier."""
        self._residency: Residency | None = None  # only for kernels that swap in
        if tier is not None and tier.copier is not None:
            self._residency = Residency(tier.page_group, tier.frames, num_slots)

    @property
    def traces(self) -> bool:
        """The backend reports which pages a row reads."""
        own = type(self._sparse)
        return issubclass(own, SparseBackend) and own.selections is not SparseBackend.selections

    @property
    def gives_hidden(self) -> bool:
        """The model returns the hidden states of its last layer."""
        return self._model.gives_hidden

    def mark_ready(self) -> None:
        """Note that the engine takes requests from now on. Later compilations delay requests."""
        self._compilations.mark_ready()

    def compilations(self) -> CompilationCounts:
        return self._compilations.counts

    def tier_stats(self) -> TierStats | None:
        return None if self.tier is None else self.tier.stats

    def watch(self) -> None:
        """Raise if a process that this runner depends on has failed."""

    def check(self) -> None:
        """Raise if the state of the ranks differs."""

    def fingerprint(self) -> str:
        """A digest of tables and newest tokens. Between steps it is the same on every rank."""
        digest = hashlib.blake2b(digest_size=16)
        for part in (self._tables, self._generations, self._newest[:-1].cpu().numpy()):
            digest.update(part.tobytes())
        return digest.hexdigest()

    def close(self) -> None:
        """Wait for copies in progress and free host memory."""
        self._compilations.close()
        if self.tier is not None:
            self.tier.close()

    @torch.inference_mode()
    def warm_up(self, *, records: bool, progress: Progress | None = None) -> None:
        """Compile all kernels that a step may launch, set up libraries, and record graphs if
        `records`."""
        from cairn.kernels.precompile import collecting, compile_all

        begin = time.perf_counter()
        chunk, sparse = self._limits.chunked_prefill_size, self._choices.sparse
        if self._limits.max_step_seconds is not None:
            warm_up_products(self._model, step_sizes(chunk))
        max_seqs, max_pages = self._limits.max_running_requests, self._max_pages
        dense_below = 0 if sparse is None else sparse.dense_below
        own = None if self._sparse is None else self._sparse.rungs(max_seqs, max_pages)
        if own is None and not self.backend.graphs:
            # Attention does not use Cairn's own kernels. What other libraries launch depends only
            # on the number of rows, so a few sequences and pages are enough.
            max_seqs, max_pages = 2, min(max_pages, self._geometry.pages(chunk))
            dense_below = 0
        rungs = rungs_of(self.backend, max_seqs, max_pages)
        longest = max_pages * self._geometry.page_size
        steps = list(
            rehearsals(
                rungs,
                page_size=self._geometry.page_size,
                max_pages=max_pages,
                chunk=chunk,
                dense_below=dense_below,
                overflowing=overflowing_seqs(self._choices.dense, self._choices.shape, longest),
            )
        )
        most_recorded = min(self._geometry.rows(_MOST_RECORDED_TOKENS), chunk)
        with collecting() as forms, self._excerpt():
            for step in steps:
                self._rehearse(step)
            if self.tier is not None:
                self.tier.rehearse()
            if records:
                self._make_graphs(most_recorded).rehearse(rungs.rows, rungs.seqs)
                self._rehearse_drafts()
        moments = [begin, time.perf_counter()]
        compile_all(forms, progress)
        moments.append(time.perf_counter())
        for step in steps:
            if step.for_real:
                self._rehearse(step)
        moments.append(time.perf_counter())
        if records:
            self.record_graphs(most_recorded)
            self._rehearse_drafts()
        moments.append(time.perf_counter())
        phases = ("list kernels", f"load or compile {len(forms)} kernels", "run steps")
        for phase, seconds in zip((*phases, "record graphs"), np.diff(moments), strict=True):
            self.warm_up_seconds[phase] = float(seconds)

    def _rehearse_drafts(self) -> None:
        if self._choices.sparse_drafts:
            Unseen.rehearse(self._newest, len(self._tables), self._geometry.page_size)

    @contextmanager
    def _excerpt(self) -> Iterator[None]:
        """Inside, the model runs only one layer of those that use the same kernels."""
        whole, sparse = self._model, self._choices.sparse
        sparse_layers = () if sparse is None else sparse.layers
        if self.tier is None:  # a tier prefetches pages layer by layer, so all layers must run
            self._model = whole.excerpt(
                lambda layer: (self._pool.group_of[layer], layer in sparse_layers)
            )
        try:
            yield
        finally:
            self._model = whole

    def _rehearse(self, step: Rehearsal) -> None:
        from cairn.kernels.sampling import sample

        for resident in (False,) if self.tier is None else (False, True):
            host = step.inputs(len(self._tables), self._geometry.page_size, resident=resident)
            inputs = host.send(self._device, self._reads_generations)
            wanted = to_device(host.sampled_rows, self._device)
            logits = self._forward(inputs, self.backend.prepare(inputs.batch), wanted)
            temperatures = torch.zeros(len(wanted), device=self._device)
            seeds = torch.zeros(len(wanted), dtype=torch.int64, device=self._device)
            # The forms that `sample` gets: logits as computed, contiguous after rows were picked,
            # float32 after penalties.
            for some in (logits, logits.contiguous(), logits.float()):
                sample(some, temperatures, seeds)
            graph = Graph("dense", mixed=False)
            if self._sparse is not None and graph in self._sparse.graphs:
                self._sparse.replayed(inputs.batch, graph)

    @torch.inference_mode()
    def record_graphs(self, most_rows: int) -> None:
        """Record the kinds of steps that the backend supports; mixed ones have up to `most_rows`
        rows."""
        self.graphs = self._make_graphs(most_rows)
        self.graphs.record()

    def _make_graphs(self, most_rows: int) -> StepGraphs:
        _, num_slots, max_pages = self._tables.shape
        drafts = self._choices.draft_tokens
        return StepGraphs(
            self._recorded_step,
            sizes=recorded_sizes(
                self.backend.graphs,
                self._geometry,
                decode_rows=most_decode_rows(num_slots, self._landmark_id is not None),
                mixed_rows=min(most_rows, max_pages * self._geometry.page_size),
                seqs=num_slots,
                # Where drafts keep failing, requests have one draft.
                few_rows={1 + own for own in (1, min(drafts, FIRST_DRAFTS), drafts)},
            ),
            page_size=self._geometry.page_size,
            tables=self._tables.shape,
            device=self._device,
            generations=self._reads_generations,
            spare=self._spare,
            samples=1 + drafts,
        )

    def wrap_attention(self, wrap: Callable[[AttentionBackend, KVPool], AttentionBackend]) -> None:
        """Replace the backend by a wrapper that passes on the backend's metadata.

        Steps that are replayed from graphs bypass the wrapper.
        """
        self.backend = wrap(self.backend, self._pool)

    # -- a step -------------------------------------------------------------------------------

    @torch.inference_mode()
    def launch(self, plan: StepPlan) -> InFlight:
        self._apply(plan)
        made, self._ahead = self._ahead, {}
        missing = [
            own
            for own in plan.advances
            if own.guesses and not (own.slot in made and made[own.slot].serves(own))
        ]
        if missing:
            self._draft(Drafting.within(missing))
        host = self._inputs(plan)
        sampling = [advance for advance in plan.advances if advance.samples]
        result = StepResult()
        scored, pooled = scored_rows(plan, host), pooled_rows(plan, host)
        form = None if scored or pooled else self._form(host, drafted=plan.drafted > 0)
        if form is not None:
            draws = self._sampler.plain_draws(sampling)
            logits, tokens = self._replay(host, form, draws)
            if draws is not None:
                return self._in_flight(plan, sampling, tokens, result)
        else:
            if plan.drafted and self._device.type == "cpu" and self._sparse is None:
                # A CPU computes single rows of sequences much faster than chunks.
                host = host.as_sequences() if host.only_decodes else host
            logit_rows = np.concatenate([host.sampled_rows, *scored.values()])
            logits = self._eager(plan, sampling, host, logit_rows, pooled, result)
        begin = len(host.sampled_rows)
        tokens = self._sample(sampling, logits[:begin], result)
        for s, wanted in scored.items() if self._samples else ():
            own = plan.advances[s]
            top = self._top_prompt_logprobs[own.slot]
            score_prompt(own, logits[begin : begin + len(wanted)], top, result)
            begin += len(wanted)
        return self._in_flight(plan, sampling, tokens, result)

    @torch.inference_mode()
    def draft_ahead(self, plan: StepPlan, result: StepResult) -> None:
        """Let the model draft what follows a finished step, if its plan says so and it has not
        begun. The next launch finds the drafts, as far as its plan asks for them."""
        if not plan.ahead:
            return
        drafting = Drafting.after(plan, result.sampled, result.guesses)
        if not drafting.advances:
            return
        # Drafts that failed may have completed pages.
        reached = np.array([own.stop for own in drafting.advances])
        self._forget(drafting.slots, drafting.starts, reached)
        if self._followed is plan:
            self._forget(drafting.slots, drafting.starts, drafting.stops)
        else:
            self._draft(drafting)
        self._ahead = drafting.made()

    def _draft_behind(self, plan: StepPlan, tokens: torch.Tensor) -> bool:
        """Let the device draft on from the tokens [samples] that a launched step samples, before
        the host knows them. False if graphs cannot do it."""
        drafting = Drafting.during(plan)
        if self.graphs is None or not drafting.advances:
            return False
        slots = drafting.slots
        first = self._first_draft(drafting)
        second = first.drafting(slots * self._per_slot + 1, 1)
        second = replace(second, batch=replace(second.batch, kept=True))
        draws = self._sampler.draft_draws(slots, drafting.starts + 1, 1)
        forms = [self._form(own, drafted=False) for own in (first, second)]
        steps = [(form.graph, form.size) for form in forms if form is not None]
        kinds = [graph for graph, _ in steps]
        begins = Graph("kept" if first.batch.kept else "sparse", mixed=False)
        if draws is None or kinds != [begins, Graph("kept", mixed=False)]:
            return False
        samples = np.array([own.samples for own in plan.advances])
        sampled = np.zeros(self._tables.shape[1], dtype=np.int64)  # by slot
        sampled[[own.slot for own in plan.advances]] = np.cumsum(samples) - samples
        unseen = Unseen.of(
            self._device,
            seeds=self._sampler.request_seeds(slots),
            first=sampled[slots],
            checked=drafting.unseen,
            places=slots * self._per_slot,
            room=np.array([own.room for own in drafting.advances]),
        )
        if not first.batch.kept:
            self._selected = Selected.by(drafting, self._geometry.page_size)
        unseen.count_right(tokens, self._newest, int(drafting.unseen.max()))
        self.graphs.draft(first, [*steps, *steps[1:] * plan.ahead][: plan.ahead], draws, unseen)
        return True

    def _first_draft(self, drafting: Drafting) -> StepInputs:
        """The inputs of the step in which requests make their first drafts."""
        slots, starts = drafting.slots, drafting.starts
        prompts = np.array([own.prompt_len for own in drafting.advances])
        tables = self._tables_of(slots, int(drafting.stops.max()))
        first = StepInputs.single_rows(
            self._geometry, starts, prompts, drafting.newest, slots * self._per_slot, *tables
        )
        kept = self._selected is not None and self._selected.serves(drafting)
        return replace(first, batch=replace(first.batch, kept=kept))

    def _draft(self, drafting: Drafting) -> None:
        """Let the model draft, token after token. The host prepares the first draft of each request
        and counts on from there."""
        counts, slots, starts = drafting.counts, drafting.slots, drafting.starts
        places = slots * self._per_slot
        begun = self._first_draft(drafting)
        kept = begun.batch.kept
        sent = False
        for later in range(counts[0]):
            count = int((counts > later).sum())
            host = begun if later == 0 else begun.drafting(places[:count] + later, later)
            host = replace(host, batch=replace(host.batch, kept=kept))
            form = self._form(host, drafted=False)
            if form is None or form.graph != Graph("kept", mixed=False):
                # It may overwrite these pages, with its rows in another order.
                self._selected, kept = None, False
            if form is None:
                now = drafting.parts(later)
                rows = host.sampled_rows
                result = StepResult()
                logits = self._eager(StepPlan(tuple(now)), now, host, rows, {}, result)
                self._sample(now, logits, result)
                continue
            draws = self._sampler.draft_draws(slots[:count], starts[:count] + 1 + later, 1 + later)
            logits, _ = self._replay(host, form, draws, new_tables=not sent)
            sent = True
            if draws is None:
                self._sample(drafting.parts(later), logits, StepResult())
            if not later and form.graph == Graph("sparse", mixed=False):
                # The pages that this draft selected serve others too.
                kept = True
                self._selected = Selected.by(drafting, self._geometry.page_size)
        # What drafts completed is computed again.
        self._forget(slots, starts, starts + counts)

    def _form(self, host: StepInputs, *, drafted: bool) -> _Form | None:
        """How to replay a step from a graph; None if no graph fits."""
        if self.graphs is None:
            return None
        for step, mixed in _forms(host, drafted=drafted):
            graph = self.backend.graph_for(step.batch, mixed=mixed)
            size = None if graph is None else self.graphs.size_for(graph, step)
            if graph is not None and size is not None:
                return _Form(step, graph, size)
        return None

    def _replay(
        self,
        host: StepInputs,
        form: _Form,
        draws: Draws[np.ndarray] | None,
        *,
        new_tables: bool = True,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Replay a step. Returns the logits of the sampled rows, and their tokens if there are
        `draws`."""
        assert self.graphs is not None
        with self._launching(host.batch, form.graph):
            return self.graphs.run(*form, draws, new_tables=new_tables)

    @contextmanager
    def _launching(self, batch: AttentionBatch, graph: Graph | None) -> Iterator[None]:
        """Notify a sparse backend before a step, after a replay, and if the step fails."""
        if self._sparse is None:
            yield
            return
        try:
            self._sparse.launching(batch, graph)
            yield
            if graph is not None:
                self._sparse.replayed(batch, graph)
        except BaseException:  # Ctrl-C too
            self._sparse.abandon(batch)
            raise

    def _recorded_step(
        self, inputs: StepInputs, draws: Draws[torch.Tensor], logit_rows: torch.Tensor | None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """The step that is recorded. Returns logits, and tokens sampled without filters."""
        from cairn.kernels.sampling import sample

        logits = self._forward(inputs, self.backend.prepare(inputs.batch), logit_rows)
        tokens = sample(logits, draws.temperatures, draws.seeds, self._newest, draws.places)
        return logits, tokens

    def _in_flight(
        self, plan: StepPlan, sampling: list[Advance], sampled: torch.Tensor, result: StepResult
    ) -> InFlight:
        """The step, whose tokens [samples] are on their way to the host. If it should, the model
        drafts on behind it."""
        tokens, ready = sampled, None
        drafts = [
            own.slot * self._per_slot + guess
            for own in sampling
            for guess in range(1, 1 + own.guesses)
        ]
        if drafts:
            tokens = torch.cat((tokens, self._newest[to_device(np.array(drafts), self._device)]))
        if self._device.type == "cuda":
            on_host = torch.empty(tokens.shape, dtype=tokens.dtype, pin_memory=True)
            tokens = on_host.copy_(tokens, non_blocking=True)
            ready = torch.cuda.Event()  # type: ignore[no-untyped-call]
            ready.record()
        self._followed = plan if plan.ahead and self._draft_behind(plan, sampled) else None
        return InFlight(plan, tuple(sampling), tokens, ready, result)

    def finish(self, step: InFlight) -> StepResult:
        """Wait for a launched step and take its tokens."""
        if step.ready is not None:
            step.ready.synchronize()
        tokens: list[int] = step.tokens.tolist()
        begin = 0
        for advance in step.sampling:
            step.result.sampled[advance.request_id] = tokens[begin : begin + advance.samples]
            begin += advance.samples
        for advance in step.sampling:
            if advance.guesses:
                step.result.guesses[advance.request_id] = tokens[begin : begin + advance.guesses]
                begin += advance.guesses
        return step.result

    def _eager(
        self,
        plan: StepPlan,
        sampling: list[Advance],
        host: StepInputs,
        logit_rows: np.ndarray,
        pooled: dict[int, np.ndarray],
        result: StepResult,
    ) -> torch.Tensor:
        inputs = host.send(self._device, self._reads_generations)
        with self._launching(inputs.batch, None):
            metadata = self.backend.prepare(inputs.batch)
            wanted = to_device(logit_rows.astype(np.int64), self._device)
            if not pooled:
                logits = self._forward(inputs, metadata, wanted)
            else:
                hidden = self._forward(inputs, metadata, wanted, headless=True)
                logits = self._model.head(hidden[wanted])
                for s, rows in pooled.items():
                    total = hidden[to_device(rows, self._device)].float().sum(0)
                    result.hidden_sums[plan.advances[s].request_id] = total.cpu()
        if self._sparse is not None and len(host.batch.traced_rows):
            for own, row in zip(_each_sample(sampling), host.sampled_rows.tolist(), strict=True):
                if own.traced:
                    read = self._sparse.selections(metadata, row)
                    whole = {layer: self._of_all_heads(part) for layer, part in read.items()}
                    result.selections.setdefault(own.request_id, []).append(whole)
        return logits

    def _of_all_heads(self, selection: Selection) -> Selection:
        """Concatenate the selections of all ranks; each rank selects for its own heads."""
        if self._parallel.size == 1:
            return selection
        parts = (getattr(selection, part.name) for part in fields(selection))
        return Selection(*(self._parallel.concat(part, 1) for part in parts))

    def _forward(
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
        if self._sampler.fused:
            from cairn.kernels.newest import known_tokens

            token_ids = known_tokens(token_ids, sources, self._newest)
        else:
            newest = self._newest[sources.clamp(min=0)]
            token_ids = torch.where(sources >= 0, newest, token_ids)
        attend = Attend(self._pool, self.backend, inputs.batch, metadata)
        if headless:
            return self._model.hidden(token_ids, positions, lengths, attend)
        return self._model(token_ids, positions, lengths, attend, logit_rows)

    def _apply(self, plan: StepPlan) -> None:
        if self.tier is not None:
            self.tier.begin_step(plan.copies)
        if self._residency is not None:
            self._residency.move(plan.copies.frames)
        for admission in plan.admissions:
            self._sampler.admit(admission)
            self._top_logprobs[admission.slot] = admission.params.logprobs
            self._top_prompt_logprobs[admission.slot] = admission.params.prompt_logprobs or 0
        for edit in plan.edits:
            stop = edit.first + len(edit.page_ids)
            self._tables[edit.group, edit.slot, edit.first : stop] = edit.page_ids
            self._generations[edit.group, edit.slot, edit.first : stop] = edit.generations
            if self._residency is not None and edit.group == self._residency.group:
                self._residency.edit(edit.slot, edit.first)
        again = [(own.slot, own.start, own.reached) for own in plan.advances if own.reached]
        if again:
            self._forget(*np.array(again).T)

    def _forget(self, slots: np.ndarray, starts: np.ndarray, reached: np.ndarray) -> None:
        """Forget pages that slots [n] completed when they reached so many tokens: they compute
        those from `starts` on again."""
        if self._sparse is None:
            return
        first, last = (self._geometry.complete_pages(own).tolist() for own in (starts, reached))
        again = [
            self._tables[:, slot, begin:end]
            for slot, begin, end in zip(slots.tolist(), first, last, strict=True)
            if end > begin
        ]
        if again:
            self._sparse.forget(np.concatenate(again, axis=1))

    def _inputs(self, plan: StepPlan) -> StepInputs:
        """The rows of a plan, with page tables."""
        geometry, residency = self._geometry, self._residency
        slots = np.array([advance.slot for advance in plan.advances])
        tables, lives = self._tables_of(slots, max([own.stop for own in plan.advances]))
        host = StepInputs.of(plan, geometry, tables, lives, self._landmark_id, self._per_slot)
        if residency is None:
            return host
        counts = -(-host.batch.kv_lens // geometry.page_size)
        resident = residency.all_here(slots, tables[residency.group], counts)
        return replace(host, batch=replace(host.batch, resident=resident))

    def _tables_of(self, slots: np.ndarray, stop: int) -> tuple[np.ndarray, np.ndarray]:
        """Page tables [groups, slots, pages] for `stop` tokens, and the generations of pages."""
        width = table_width(self._geometry.pages(stop))
        return self._tables[:, slots, :width], self._generations[:, slots, :width]

    # -- tokens and scores --------------------------------------------------------------------

    def _sample(
        self, sampling: list[Advance], logits: torch.Tensor, result: StepResult
    ) -> torch.Tensor:
        """Sample tokens [samples] on the device, and store the first one of each slot there for the
        next step."""
        if not sampling:
            return torch.empty(0, dtype=torch.int64)
        if self._samples:
            tokens = self._sampler.sample(logits, sampling, self._newest)
        else:
            tokens = torch.empty(len(logits), dtype=torch.int64, device=self._device)
        tokens = self._parallel.from_first(tokens)
        self._newest[to_device(self._sampler.places(sampling), self._device)] = tokens
        wanted = [
            (row, own, most)
            for row, own in enumerate(_each_sample(sampling))
            if (most := self._top_logprobs[own.slot]) is not None and not own.guess
        ]
        if wanted:
            index = to_device(np.array([row for row, _, _ in wanted]), self._device)
            scores = token_logprobs(logits[index], tokens[index], [most for _, _, most in wanted])
            for (_, own, _), score in zip(wanted, scores, strict=True):
                result.logprobs.setdefault(own.request_id, []).append(score)
        return tokens


class _Form(NamedTuple):
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
        # Drafts as sequences of their own each read the past again.
        apart = host.batch.num_rows <= _MOST_ROWS_APART
        for mixed in (not apart, apart):
            yield (host if mixed else host.as_sequences()), mixed


def _each_sample(advances: Sequence[Advance]) -> Iterator[Advance]:
    """The advance of each sampled token."""
    for advance in advances:
        yield from repeat(advance, advance.samples)
