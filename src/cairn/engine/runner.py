"""Carries out a plan: builds the step's tensors, runs the model, samples.

`launch` launches a step on the device and returns; `finish` waits for its tokens. The next step may
be launched in between: it reads tokens that the host does not know yet from the device, where the
sampler stored them.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from dataclasses import replace

import numpy as np
import torch

from cairn.attention.backend import AttentionBackend, SparseBackend
from cairn.attention.batch import to_device
from cairn.engine.inputs import StepInputs
from cairn.engine.memory_plan import MemoryPlan
from cairn.engine.model_drafts import ModelDrafts
from cairn.engine.plan import Advance, StepPlan
from cairn.engine.prompt_scores import pooled_rows, score_prompt, scored_rows
from cairn.engine.resolve import EngineChoices
from cairn.engine.slot_tables import SlotTables
from cairn.engine.step_result import InFlight, StepResult
from cairn.engine.stepper import Stepper
from cairn.engine.warm_up import warm_up
from cairn.kernels.compilations import CompilationCounts, Compilations
from cairn.memory.copies import Mover
from cairn.memory.hisparse import HiSparseCoordinator, TierStats
from cairn.memory.kv_pool import KVPool
from cairn.memory.residency import Residency
from cairn.models.interface import LanguageModel
from cairn.models.loader import Progress
from cairn.models.parallel import Parallel


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
        self._memory = memory
        self._compilations = Compilations(choices.device)
        num_slots = memory.limits.max_running_requests
        self.tables = SlotTables(len(choices.groups), num_slots, memory.max_pages, choices.geometry)
        self.stepper = Stepper(choices, self.tables.pages.shape, model, pool, backend, parallel)
        self.drafts = ModelDrafts(self.stepper, self.tables, choices.geometry)
        native = model.spec.sparsity
        self._landmark_id = None if native is None else native.landmark_id
        self._top_prompt_logprobs = [0] * num_slots
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
        own = type(self.stepper.sparse)
        return issubclass(own, SparseBackend) and own.selections is not SparseBackend.selections

    @property
    def gives_hidden(self) -> bool:
        """The model returns the hidden states of its last layer."""
        return self.stepper.model.gives_hidden

    def warm_up(self, *, records: bool, progress: Progress | None = None) -> None:
        """Compile kernels and set up libraries, and record graphs if `records`."""
        self.warm_up_seconds = warm_up(
            self.stepper, self._choices, self._memory, self.tier, records=records, progress=progress
        )

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
        newest = self.stepper.newest[:-1].cpu().numpy()
        for part in (self.tables.pages, self.tables.generations, newest):
            digest.update(part.tobytes())
        return digest.hexdigest()

    def wrap_attention(self, wrap: Callable[[AttentionBackend, KVPool], AttentionBackend]) -> None:
        """Replace the backend by a wrapper that passes on the backend's metadata.

        Steps that are replayed from graphs bypass the wrapper.
        """
        self.stepper.backend = wrap(self.stepper.backend, self.stepper.pool)

    def close(self) -> None:
        """Wait for copies in progress and free host memory."""
        self._compilations.close()
        if self.tier is not None:
            self.tier.close()

    # -- a step -------------------------------------------------------------------------------

    @torch.inference_mode()
    def launch(self, plan: StepPlan) -> InFlight:
        stepper = self.stepper
        self._apply(plan)
        self.drafts.within(plan)
        host = self._inputs(plan)
        sampling = [advance for advance in plan.advances if advance.samples]
        result = StepResult()
        scored, pooled = scored_rows(plan, host), pooled_rows(plan, host)
        form = None if scored or pooled else stepper.form(host, drafted=plan.drafted > 0)
        if form is not None:
            draws = stepper.sampler.plain_draws(sampling)
            logits, tokens = stepper.replay(host, form, draws)
            if draws is not None:
                return self._in_flight(plan, sampling, tokens, result)
        else:
            if plan.drafted and stepper.device.type == "cpu" and stepper.sparse is None:
                # A CPU computes single rows of sequences much faster than chunks.
                host = host.as_sequences() if host.only_decodes else host
            logit_rows = np.concatenate([host.sampled_rows, *scored.values()])
            logits = stepper.eager(sampling, host, logit_rows, result, pooled)
        begin = len(host.sampled_rows)
        tokens = stepper.sample(sampling, logits[:begin], result)
        for s, wanted in scored.items() if stepper.samples else ():
            own = plan.advances[s]
            top = self._top_prompt_logprobs[own.slot]
            score_prompt(own, logits[begin : begin + len(wanted)], top, result)
            begin += len(wanted)
        return self._in_flight(plan, sampling, tokens, result)

    def _apply(self, plan: StepPlan) -> None:
        if self.tier is not None:
            self.tier.begin_step(plan.copies)
        if self._residency is not None:
            self._residency.move(plan.copies.frames)
        for admission in plan.admissions:
            self.stepper.admit(admission)
            self._top_prompt_logprobs[admission.slot] = admission.params.prompt_logprobs or 0
        for edit in plan.edits:
            self.tables.edit(edit)
            if self._residency is not None and edit.group == self._residency.group:
                self._residency.edit(edit.slot, edit.first)
        if self.stepper.sparse is not None:
            again = [(own.slot, own.start, own.reached) for own in plan.advances if own.reached]
            if again:
                self.drafts.forget(*np.array(again).T)

    def _inputs(self, plan: StepPlan) -> StepInputs:
        """The rows of a plan, with page tables."""
        geometry, residency = self._choices.geometry, self._residency
        slots = np.array([advance.slot for advance in plan.advances])
        tables, lives = self.tables.of(slots, max([own.stop for own in plan.advances]))
        per_slot = self.stepper.per_slot
        host = StepInputs.of(plan, geometry, tables, lives, self._landmark_id, per_slot)
        if residency is None:
            return host
        counts = -(-host.batch.kv_lens // geometry.page_size)
        resident = residency.all_here(slots, tables[residency.group], counts)
        return replace(host, batch=replace(host.batch, resident=resident))

    def _in_flight(
        self, plan: StepPlan, sampling: list[Advance], sampled: torch.Tensor, result: StepResult
    ) -> InFlight:
        """The step, whose tokens [samples] are on their way to the host. If it should, the model
        drafts on behind it."""
        stepper, tokens, ready = self.stepper, sampled, None
        drafts = [
            own.slot * stepper.per_slot + guess
            for own in sampling
            for guess in range(1, 1 + own.guesses)
        ]
        if drafts:
            made = stepper.newest[to_device(np.array(drafts), stepper.device)]
            tokens = torch.cat((tokens, made))
        if stepper.device.type == "cuda":
            on_host = torch.empty(tokens.shape, dtype=tokens.dtype, pin_memory=True)
            tokens = on_host.copy_(tokens, non_blocking=True)
            ready = torch.cuda.Event()  # type: ignore[no-untyped-call]
            ready.record()
        self.drafts.behind(plan, sampled)
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

    @torch.inference_mode()
    def draft_ahead(self, plan: StepPlan, result: StepResult) -> None:
        """Let the model draft what follows a finished step, if its plan says so."""
        self.drafts.after(plan, result)
