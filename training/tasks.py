"""What samples are made of: facts and questions, chains of variables, copies, plain text."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

import numpy as np
from tokenizers import Tokenizer

from training.names import Name, NameTable
from training.phrases import ATTRIBUTES, LEAD_INS, QUESTIONS, Phrases
from training.samples import Kind, Piece, Placed, Sample, assemble
from training.text import Corpus

_MANY = 10_000
_FIRST_TOKENS = 200

Task = Literal["facts", "variables", "copy", "text"]


@dataclass(frozen=True, slots=True)
class World:
    """Everything samples are drawn from."""

    corpus: Corpus = field(repr=False)
    names: NameTable
    phrases: Phrases = field(repr=False)

    @classmethod
    def of(cls, corpus: Corpus, names: NameTable, tokenizer: Tokenizer) -> World:
        return cls(corpus, names, Phrases.of(tokenizer))


@dataclass(frozen=True, slots=True)
class Mixture:
    """How often each task comes, and how hard it is."""

    facts: float = 1.0
    variables: float = 0.0
    copy: float = 0.0
    text: float = 0.0
    fill: tuple[float, float] = (0.6, 1.0)
    """Share of a sample that is facts and questions, from and to; the rest is text."""
    few: float = 0.0
    """Share of samples with at most `few_limit` facts and questions, often one."""
    few_limit: int = 8
    absent: float = 0.2  # share of questions about a name that is not in the text
    alike: float = 0.3  # share of names that have a word in common with another
    silent: float = 0.2  # share of facts that are not asked about
    restated: float = 0.2  # share of questions that are replaced by the fact's sentence
    at_end: float = 0.3  # share of samples with all questions at the end
    at_start: float = 0.0
    """Share of samples with a fact in the first sentence or one of the first. Rows with little
    before them are unlike all others, and random places are hardly ever there."""

    def draw(self, rng: np.random.Generator) -> Task:
        shares = np.array([self.facts, self.variables, self.copy, self.text])
        tasks: tuple[Task, ...] = ("facts", "variables", "copy", "text")
        return tasks[int(rng.choice(4, p=shares / shares.sum()))]


def make_sample(rng: np.random.Generator, world: World, mixture: Mixture, length: int) -> Sample:
    task = mixture.draw(rng)
    if task == "facts":
        placed = place_facts(rng, world, mixture, length)
    elif task == "variables":
        placed = place_variables(rng, world, mixture, length)
    elif task == "copy":
        placed = place_copies(rng, world, length)
    else:
        placed = []
    return assemble(rng, world.corpus, length, placed)


@dataclass(slots=True)
class _Room:
    """The pieces so far, and the number of tokens that can still be placed."""

    left: int
    placed: list[Placed] = field(default_factory=list)

    def add(self, *placed: Placed) -> bool:
        """Place all of these pieces, or none."""
        needed = sum(len(p.piece) for p in placed)
        if needed > self.left:
            return False
        self.left -= needed
        self.placed.extend(placed)
        return True


def place_facts(
    rng: np.random.Generator, world: World, mixture: Mixture, length: int
) -> list[Placed]:
    """Facts at random places, questions behind them, each name and fact asked about once."""
    names, phrases = world.names, world.phrases
    room = _Room(_budget(rng, mixture, length))
    at_end = rng.random() < mixture.at_end
    at_start = mixture.at_start > 0 and rng.random() < mixture.at_start
    present: list[Name] = []
    used: set[int] = set()
    for _ in range(_most(rng, mixture)):
        name = _new_name(rng, names, present, used, mixture.alike)
        tokens = names.encode(name)
        attribute = int(rng.integers(len(ATTRIBUTES)))
        form = int(rng.integers(len(QUESTIONS)))
        if present and rng.random() < mixture.absent:
            asked = Placed(_later(rng, 0.0, at_end), phrases.asked(attribute, form, tokens, None))
            if not room.add(asked):
                break
            continue
        code, at = phrases.code(rng), float(rng.random())
        if at_start and not present:
            at = 0.0 if rng.random() < 0.5 else at * min(1.0, _FIRST_TOKENS / length)
        lead = int(rng.integers(len(LEAD_INS)))
        fact = Placed(at, phrases.fact(attribute, lead, tokens, code))
        if present and rng.random() < mixture.silent:
            fits = room.add(fact)
        else:
            if rng.random() < mixture.restated:
                question = phrases.restated(attribute, tokens, code)
            else:
                question = phrases.asked(attribute, form, tokens, code)
            fits = room.add(fact, Placed(_later(rng, at, at_end), question))
        if not fits:
            break
        present.append(name)
    return room.placed


def place_variables(
    rng: np.random.Generator, world: World, mixture: Mixture, length: int
) -> list[Placed]:
    """Chains of one to three links, defined in order, and questions for the value at their end."""
    names, phrases = world.names, world.phrases
    room = _Room(_budget(rng, mixture, length))
    at_end = rng.random() < mixture.at_end
    for _ in range(_most(rng, mixture)):
        words = rng.choice(names.invented, size=rng.integers(1, 4), replace=False)
        chain = [names.tokens[word] for word in words]
        chain.append(phrases.code(rng))
        places = np.sort(rng.random(len(chain) - 1))
        placed = [
            Placed(float(at), phrases.assigned(chain[-2 - i], chain[-1 - i]))
            for i, at in enumerate(places)
        ]
        asked = Placed(_later(rng, float(places[-1]), at_end), phrases.traced(chain))
        if not room.add(*placed, asked):
            break
    return room.placed


def place_copies(rng: np.random.Generator, world: World, length: int) -> list[Placed]:
    """Spans that occur twice, at any distance and in any order, so that only content finds them.

    Some have few different tokens, so that the token before does not tell which comes next."""
    room = _Room(int(length * rng.uniform(0.7, 1.0)))
    vocabulary = world.phrases.tokenizer.get_vocab_size()
    source = int(rng.integers(3))
    alphabet = rng.integers(1, vocabulary, size=rng.integers(24, 96))
    while True:
        size = int(rng.integers(6, 24))
        if source == 0:
            span = rng.integers(1, vocabulary, size=size).astype(np.int32)
        elif source == 1:
            span = rng.choice(alphabet, size=size).astype(np.int32)
        else:
            start = rng.integers(len(world.corpus.tokens) - size)
            span = world.corpus.tokens[start : start + size]
        known = 1 if source == 0 else 3  # tokens that identify the span
        first = Piece.of((span, Kind.NONE))
        again = Piece.of((span[:known], Kind.NONE), (span[known:], Kind.COPY))
        at = float(rng.random())
        if not room.add(Placed(at, first), Placed(_later(rng, at, False), again)):
            return room.placed


def _budget(rng: np.random.Generator, mixture: Mixture, length: int) -> int:
    return int(length * rng.uniform(*mixture.fill))


def _most(rng: np.random.Generator, mixture: Mixture) -> int:
    """Facts and questions, if that many fit."""
    if rng.random() < mixture.few:
        return int(np.exp(rng.uniform(0.0, np.log(mixture.few_limit + 1))))
    return _MANY


def _later(rng: np.random.Generator, at: float, at_end: bool) -> float:
    return 1.0 if at_end else float(rng.uniform(at, 1.0))


def _new_name(
    rng: np.random.Generator, names: NameTable, present: list[Name], used: set[int], alike: float
) -> Name:
    """Each word occurs in one name only, except a word that a name may share with a name in the
    text. So no name is part of another."""
    shares = [name for name in present if name[1] >= 0]
    while True:
        name, old = names.draw(rng), -1
        if shares and rng.random() < alike:
            model = shares[rng.integers(len(shares))]
            name = names.draw_like(rng, model)
            old = name[0] if name[0] == model[0] else name[1]
        new = {word for word in name if word not in (old, -1)}
        if new and name[0] != name[1] and not new & used:
            used |= new
            return name
