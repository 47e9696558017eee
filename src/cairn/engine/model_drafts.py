"""Lets the model draft: within a step, behind a launched step, or after a finished one.

`drafting` says which requests draft and from where. Here the steps run that make the drafts; each
computes one token of each request, and stores the next on the device.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import torch

from cairn.attention.backend import Graph
from cairn.engine.drafting import Drafting, Made, Selected, Unseen
from cairn.engine.inputs import StepInputs
from cairn.engine.plan import StepPlan
from cairn.engine.slot_tables import SlotTables
from cairn.engine.step_result import StepResult
from cairn.engine.stepper import Stepper
from cairn.memory.geometry import PageGeometry

_SELECTS, _KEEPS = Graph("sparse", mixed=False), Graph("kept", mixed=False)
"""Recorded steps that select pages, and that read those selected last."""


class ModelDrafts:
    def __init__(self, stepper: Stepper, tables: SlotTables, geometry: PageGeometry) -> None:
        self._stepper = stepper
        self._tables = tables
        self._geometry = geometry
        self._ahead: dict[int, Made] = {}  # drafts that were made ahead, by slot
        self._followed: StepPlan | None = None  # the step behind which drafts are launched already
        self._selected: Selected | None = None  # whose pages drafts selected last

    def within(self, plan: StepPlan) -> None:
        """Make the drafts that a step checks, except for those that were made ahead."""
        made, self._ahead = self._ahead, {}
        missing = [
            own
            for own in plan.advances
            if own.guesses and not (own.slot in made and made[own.slot].serves(own))
        ]
        if missing:
            self._draft(Drafting.within(missing))

    def behind(self, plan: StepPlan, tokens: torch.Tensor) -> None:
        """If its plan says so, let the device draft on from the tokens [samples] that a launched
        step samples, before the host knows them. If graphs cannot do it, `after` does."""
        self._followed = plan if plan.ahead and self._draft_behind(plan, tokens) else None

    def after(self, plan: StepPlan, result: StepResult) -> None:
        """Make the drafts that follow a finished step, if its plan says so and they are not made
        yet. The next step finds them, as far as its plan asks for them."""
        if not plan.ahead:
            return
        drafting = Drafting.after(plan, result.sampled, result.guesses)
        if not drafting.advances:
            return
        # Drafts that failed may have completed pages, and so may those that were made behind them.
        followed = self._followed is plan
        reached = np.array([own.stop for own in drafting.advances])
        if followed:
            reached = np.maximum(reached, drafting.stops)
        self.forget(drafting.slots, drafting.starts, reached)
        if not followed:
            self._draft(drafting)
        self._ahead = drafting.made()

    def forget(self, slots: np.ndarray, starts: np.ndarray, reached: np.ndarray) -> None:
        """Forget pages that slots [n] completed when they reached so many tokens: they compute
        those from `starts` on again."""
        sparse = self._stepper.sparse
        if sparse is None:
            return
        pages = self._tables.completed(slots, starts, reached, sparse.units)
        if pages.size:
            sparse.forget(pages)

    def _draft_behind(self, plan: StepPlan, tokens: torch.Tensor) -> bool:
        """False if graphs cannot do it."""
        stepper, drafting = self._stepper, Drafting.during(plan)
        if stepper.graphs is None or not drafting.advances:
            return False
        slots = drafting.slots
        first = self._first(drafting)
        second = first.drafting(slots * stepper.per_slot + 1, 1)
        second = replace(second, batch=replace(second.batch, kept=True))
        draws = stepper.sampler.draft_draws(slots, drafting.starts + 1, 1)
        forms = [stepper.form(own, drafted=False) for own in (first, second)]
        steps = [(form.graph, form.size) for form in forms if form is not None]
        kinds = [graph for graph, _ in steps]
        if draws is None or kinds != [_KEEPS if first.batch.kept else _SELECTS, _KEEPS]:
            return False
        samples = np.array([own.samples for own in plan.advances])
        sampled = np.zeros(self._tables.pages.shape[1], dtype=np.int64)  # by slot
        sampled[[own.slot for own in plan.advances]] = np.cumsum(samples) - samples
        unseen = Unseen.of(
            stepper.device,
            seeds=stepper.sampler.request_seeds(slots),
            first=sampled[slots],
            checked=drafting.unseen,
            places=slots * stepper.per_slot,
            room=np.array([own.room for own in drafting.advances]),
        )
        if not first.batch.kept:
            self._selected = Selected.by(drafting, self._geometry.page_size)
        unseen.count_right(tokens, stepper.newest, int(drafting.unseen.max()))
        stepper.graphs.draft(first, [*steps, *steps[1:] * plan.ahead][: plan.ahead], draws, unseen)
        return True

    def _first(self, drafting: Drafting) -> StepInputs:
        """The inputs of the step in which requests make their first drafts."""
        slots, starts = drafting.slots, drafting.starts
        prompts = np.array([own.prompt_len for own in drafting.advances])
        tables = self._tables.of(slots, int(drafting.stops.max()))
        places = slots * self._stepper.per_slot
        first = StepInputs.single_rows(
            self._geometry, starts, prompts, drafting.newest, places, *tables
        )
        kept = self._selected is not None and self._selected.serves(drafting)
        return replace(first, batch=replace(first.batch, kept=kept))

    def _draft(self, drafting: Drafting) -> None:
        """Let the model draft, token after token. The host prepares the first draft of each request
        and counts on from there."""
        stepper = self._stepper
        counts, slots, starts = drafting.counts, drafting.slots, drafting.starts
        places = slots * stepper.per_slot
        begun = self._first(drafting)
        kept = begun.batch.kept
        sent = False
        for later in range(counts[0]):
            count = int((counts > later).sum())
            host = begun if later == 0 else begun.drafting(places[:count] + later, later)
            host = replace(host, batch=replace(host.batch, kept=kept))
            form = stepper.form(host, drafted=False)
            if form is None or form.graph != _KEEPS:
                # It may overwrite these pages, with its rows in another order.
                self._selected, kept = None, False
            if form is None:
                now, result = drafting.parts(later), StepResult()
                logits = stepper.eager(now, host, host.sampled_rows, result)
                stepper.sample(now, logits, result)
                continue
            positions = starts[:count] + 1 + later
            draws = stepper.sampler.draft_draws(slots[:count], positions, 1 + later)
            logits, _ = stepper.replay(host, form, draws, new_tables=not sent)
            sent = True
            if draws is None:
                stepper.sample(drafting.parts(later), logits, StepResult())
            if not later and form.graph == _SELECTS:
                # The pages that this draft selected serve others too.
                kept = True
                self._selected = Selected.by(drafting, self._geometry.page_size)
        # What drafts completed is computed again.
        self.forget(slots, starts, starts + counts)
