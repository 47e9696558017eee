"""The tasks: what each one hides in the text and what it asks.

`cairn-nano` is trained on exactly the words of these facts and questions.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from random import Random

from cairn.eval.prompts import Query

ATTRIBUTE = "access code"
UNKNOWN = "unknown"

_ONSETS = "b br c ch d dr f g gr h j k l l m m n n p r r s s sh st t t th tr v w z".split()
_VOWELS = "a a a e e e i i o o u ai ea ia".split()
_CODAS = "l n r s t m nd n x ck rn th d ll".split()
_MOST_TOKENS = 4
_ATTEMPTS = 16
_LINKS = 3  # links in a chain of variables


def fact(name: str, value: str) -> str:
    return f" The {ATTRIBUTE} of {name} is {value}."


def question(name: str) -> str:
    return f"What is the {ATTRIBUTE} of {name}?"


def assignment(name: str, value: str) -> str:
    return f" VAR {name} = {value}."


def value_question(name: str) -> str:
    return f"What is the value of {name}?"


def draw_value(rng: Random) -> str:
    """A number of 4 to 6 digits."""
    digits = rng.randint(4, 6)
    return str(rng.randrange(10 ** (digits - 1), 10**digits))


class NameMaker:
    """Makes names that no model knows from random syllables. No word repeats or is in the text."""

    def __init__(
        self, rng: Random, text_words: set[str], count_tokens: Callable[[str], int]
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


@dataclass(frozen=True, slots=True)
class Case:
    """A question, its answer, and the depth of the answer in the text."""

    query: Query
    answer: str
    depth: float


Task = Callable[[Random, NameMaker, Sequence[float], int], list[Case]]
"""(rng, names, depths, keys) -> cases over one text, one for each depth."""


def single(rng: Random, names: NameMaker, depths: Sequence[float], keys: int) -> list[Case]:
    """One fact per text, and a question about it."""
    return [_with_others(rng, names, depth, 0) for depth in depths]


def multikey(rng: Random, names: NameMaker, depths: Sequence[float], keys: int) -> list[Case]:
    """`keys` facts per text: the one at the depth is asked for, the others are anywhere."""
    return [_with_others(rng, names, depth, keys - 1) for depth in depths]


def multiquery(rng: Random, names: NameMaker, depths: Sequence[float], keys: int) -> list[Case]:
    """A fact at every depth of one text, and a question about each. The text is read once."""
    facts = [(depth, names.name(), draw_value(rng)) for depth in depths]
    pieces = tuple((depth, fact(name, value)) for depth, name, value in facts)
    return [Case(Query(pieces, question(name), name), value, d) for d, name, value in facts]


def variables(rng: Random, names: NameMaker, depths: Sequence[float], keys: int) -> list[Case]:
    """`keys` chains of variables. The first variable gets a number at the depth, each later one the
    value of the previous one. The question asks for the last one."""

    def chain(depth: float) -> tuple[list[str], str, list[tuple[float, str]]]:
        links = [names.word() for _ in range(_LINKS)]
        value = draw_value(rng)
        places = sorted([depth, *(rng.uniform(depth, 1.0) for _ in links[1:])])
        texts = map(assignment, links, [value, *links])
        return links, value, list(zip(places, texts, strict=True))

    cases = []
    for depth in depths:
        links, value, pieces = chain(depth)
        for _ in range(keys - 1):
            pieces += chain(rng.random())[2]
        name = links[-1]
        cases.append(Case(Query(tuple(pieces), value_question(name), name), value, depth))
    return cases


def absent(rng: Random, names: NameMaker, depths: Sequence[float], keys: int) -> list[Case]:
    """A fact at every depth of one text, and questions about names that are not in it. Each such
    name shares a word with the name at its depth."""
    cases = []
    for case in multiquery(rng, names, depths, keys):
        given, _, surname = case.query.name.partition(" ")
        other = names.word()
        name = f"{given} {other}" if rng.random() < 0.5 else f"{other} {surname}"
        cases.append(Case(Query(case.query.pieces, question(name), name), UNKNOWN, case.depth))
    return cases


def _with_others(rng: Random, names: NameMaker, depth: float, others: int) -> Case:
    name, value = names.name(), draw_value(rng)
    pieces = [(depth, fact(name, value))]
    pieces += [(rng.random(), fact(names.name(), draw_value(rng))) for _ in range(others)]
    return Case(Query(tuple(pieces), question(name), name), value, depth)


TASKS: Mapping[str, Task] = {
    task.__name__: task for task in (single, multikey, multiquery, variables, absent)
}
