"""A device that lags behind its host, on a CPU: steps and copies run when the test says so.

Launched steps wait in a lane, as kernels wait in a stream; the host gets to see a step's tokens by
running the lane up to it. Copies to the host run beside it, each behind the steps that had been
launched when it was started.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from typing import Any

from cairn.engine.engine import Engine
from cairn.engine.plan import StepPlan
from cairn.engine.runner import Runner
from cairn.engine.step_result import InFlight, StepResult
from cairn.memory.copies import Transfer
from cairn.memory.hisparse import HiSparseCoordinator


def tier_of(engine: Engine) -> HiSparseCoordinator:
    assert engine.runner.tier is not None
    return engine.runner.tier


class Lane:
    """Operations in the order they were given, each run once."""

    def __init__(self) -> None:
        self._waiting: list[Callable[[], None]] = []
        self.ran = 0

    @property
    def end(self) -> int:
        return self.ran + len(self._waiting)

    def add(self, operation: Callable[[], None]) -> int:
        """Returns how many operations must have run for this one to have."""
        self._waiting.append(operation)
        return self.end

    def run(self, until: int) -> None:
        while self.ran < until:
            operation = self._waiting.pop(0)
            self.ran += 1
            operation()


class LaggingRunner:
    """Stands before an engine's runner; a launch only puts the step into the lane."""

    def __init__(self, engine: Engine, lane: Lane) -> None:
        self.real: Runner = engine.runner
        self.lane = lane
        self.tier = self.real.tier
        self._steps: dict[int, tuple[int, list[InFlight]]] = {}
        engine.runner = self  # type: ignore[assignment]

    def __getattr__(self, name: str) -> Any:
        return getattr(self.real, name)

    def launch(self, plan: StepPlan) -> InFlight:
        launched: list[InFlight] = []
        until = self.lane.add(lambda: launched.append(self.real.launch(plan)))
        sampling = tuple(advance for advance in plan.advances if advance.samples)
        step = InFlight(plan, sampling, None, None, StepResult())  # type: ignore[arg-type]
        self._steps[id(step)] = until, launched
        return step

    def finish(self, step: InFlight) -> StepResult:
        until, launched = self._steps.pop(id(step))
        self.lane.run(until)
        return self.real.finish(launched[0])


class ScriptedMover:
    """Copies that end when the test says, in the order it says, one page at a time.

    The bytes move either as soon as the lane allows it or when the copy ends, which are the
    extremes of what a real one may do in between.
    """

    def __init__(self, engine: Engine, lane: Lane, *, late: bool, rng: random.Random) -> None:
        self._copy = tier_of(engine)._copy_out
        self._lane = lane
        self._late = late
        self._rng = rng
        self.moving: list[tuple[Transfer, int]] = []  # and what the lane must have run before it
        self.done: list[Transfer] = []
        tier_of(engine)._mover = self  # type: ignore[assignment]

    def back_up(self, transfers: Sequence[Transfer]) -> None:
        until = self._lane.end
        if not self._late:
            self._lane.add(lambda: self._copy(transfers))
            until = self._lane.end
        self.moving += [(transfer, until) for transfer in transfers]

    def finish(self, count: int) -> None:
        """End some of the copies that can have come to their end."""
        for _ in range(count):
            ready = [i for i, (_, until) in enumerate(self.moving) if until <= self._lane.ran]
            if not ready:
                return
            transfer, _ = self.moving.pop(self._rng.choice(ready))
            if self._late:
                self._copy([transfer])
            self.done.append(transfer)

    def poll(self) -> list[Transfer]:
        done, self.done = self.done, []
        return done

    def wait(self) -> list[Transfer]:
        """The host waits, and the device goes on meanwhile."""
        if not self.done:
            self._lane.run(min(until for _, until in self.moving))
            self.finish(1)
        return self.poll()

    def close(self) -> None:
        self._lane.run(self._lane.end)
        self.finish(len(self.moving))
