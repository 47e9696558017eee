"""What is hidden and what is asked, task by task."""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from cairn.eval.prompts import Query
from cairn.eval.wording import (
    UNKNOWN,
    NameMaker,
    assignment,
    draw_value,
    fact,
    question,
    value_question,
)

_LINKS = 3  # of a chain of variables


@dataclass(frozen=True, slots=True)
class Case:
    """A question, its answer, and how deep in the text the answer stands."""

    query: Query
    answer: str
    depth: float


Task = Callable[[random.Random, NameMaker, Sequence[float], int], list[Case]]
"""(rng, names, depths, keys) -> cases over one text, one for each depth."""


def single(rng: random.Random, names: NameMaker, depths: Sequence[float], keys: int) -> list[Case]:
    """One fact, asked for."""
    return [_with_others(rng, names, depth, 0) for depth in depths]


def multikey(
    rng: random.Random, names: NameMaker, depths: Sequence[float], keys: int
) -> list[Case]:
    """One fact at the depth, asked for, and others anywhere: `keys` in all."""
    return [_with_others(rng, names, depth, keys - 1) for depth in depths]


def multiquery(
    rng: random.Random, names: NameMaker, depths: Sequence[float], keys: int
) -> list[Case]:
    """A fact at every depth of one text, and a question for each: the text is read once."""
    facts = [(depth, names.name(), draw_value(rng)) for depth in depths]
    pieces = tuple((depth, fact(name, value)) for depth, name, value in facts)
    return [Case(Query(pieces, question(name), name), value, d) for d, name, value in facts]


def variables(
    rng: random.Random, names: NameMaker, depths: Sequence[float], keys: int
) -> list[Case]:
    """A variable gets a number at the depth, others get its value further on; the last one is
    asked for. `keys` chains in all."""

    def chain(depth: float) -> tuple[list[str], str, list[tuple[float, str]]]:
        links = [names.word() for _ in range(_LINKS)]
        value = draw_value(rng)
        places = sorted([depth, *(rng.uniform(depth, 1.0) for _ in links[1:])])
        values = [value, *links]
        pieces = [
            (place, assignment(link, given))
            for place, link, given in zip(places, links, values, strict=False)
        ]
        return links, value, pieces

    cases = []
    for depth in depths:
        links, value, pieces = chain(depth)
        for _ in range(keys - 1):
            pieces += chain(rng.random())[2]
        name = links[-1]
        cases.append(Case(Query(tuple(pieces), value_question(name), name), value, depth))
    return cases


def absent(rng: random.Random, names: NameMaker, depths: Sequence[float], keys: int) -> list[Case]:
    """A fact at every depth of one text, and questions for names that are not there: each shares
    a word with the name at its depth."""
    cases = multiquery(rng, names, depths, keys)
    return [
        Case(Query(case.query.pieces, question(name), name), UNKNOWN, case.depth)
        for case in cases
        for name in [_alike(rng, names, case.query.name)]
    ]


def _alike(rng: random.Random, names: NameMaker, name: str) -> str:
    given, _, surname = name.partition(" ")
    other = names.word()
    return f"{given} {other}" if rng.random() < 0.5 else f"{other} {surname}"


def _with_others(rng: random.Random, names: NameMaker, depth: float, others: int) -> Case:
    name, value = names.name(), draw_value(rng)
    pieces = [(depth, fact(name, value))]
    pieces += [(rng.random(), fact(names.name(), draw_value(rng))) for _ in range(others)]
    return Case(Query(tuple(pieces), question(name), name), value, depth)


TASKS: Mapping[str, Task] = {
    "single": single,
    "multikey": multikey,
    "multiquery": multiquery,
    "variables": variables,
    "absent": absent,
}
