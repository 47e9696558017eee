from __future__ import annotations

import random
import re

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cairn.eval import command
from cairn.eval.tasks import TASKS, NameMaker, assignment, fact

DEPTHS = [1.0, 0.5, 0.0]


def test_the_command_names_all_tasks() -> None:
    assert tuple(TASKS) == command.TASKS


@settings(max_examples=40)
@given(seed=st.integers(0, 2**32), keys=st.integers(1, 9), task=st.sampled_from(sorted(TASKS)))
def test_cases_can_be_answered_from_what_is_hidden(seed: int, keys: int, task: str) -> None:
    rng = random.Random(seed)
    cases = TASKS[task](rng, NameMaker(rng, set(), len), DEPTHS, keys)
    assert [case.depth for case in cases] == DEPTHS
    for case in cases:
        pieces, name = case.query.pieces, case.query.name
        assert name in case.query.question
        texts = [text for _, text in pieces]
        assert len(set(texts)) == len(texts)
        if task == "variables":
            assert len(pieces) == 3 * keys
            placed = {text: depth for depth, text in pieces}
            value, depth = name, 1.0
            while not value.isdecimal():  # back along the chain, which only goes forward
                match = next(m for t in texts if (m := re.fullmatch(rf" VAR {value} = (\w+)\.", t)))
                assert placed[assignment(value, match[1])] <= depth
                depth = placed[assignment(value, match[1])]
                value = match[1]
            assert (value, depth) == (case.answer, case.depth)
        elif task == "absent":
            assert case.answer == "unknown"
            assert len(pieces) == 3 and not any(name in text for text in texts)
            (near,) = (text for depth, text in pieces if depth == case.depth)
            assert len(set(name.split()) & set(near.split())) == 1
        else:
            assert len(pieces) == {"single": 1, "multikey": keys, "multiquery": 3}[task]
            found = [depth for depth, text in pieces if text == fact(name, case.answer)]
            assert found == [case.depth]


def test_questions_about_one_text_hide_the_same() -> None:
    rng = random.Random(0)
    cases = TASKS["multiquery"](rng, NameMaker(rng, set(), len), DEPTHS, 1)
    assert len({case.query.pieces for case in cases}) == 1


def test_seeds_decide() -> None:
    def draw(seed: int) -> object:
        rng = random.Random(seed)
        return TASKS["multikey"](rng, NameMaker(rng, set(), len), DEPTHS, 4)

    assert draw(1) == draw(1) != draw(2)


@pytest.mark.parametrize("task", ["single", "variables"])
def test_training_has_the_same_words(task: str) -> None:
    """What `cairn-nano` was trained on is what it is asked here, token for token."""
    phrases = pytest.importorskip("training.phrases")
    text = pytest.importorskip("training.text")
    from cairn.eval.prompts import plain_question
    from cairn.eval.tasks import ATTRIBUTE, UNKNOWN, question, value_question

    tokenizer = text.load_tokenizer()
    own = phrases.Phrases.of(tokenizer)

    def tokens(part: str) -> list[int]:
        ids: list[int] = tokenizer.encode(part).ids
        return ids

    def encode(part: str) -> object:
        import numpy as np

        return np.asarray(tokens(part), np.int32)

    name, other, code = (encode(part) for part in (" Mira Kolvane", " Kolu", " 48213"))
    access = phrases.ATTRIBUTES.index(ATTRIBUTE)
    if task == "single":
        fact_piece = own.fact(access, 0, name, code)
        assert fact_piece.tokens.tolist() == tokens(fact("Mira Kolvane", "48213"))
        for value, said in ((code, "48213"), (None, UNKNOWN)):
            asked = own.asked(access, 0, name, value)
            expected = plain_question(question("Mira Kolvane")) + fact("Mira Kolvane", said)
            assert asked.tokens.tolist() == tokens(f"{expected}<|end|>")
    else:
        link = own.assigned(name, other)
        assert link.tokens.tolist() == tokens(assignment("Mira Kolvane", "Kolu"))
        traced = own.traced([name, other, code])
        expected = plain_question(value_question("Mira Kolvane")) + " Mira Kolvane = Kolu = 48213."
        assert traced.tokens.tolist() == tokens(f"{expected}<|end|>")
