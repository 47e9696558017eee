"""The wording of hidden facts and questions. `cairn-nano` is trained on exactly these words."""

from __future__ import annotations

import random
from collections.abc import Callable

ATTRIBUTE = "access code"
UNKNOWN = "unknown"

_ONSETS = "b br c ch d dr f g gr h j k l l m m n n p r r s s sh st t t th tr v w z".split()
_VOWELS = "a a a e e e i i o o u ai ea ia".split()
_CODAS = "l n r s t m nd n x ck rn th d ll".split()
_MOST_TOKENS = 4
_ATTEMPTS = 16


def fact(name: str, value: str) -> str:
    return f" The {ATTRIBUTE} of {name} is {value}."


def question(name: str) -> str:
    return f"What is the {ATTRIBUTE} of {name}?"


def assignment(name: str, value: str) -> str:
    return f" VAR {name} = {value}."


def value_question(name: str) -> str:
    return f"What is the value of {name}?"


def draw_value(rng: random.Random) -> str:
    """A number of 4 to 6 digits."""
    digits = rng.randint(4, 6)
    return str(rng.randrange(10 ** (digits - 1), 10**digits))


class NameMaker:
    """Makes names that no model knows from random syllables. No word repeats or is in the text."""

    def __init__(
        self, rng: random.Random, text_words: set[str], count_tokens: Callable[[str], int]
    ) -> None:
        self._rng = rng
        self._taken = set(text_words)
        self._count_tokens = count_tokens

    def name(self) -> str:
        return f"{self.word()} {self.word()}"

    def word(self) -> str:
        """A new word. Of several attempts it takes one with few tokens, if there is one."""
        best = min((self._new_word() for _ in range(_ATTEMPTS)), key=self._excess)
        self._taken.add(best)
        return best

    def _excess(self, word: str) -> int:
        return max(0, self._count_tokens(f" {word}") - _MOST_TOKENS)

    def _new_word(self) -> str:
        while True:
            parts = [self._rng.choice(part) for part in (_ONSETS, _VOWELS, _ONSETS, _VOWELS)]
            if self._rng.random() < 0.5:
                parts.append(self._rng.choice(_CODAS))
            word = "".join(parts).capitalize()
            if word not in self._taken:
                return word
