"""Rank 0's runner: sends every step to the other ranks, then all ranks run it together."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import fields, replace
from typing import TYPE_CHECKING, Any, cast

from cairn.attention.backend import AttentionBackend
from cairn.engine.parallel.rank_process import BackUp, Launch, State, Tell
from cairn.engine.plan import StepPlan
from cairn.engine.runner import Runner
from cairn.engine.step_result import InFlight, StepResult
from cairn.errors import CairnError, RankError
from cairn.interrupts import interrupts_held_back
from cairn.kernels.compilations import CompilationCounts
from cairn.memory.copies import Transfer
from cairn.memory.hisparse import HiSparseCoordinator, TierStats
from cairn.memory.kv_pool import KVPool

if TYPE_CHECKING:
    from cairn.engine.parallel.ranks import Ranks


class LeadRunner(Runner):
    def __init__(self, *parts: Any) -> None:
        super().__init__(*parts)
        self.ranks = cast("Ranks", self.stepper.parallel)
        if self.tier is not None:
            self.mover = LeadMover(self.tier, self)

    def launch(self, plan: StepPlan) -> InFlight:
        with self.together():
            self.ranks.send(Launch(_for_others(plan)))
            return super().launch(plan)

    def finish(self, step: InFlight) -> StepResult:
        with self.together():
            # A GPU that waits for a rank that has ended would never become ready.
            while step.ready is not None and not step.ready.query():  # type: ignore[no-untyped-call]
                self.ranks.watch()
            return super().finish(step)

    @contextmanager
    def together(self) -> Iterator[None]:
        """Run something that all ranks do together. An error in it ends all of them.

        Ctrl-C waits until it is done.
        """
        self.ranks.check()
        # All ranks must finish what they started together.
        with interrupts_held_back(), self.ranks.ended_by_failure():
            yield

    def watch(self) -> None:
        with self.together():
            self.ranks.watch()

    def _states(self, *, fingerprint: bool = False) -> list[State]:
        with self.together():
            self.ranks.send(Tell(fingerprint))
            return self.ranks.collect(State)

    def check(self) -> None:
        own = self.fingerprint()
        for rank, state in enumerate(self._states(fingerprint=True), 1):
            if state.fingerprint != own:
                raise RankError(f"rank {rank} has other tables than rank 0; this is a bug")

    def tier_stats(self) -> TierStats | None:
        """Totals of all ranks; the waiting time is that of the rank that waited longest."""
        own = super().tier_stats()
        if own is None:
            return None
        parts = [own, *(state.tier for state in self._states() if state.tier is not None)]
        sums = {x.name: sum(getattr(part, x.name) for part in parts) for x in fields(TierStats)}
        return TierStats(**{**sums, "stall_seconds": max(part.stall_seconds for part in parts)})

    def compilations(self) -> CompilationCounts:
        counts = (super().compilations(), *self.ranks.compilations.values())
        return CompilationCounts(*(sum(phase) for phase in zip(*counts, strict=True)))

    def wrap_attention(self, wrap: Callable[[AttentionBackend, KVPool], AttentionBackend]) -> None:
        raise CairnError(
            f"tp is {self.ranks.size}: attention can be watched where one rank has all heads; "
            "use tp=1"
        )

    def close(self) -> None:
        self.ranks.close()
        super().close()


class LeadMover:
    """Copies to host memory of all ranks: a page has arrived when every rank has its part."""

    def __init__(self, tier: HiSparseCoordinator, runner: LeadRunner) -> None:
        self._tier = tier
        self._runner = runner
        self._own = 0  # copies of rank 0 in progress
        self._missing: dict[Transfer, int] = {}  # ranks that do not have it yet
        self._done: list[Transfer] = []

    def back_up(self, transfers: Sequence[Transfer]) -> None:
        ranks = self._runner.ranks
        with self._runner.together():
            ranks.send(BackUp(tuple(transfers)))
            self._tier.back_up(transfers)
        self._own += len(transfers)
        self._missing |= dict.fromkeys(transfers, ranks.size)

    def poll(self) -> list[Transfer]:
        with self._runner.together():
            self._take_own(self._tier.poll())
            self._take(self._runner.ranks.take_backed(waiting=False))
        return self._pop()

    def wait(self) -> list[Transfer]:
        with self._runner.together():
            while self._missing and not self._done:
                if self._own:
                    own = self._tier.wait()
                    if not own:
                        break  # one failed, and is tried again
                    self._take_own(own)
                else:  # only other ranks have copies in progress
                    self._take(self._runner.ranks.take_backed(waiting=True))
        return self._pop()

    def _take_own(self, transfers: Sequence[Transfer]) -> None:
        self._own -= len(transfers)
        self._take(transfers)

    def _take(self, transfers: Sequence[Transfer]) -> None:
        for transfer in transfers:
            self._missing[transfer] -= 1
            if not self._missing[transfer]:
                del self._missing[transfer]
                self._done.append(transfer)

    def _pop(self) -> list[Transfer]:
        done, self._done = self._done, []
        return done


def _for_others(plan: StepPlan) -> StepPlan:
    """The plan without what only the rank that samples needs."""
    advances = plan.advances
    if any(advance.allowed for advance in advances):
        advances = tuple(advance._replace(allowed=()) for advance in advances)
    return replace(plan, advances=advances, admissions=())
