"""`--speculative sparse`: the model drafts for itself, with sparse attention over its own pages."""

from __future__ import annotations

from cairn.engine.drafters.drafter import Drafter


class SparseDrafter(Drafter):
    """The same weights read few pages of the past and draft, one token after the other; then they
    read everything and check the drafts. All of it is one step.

    Drafting writes keys and values where checking writes them again, so drafts need no memory of
    their own.
    """

    tokens = 4
    by_model = True
