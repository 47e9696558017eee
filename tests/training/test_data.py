"""Samples say what they claim: answers are in the text, absent names are not, lengths fit."""

from __future__ import annotations

import re
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer

from training.batches import Batches, collate, stream
from training.curriculum import CURRICULUM, shrunk
from training.names import make_names
from training.phrases import all_phrases
from training.samples import Kind, Sample
from training.tasks import Mixture, World, make_sample
from training.text import EOS, read_texts, train_tokenizer

MIXTURES = {
    "many": Mixture(),
    "few": Mixture(few=1.0, absent=0.4),
    "restated": Mixture(restated=1.0),
    "at-end": Mixture(few=1.0, at_end=1.0),
    "at-start": Mixture(few=1.0, at_start=1.0),
    "hard": Mixture(alike=0.9, absent=0.5, silent=0.5),
}
FACT = re.compile(r"[Tt]he (\w+ \w+) of ([A-Za-z]+(?: [A-Za-z]+)?) is (\d+)\.")
ASKED = re.compile(
    r"Question: [^?\n]* the (\w+ \w+) of ([A-Za-z ]+)\?\n"
    r"Answer: The (\w+ \w+) of ([A-Za-z ]+) is (\w+)\.<\|end\|>"
)


def text_of(tokenizer: Tokenizer, sample: Sample) -> str:
    text: str = tokenizer.decode(sample.tokens.tolist(), skip_special_tokens=False)
    return text


def outside_questions(text: str) -> str:
    return ASKED.sub("", text)


@pytest.mark.parametrize("name", MIXTURES)
@settings(max_examples=25)
@given(seed=st.integers(0, 2**32), length=st.sampled_from([63, 252, 504, 2016]))
def test_questions_are_answered_by_the_text(
    name: str, seed: int, length: int, world: World, tokenizer: Tokenizer
) -> None:
    sample = make_sample(np.random.default_rng(seed), world, MIXTURES[name], length)
    assert len(sample.tokens) == len(sample.kinds) == len(sample.answers) == length
    text = text_of(tokenizer, sample)
    asked = list(ASKED.finditer(text))
    assert len(asked) == len(set(sample.answers.tolist()) - {-1})
    for match in asked:
        attribute, person, again, person_again, value = match.groups()
        assert (attribute, person) == (again, person_again)
        stated = [m.groups() for m in FACT.finditer(outside_questions(text[: match.start()]))]
        if value == "unknown":
            assert person not in outside_questions(text)
        else:
            assert (attribute, person, value) in stated


def test_lookups_are_marked_where_the_value_begins(world: World, tokenizer: Tokenizer) -> None:
    rng = np.random.default_rng(0)
    for _ in range(20):
        sample = make_sample(rng, world, Mixture(absent=0.3), 504)
        for place in np.flatnonzero(sample.kinds == Kind.FIRST):
            assert tokenizer.id_to_token(sample.tokens[place - 1]) == "Ġis"
            assert re.fullmatch(
                r" \d\d", tokenizer.decode(sample.tokens[place : place + 1].tolist())
            )
            rest = sample.tokens[place + 1 :][: np.argmin(sample.kinds[place + 1 :] == Kind.REST)]
            assert 1 <= len(rest) <= 2
        for place in np.flatnonzero(sample.kinds == Kind.ABSENT):
            assert tokenizer.decode(sample.tokens[place : place + 1].tolist()) == " unknown"


def test_sentences_read_back_as_the_same_tokens(world: World, tokenizer: Tokenizer) -> None:
    """What is spliced from parts is what the tokenizer makes of the whole."""
    rng = np.random.default_rng(1)
    for _ in range(200):
        name = world.names.encode(world.names.draw(rng))
        attribute, code = int(rng.integers(8)), world.phrases.code(rng)
        for piece in (
            world.phrases.fact(attribute, int(rng.integers(6)), name, code),
            world.phrases.asked(attribute, int(rng.integers(5)), name, code),
            world.phrases.asked(attribute, int(rng.integers(5)), name, None),
            world.phrases.assigned(name, code),
            world.phrases.traced([name, world.names.tokens[3], code]),
        ):
            text = tokenizer.decode(piece.tokens.tolist(), skip_special_tokens=False)
            assert tokenizer.encode(text).ids == piece.tokens.tolist()


