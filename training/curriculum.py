"""The phases of training. Lookups are learnt first where everything is in the window. Then the
window shrinks, then chunks are selected, then texts grow long."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from training.samples import Kind
from training.tasks import Mixture

ALL = 1 << 20
"""A top-k that reads every chunk."""
_GOLDEN = 0.6180339887

LOSS_WEIGHTS: Mapping[Kind, float] = {
    Kind.TEXT: 0.2,
    Kind.COPY: 1.0,
    Kind.FORM: 0.5,
    Kind.FIRST: 1.5,
    Kind.REST: 0.5,
    Kind.ABSENT: 0.4,
    Kind.VARIABLE: 0.5,
}


@dataclass(frozen=True, slots=True)
class Shape:
    """The shape of a batch. A chunk of 63 tokens and its landmark row fill a page."""

    chunks: int
    batch: int

    def tokens(self, chunk: int) -> int:
        return self.chunks * (chunk - 1)


@dataclass(frozen=True, slots=True)
class Phase:
    name: str
    shapes: tuple[Shape, ...]  # taken in turn
    steps: int
    window: int
    top_k: int
    mixture: Mixture
    lr: float = 3e-3
    final_lr: float = 3e-3
    warmup: int = 20
    recompute: bool = False
    open_every: int = 0
    """All chunks are read once in this many turns of the shapes, because only chunks that are read
    are trained: one that is never selected would never learn to be. 0 for never."""
    rivals_every: int = 0
    """Chunks of other texts compete in the last of this many turns, unless all chunks are read in
    it. 0 for never."""
    most_ahead: float = 1.0
    """Rivals' scores are raised by up to this: a longer text would have better ones."""
    goal: float = 1.01
    """The phase ends early when this share of held-out questions is answered."""
    weights: Mapping[Kind, float] = field(default_factory=lambda: LOSS_WEIGHTS)

    def lr_at(self, step: int) -> float:
        """A warm-up, then a straight line to `final_lr`."""
        done = step / max(self.steps, 1)
        return (self.lr + (self.final_lr - self.lr) * done) * min(1.0, (step + 1) / self.warmup)

    def reads_all_at(self, turn: int) -> bool:
        return self.open_every > 0 and turn % self.open_every == 0

    def rivals_ahead_at(self, turn: int) -> float | None:
        """How much rivals are raised: evenly spread, equal in a resumed run; None: no rivals."""
        if not self.rivals_every or self.reads_all_at(turn):
            return None
        if turn % self.rivals_every != self.rivals_every - 1:
            return None
        return turn * _GOLDEN % 1.0 * self.most_ahead


_NEAR = Mixture(
    facts=0.65,
    copy=0.25,
    text=0.1,
    fill=(0.8, 1.0),
    absent=0.1,
    alike=0.1,
    silent=0.1,
    restated=0.6,
)
_MIXED = Mixture(facts=0.55, variables=0.1, copy=0.25, text=0.1, restated=0.3)
_FAR = Mixture(
    facts=0.75, variables=0.1, copy=0.1, text=0.05, fill=(0.1, 0.9), few=0.25, restated=0.2
)

_LOOKUPS = {**LOSS_WEIGHTS, Kind.TEXT: 0.1, Kind.REST: 1.5}
"""For later phases: when words are known, every token of a value must be found."""

CURRICULUM = (
    Phase("near", (Shape(4, 256),), 3000, 256, ALL, _NEAR, warmup=100, goal=0.97),
    Phase("window", (Shape(8, 128),), 1500, 128, ALL, _MIXED, goal=0.97),
    Phase(
        "2k",
        (Shape(32, 32),),
        1500,
        128,
        16,
        _FAR,
        lr=2e-3,
        final_lr=1e-3,
        open_every=2,
        goal=0.985,
        weights=_LOOKUPS,
    ),
    Phase(
        "8k",
        (Shape(32, 32), Shape(128, 8)),
        2000,
        128,
        16,
        _FAR,
        lr=1e-3,
        final_lr=4e-4,
        recompute=True,
        open_every=4,
        weights=_LOOKUPS,
    ),
    Phase(
        "long",
        (Shape(32, 32), Shape(128, 8)),
        1000,
        128,
        16,
        replace(_FAR, few=0.4, at_start=0.35),
        lr=4e-4,
        final_lr=5e-5,
        warmup=50,
        recompute=True,
        open_every=4,
        rivals_every=2,
        weights=_LOOKUPS,
    ),
)


def for_full_attention(phase: Phase) -> Phase:
    """The twin sees the same samples in the same order; it has no window to shrink."""
    return replace(phase, recompute=False, rivals_every=0)


def shrunk(phase: Phase, *, steps: int, batch: int, chunks: int) -> Phase:
    """The same phase at a size for tests and CPUs."""
    shapes = tuple(Shape(min(s.chunks, chunks), min(s.batch, batch)) for s in phase.shapes)
    return replace(phase, shapes=shapes, steps=steps, warmup=min(phase.warmup, steps))
