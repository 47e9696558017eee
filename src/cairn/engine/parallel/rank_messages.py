"""What rank 0 says to the other ranks, and they to it."""

from __future__ import annotations

from dataclasses import dataclass

from cairn.engine.memory_plan import MemoryPlan
from cairn.engine.plan import StepPlan
from cairn.kernels.compilations import CompilationCounts
from cairn.memory.copies import Transfer
from cairn.memory.hisparse import TierStats

# -- to a rank ------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Build:
    """Everybody has loaded: meet the others, and make pools and runner."""

    memory: MemoryPlan


@dataclass(frozen=True, slots=True)
class Launch:
    plan: StepPlan


@dataclass(frozen=True, slots=True)
class BackUp:
    """Copy frames to host pages, behind the steps launched so far."""

    transfers: tuple[Transfer, ...]


@dataclass(frozen=True, slots=True)
class Tell:
    """Answer with a State."""

    fingerprint: bool = False


@dataclass(frozen=True, slots=True)
class Close:
    """End."""


ToRank = Build | Launch | BackUp | Tell | Close

# -- from a rank ----------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Loaded:
    """The rank's weights are there."""

    budget: int | None
    """Bytes its device has for the KV cache; None if that is sized by need."""


@dataclass(frozen=True, slots=True)
class Ready:
    """The rank waits for steps."""


@dataclass(frozen=True, slots=True)
class Compiled:
    """Kernels the rank has compiled so far, whenever there are more."""

    counts: CompilationCounts


@dataclass(frozen=True, slots=True)
class Backed:
    """Copies to host memory that have come to their end."""

    transfers: tuple[Transfer, ...]


@dataclass(frozen=True, slots=True)
class State:
    fingerprint: str | None
    """Of everything that plans decide, if asked for: equal on all ranks."""
    tier: TierStats | None


@dataclass(frozen=True, slots=True)
class Failed:
    """The rank failed and ends."""

    message: str
    traceback: str
    peer_lost: bool
    """It failed because another rank did."""


FromRank = Loaded | Ready | Compiled | Backed | State | Failed
