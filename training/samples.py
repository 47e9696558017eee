"""A sample: tokens of an exact length, what each token is for, and which answer it belongs to."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import IntEnum

import numpy as np
import numpy.typing as npt

from training.text import Corpus, Tokens

Kinds = npt.NDArray[np.uint8]
Answers = npt.NDArray[np.int16]


class Kind(IntEnum):
    """What kind of prediction a token is. Each kind has a loss of its own."""

    NONE = 0  # not predictable, or not trained
    TEXT = 1  # prose
    COPY = 2  # a span that occurred before
    FORM = 3  # the answer's words around its value: the name, mostly
    FIRST = 4  # where the value begins: the lookup
    REST = 5  # the value's other tokens
    ABSENT = 6  # the answer says that the value is unknown
    VARIABLE = 7  # a chain of variables, down to its value


@dataclass(frozen=True, slots=True)
class Piece:
    """Tokens that stay together."""

    tokens: Tokens
    kinds: Kinds
    answer_from: int = -1
    """The answer begins here and ends with the piece; -1: there is none."""

    @classmethod
    def of(cls, *parts: tuple[Tokens, Kind], answer_from: int = -1) -> Piece:
        tokens = np.concatenate([tokens for tokens, _ in parts])
        kinds = np.array([kind for _, kind in parts], np.uint8)
        return cls(tokens, kinds.repeat([len(tokens) for tokens, _ in parts]), answer_from)

    def __len__(self) -> int:
        return len(self.tokens)


@dataclass(frozen=True, slots=True)
class Placed:
    """A piece, and where in the text it goes: 0 is its beginning, 1 its end."""

    at: float
    piece: Piece


@dataclass(frozen=True, slots=True)
class Sample:
    tokens: Tokens  # [length]
    kinds: Kinds  # [length], of each token as a target
    answers: Answers  # [length], the number of the answer it belongs to, -1 for none


def assemble(
    rng: np.random.Generator, corpus: Corpus, length: int, placed: Sequence[Placed]
) -> Sample:
    """A sample of exact length: the pieces, in order, between the sentences of a text."""
    missing = length - sum(len(p.piece) for p in placed)
    if missing < 0:
        raise ValueError(f"the pieces are {-missing} tokens longer than the sample of {length}")
    text, breaks = corpus.excerpt(rng, missing)
    tokens: list[Tokens] = []
    kinds: list[Kinds] = []
    answers: list[Answers] = []

    def put(part: Tokens, part_kinds: Kinds, answer: int = -1, answer_from: int = 0) -> None:
        tokens.append(part)
        kinds.append(part_kinds)
        numbers = np.full(len(part), -1, np.int16)
        numbers[answer_from:] = answer
        answers.append(numbers)

    done = count = 0
    for entry in sorted(placed, key=lambda p: p.at):
        # The first break at or behind the wanted place; at 1 that is the end of the text.
        wanted = round(entry.at * missing)
        found = np.searchsorted(breaks, wanted)
        place = missing if entry.at >= 1 or found == len(breaks) else breaks[found]
        place = max(done, place)
        put(text[done:place], np.full(place - done, Kind.TEXT, np.uint8))
        done = place
        piece = entry.piece
        if piece.answer_from < 0:
            put(piece.tokens, piece.kinds)
        else:
            put(piece.tokens, piece.kinds, count, piece.answer_from)
            count += 1
    put(text[done:], np.full(missing - done, Kind.TEXT, np.uint8))
    return Sample(np.concatenate(tokens), np.concatenate(kinds), np.concatenate(answers))