@settings(max_examples=25)
@given(seed=st.integers(0, 2**32))
def test_chains_of_variables_end_in_their_value(
    seed: int, world: World, tokenizer: Tokenizer
) -> None:
    mixture = Mixture(facts=0, variables=1)
    text = text_of(tokenizer, make_sample(np.random.default_rng(seed), world, mixture, 504))
    answers = re.findall(r"value of (\w+)\?\nAnswer: (.*?)\.<", text)
    assert answers
    for asked, chain in answers:
        links = chain.split(" = ")
        assert links[0] == asked and links[-1].isdigit()
        for name, value in pairwise(links):
            assert f" VAR {name} = {value}." in text


def test_facts_at_the_start(world: World, tokenizer: Tokenizer) -> None:
    """Half of them are the first sentence, the others are near."""
    mixture = Mixture(few=1.0, few_limit=1, at_start=1.0, restated=0.0)
    firsts = 0
    for seed in range(40):
        sample = make_sample(np.random.default_rng(seed), world, mixture, 2016)
        text = text_of(tokenizer, sample)
        found = FACT.search(text)
        assert found is not None
        before = tokenizer.encode(text[: found.start()], add_special_tokens=False)
        assert len(before.ids) < 400  # so much and a sentence
        firsts += len(before.ids) < 8  # a few words may lead in
    assert 10 < firsts < 35


@settings(max_examples=25)
@given(seed=st.integers(0, 2**32))
def test_copies_stood_before(seed: int, world: World) -> None:
    sample = make_sample(np.random.default_rng(seed), world, Mixture(facts=0, copy=1), 504)
    tokens, copied = sample.tokens, sample.kinds == Kind.COPY
    assert copied.sum() > 50
    starts = np.flatnonzero(copied & ~np.roll(copied, 1))
    for start in starts:
        end = start + int(np.argmin(np.append(copied[start:], False)))
        span = tokens[start:end].tobytes()
        assert tokens[:start].tobytes().find(span) >= 0


def test_names_are_new_and_never_shared(worlds: tuple[World, World]) -> None:
    seen, held = (world.names for world in worlds)
    assert not set(seen.words) & set(held.words)
    known = set(re.findall(r"[A-Za-z]+", " ".join(read_texts())))
    for table in (seen, held):
        assert not set(table.words[: table.invented]) & known


def test_names_and_tokenizer_follow_from_their_inputs(tokenizer: Tokenizer) -> None:
    texts = read_texts()
    assert train_tokenizer(texts, all_phrases()).to_str() == tokenizer.to_str()
    first, second = (make_names(tokenizer, texts[:1], 50, seed=3)[0].words for _ in range(2))
    assert first == second


def test_two_digits_are_a_token(tokenizer: Tokenizer) -> None:
    assert tokenizer.encode(" 48213 of 7").tokens == ["Ġ48", "21", "3", "Ġof", "Ġ7"]
    assert tokenizer.token_to_id(EOS) == 0


def test_batches_depend_on_seed_phase_and_step_alone(world: World) -> None:
    phase = shrunk(CURRICULUM[1], steps=6, batch=2, chunks=2)

    def tokens(index: int, seed: int, start: int, workers: int) -> list[list[int]]:
        batches = Batches(world, phase, index, seed, chunk=64)
        return [batch.tokens.flatten().tolist() for batch in stream(batches, start, workers, False)]

    whole = tokens(0, 0, 0, 0)
    assert tokens(0, 0, 3, 0) == whole[3:]
    assert tokens(0, 0, 0, 2) == whole
    assert tokens(1, 0, 0, 0) != whole and tokens(0, 1, 0, 0) != whole


def test_targets_follow_their_places(world: World) -> None:
    rng = np.random.default_rng(5)
    samples = [make_sample(rng, world, Mixture(), 252) for _ in range(4)]
    batch = collate(samples)
    flat = batch.tokens.flatten()
    assert (flat[batch.places + 1] == batch.targets).all()
    assert (batch.places % 252 != 251).all()
    numbers = set(batch.answers.tolist()) - {-1}
    assert numbers == set(range(len(numbers)))
