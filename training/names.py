"""Names that no model can know: random syllables, and some capitalised words of the texts."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
from tokenizers import Tokenizer

from training.text import Tokens

Name = tuple[int, int]
"""Indices of the given name and the surname in the table; -1 if there is no surname."""

_ONSETS = "b br c ch d dr f g gr h j k l l m m n n p r r s s sh st t t th tr v w z".split()
_VOWELS = "a a a e e e i i o o u ai ea ia".split()
_CODAS = "l n r s t m nd n x ck rn th d ll".split()
_MOST_TOKENS = 4
_WORD_SHARE = 0.15  # share of a table's words that come from the texts
_SINGLE_SHARE = 0.15  # share of names with one word only


@dataclass(frozen=True, slots=True)
class NameTable:
    """Words with their tokens, each as it reads after a space. Pairs of them are the names."""

    words: Sequence[str] = field(repr=False)
    tokens: Sequence[Tokens] = field(repr=False)
    invented: int
    """Number of first words that are random syllables and do not occur in the texts."""

    def draw(self, rng: np.random.Generator) -> Name:
        if rng.random() < _SINGLE_SHARE:
            return self.draw_word(rng), -1
        given, surname = rng.integers(len(self.words), size=2).tolist()
        if given >= self.invented and surname >= self.invented:
            given = self.draw_word(rng)  # so that the pair does not occur in the texts either
        return given, surname

    def draw_word(self, rng: np.random.Generator) -> int:
        return int(rng.integers(self.invented))

    def draw_like(self, rng: np.random.Generator, name: Name) -> Name:
        """Another name that shares the given name or the surname of one that has both."""
        given, surname = name
        if surname >= self.invented or rng.random() < 0.5:
            return self.draw_word(rng), surname
        return given, self.draw_word(rng)

    def encode(self, name: Name) -> Tokens:
        given, surname = name
        if surname < 0:
            return self.tokens[given]
        return np.concatenate((self.tokens[given], self.tokens[surname]))

    def text(self, name: Name) -> str:
        return " ".join(self.words[i] for i in name if i >= 0)


def make_names(
    tokenizer: Tokenizer, texts: Sequence[str], size: int, seed: int
) -> tuple[NameTable, NameTable]:
    """Two tables without a word in common: to train on, and to evaluate with."""
    rng = np.random.default_rng(seed)
    known: set[str] = set()
    for text in texts:
        known.update(re.findall(r"[A-Za-z]+", text))
    words = sorted(word for word in known if re.fullmatch(r"[A-Z][a-z]{2,9}", word))
    rng.shuffle(words)
    words = words[: int(2 * size * _WORD_SHARE)]
    # A dict, because the order of a set would differ between runs with the same seed.
    invented = dict.fromkeys(_invent(rng, 4 * size))
    new = [word for word in invented if word not in known]
    return (
        _table(tokenizer, new[0::2], words[0::2], size),
        _table(tokenizer, new[1::2], words[1::2], size),
    )


def _table(
    tokenizer: Tokenizer, invented: Sequence[str], words: Sequence[str], size: int
) -> NameTable:
    """Words of few tokens only."""

    def short(names: Sequence[str], most: int) -> dict[str, Tokens]:
        encoded = tokenizer.encode_batch([f" {name}" for name in names], add_special_tokens=False)
        ids = [entry.ids for entry in encoded]
        kept = [i for i, tokens in enumerate(ids) if len(tokens) <= _MOST_TOKENS][:most]
        return {names[i]: np.asarray(ids[i], np.int32) for i in kept}

    known = short(words, size)
    new = short(invented, size - len(known))
    return NameTable([*new, *known], [*new.values(), *known.values()], len(new))


def _invent(rng: np.random.Generator, count: int) -> list[str]:
    def draw(parts: Sequence[str]) -> list[str]:
        return [parts[i] for i in rng.integers(len(parts), size=count).tolist()]

    syllables = [draw(part) for part in (_ONSETS, _VOWELS, _ONSETS, _VOWELS)]
    third = draw([""] * 12 + ["ra", "na", "li"])
    coda = draw([""] * len(_CODAS) + _CODAS)
    return ["".join(parts).capitalize() for parts in zip(*syllables, third, coda, strict=True)]
