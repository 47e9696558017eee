"""The interface of drafters, and the registry that finds one by name."""

from __future__ import annotations

from array import array
from collections.abc import Mapping, Sequence
from typing import ClassVar

from cairn.sparsity.registry import import_class

FIRST_DRAFTS = 7
"""Drafts of a request at most, unless all those of its last check came true."""


class Drafter:
    """Guesses the next tokens of a request. Wrong guesses cost time and change no output."""

    tokens: ClassVar[int] = FIRST_DRAFTS
    """Tokens to draft at most, unless the user says otherwise. `draft` is asked for more than
    FIRST_DRAFTS only while all drafts of a request come true."""
    by_model: ClassVar[bool] = False
    """The model itself drafts, and reads the past sparsely for it. `draft` is not called."""

    def draft(self, token_ids: array[int], most: int) -> Sequence[int]:
        """At most `most` tokens that may follow `token_ids`, prompt and output. Called before
        every step of a request, so it must be fast."""
        raise NotImplementedError


_DRAFTERS: Mapping[str, str] = {
    "ngram": "cairn.engine.drafters.ngram:NgramDrafter",
    "sparse": "cairn.engine.drafters.sparse:SparseDrafter",
}
"""name -> "module:class"."""


def drafter_class(name: str) -> type[Drafter]:
    """The class of a drafter that comes with Cairn, or of a user's drafter `module:Class`."""
    return import_class("speculative", name, _DRAFTERS, Drafter)
