"""Texts of exact length, with what is hidden in them where it was asked for, and once."""

from __future__ import annotations

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cairn.errors import ConfigError
from cairn.eval.haystack import Prose, hide, read_text, split_sentences
from cairn.eval.prompts import Frame, Query, build_prompts, choose_style, plain_question
from cairn.eval.tasks import NameMaker, draw_value, fact, question
from cairn.models.source import BUNDLED
from cairn.text.tokenizer import ChatTemplate, Tokenizer
from tests.helpers import byte_tokenizer

NANO = Tokenizer.from_folder(BUNDLED["cairn-nano"])
assert NANO is not None
BYTES = Tokenizer(byte_tokenizer(), None)
CHAT = Tokenizer(
    byte_tokenizer(),
    ChatTemplate("{% for m in messages %}<{{ m.role }}>{{ m.content }}</s>{% endfor %}<bot>", {}),
)
TOKENIZERS = {"nano": NANO, "bytes": BYTES, "chat": CHAT}
PROSE = {
    name: Prose(read_text(None), lambda text, t=t: t.encode(text, add_special_tokens=False))  # type: ignore[misc]
    for name, t in TOKENIZERS.items()
}


def frame_of(name: str) -> Frame:
    tokenizer = TOKENIZERS[name]
    return Frame(tokenizer, choose_style(tokenizer, "auto"))


def test_sentences_are_the_text() -> None:
    text = read_text(None)
    assert "".join(split_sentences(text)) == f" {text.strip()}"
    assert max(map(len, split_sentences("word " * 3000))) <= 2000


def test_an_excerpt_goes_on_where_a_shorter_one_ends() -> None:
    prose = Prose("One. Two two. Three three three.", lambda text: list(text.encode()))
    long = prose.excerpt(500, seed=3)
    for length in (1, 7, 40, 500):
        part = prose.excerpt(length, seed=3)
        assert len(part.tokens) == length
        assert part.tokens == long.tokens[:length]
        assert part.breaks == [b for b in long.breaks if b < length] + [length]
    starts = {bytes(prose.excerpt(12, seed).tokens) for seed in range(20)}
    assert len(starts) == 3


@settings(max_examples=60)
@given(
    seed=st.integers(0, 2**32),
    length=st.integers(400, 3000),
    depths=st.lists(st.floats(0, 1), min_size=1, max_size=4),
    which=st.sampled_from(sorted(TOKENIZERS)),
)
def test_prompts_are_exact_and_hold_every_fact_once(
    seed: int, length: int, depths: list[float], which: str
) -> None:
    frame, prose, rng = frame_of(which), PROSE[which], random.Random(seed)
    tokenizer = TOKENIZERS[which]
    names = NameMaker(rng, prose.words, lambda w: len(tokenizer.encode(w)))
    facts = [(depth, names.name(), draw_value(rng)) for depth in depths]
    absent = names.name()
    pieces = tuple((depth, fact(name, value)) for depth, name, value in facts)
    queries = [Query(pieces, question(name), name) for _, name, _ in facts]
    if length < 1000 and len(depths) > 2 and which != "nano":
        return  # bytes are long
    prompts = build_prompts(frame, prose, queries, length, seed)
    for query, prompt in zip(queries, prompts, strict=True):
        assert len(prompt.tokens) == length
        text = tokenizer.decode(prompt.tokens)
        assert text.count(query.question) == 1
        assert absent not in text
        before, after = frame.around(query.question, query.name)
        hidden = [len(tokenizer.encode(s, add_special_tokens=False)) for _, s in pieces]
        room = length - len(before) - len(after) - sum(hidden)
        for (depth, sentence), start, size in zip(pieces, prompt.starts, hidden, strict=True):
            assert text.count(sentence) == 1
            assert tokenizer.decode(prompt.tokens[start : start + size]) == sentence
            # Before it: the frame, facts that come first, and the depth's share of prose, up to
            # the end of a sentence.
            others = sum(n for s, n in zip(prompt.starts, hidden, strict=True) if s < start)
            prose_before = start - len(before) - others
            if depth == 1:
                assert prose_before == room
            else:
                assert round(depth * room) - 60 <= prose_before <= room
        assert prompt.tokens[: len(before)] == before
        assert prompt.tokens[length - len(after) :] == after


@given(depth=st.floats(0, 1), seed=st.integers(0, 1000))
@settings(max_examples=60)
def test_facts_stand_between_sentences(depth: float, seed: int) -> None:
    excerpt = PROSE["nano"].excerpt(700, seed)
    hidden = hide(excerpt, [(depth, [-1, -2])], 700)
    (start,) = hidden.starts
    assert start in excerpt.breaks
    wanted = round(depth * 700) if depth < 1 else 700
    assert start >= wanted and not any(wanted <= b < start for b in excerpt.breaks)
    assert hidden.tokens == [*excerpt.tokens[:start], -1, -2, *excerpt.tokens[start:]]


def test_questions_over_one_text_share_its_pages() -> None:
    frame = frame_of("nano")
    rng = random.Random(0)
    names = NameMaker(rng, set(), len)
    facts = [(d, names.name(), draw_value(rng)) for d in (0.0, 0.5, 0.9)]
    pieces = tuple((d, fact(name, value)) for d, name, value in facts)
    queries = [Query(pieces, question(name), name) for _, name, _ in facts]
    first, *others = (p.tokens for p in build_prompts(frame, PROSE["nano"], queries, 2048, 7))
    for other in others:
        same = next(i for i, (a, b) in enumerate(zip(first, other, strict=True)) if a != b)
        assert same > 2048 - 40


def test_too_short_a_text_is_refused() -> None:
    query = Query(((0.5, fact("Mira", "1234")),), question("Mira"), "Mira")
    with pytest.raises(ConfigError, match="length of 20 tokens is too short"):
        build_prompts(frame_of("nano"), PROSE["nano"], [query], 20, 0)


def test_the_form_that_fits_the_model() -> None:
    assert [choose_style(TOKENIZERS[n], "auto") for n in ("nano", "bytes", "chat")] == [
        "plain",
        "plain",
        "chat",
    ]
    with pytest.raises(ConfigError, match="no chat template"):
        choose_style(BYTES, "chat")
    before, after = frame_of("nano").around(question("Mira Kolvane"), "Mira Kolvane")
    assert before == []
    assert NANO is not None
    text = "\nQuestion: What is the access code of Mira Kolvane?\nAnswer:"
    assert plain_question(question("Mira Kolvane")) == text
    assert NANO.decode(after) == text
    started = Frame(BYTES, "plain", " Of {name}:").around("What?", "Mira")[1]
    assert BYTES.decode(started) == "\nQuestion: What?\nAnswer: Of Mira:"
    before, after = frame_of("chat").around("What?", "Mira")
    assert BYTES.decode(before).startswith("<user>Read the text")
    assert BYTES.decode(after).endswith("answer unknown.</s><bot>")


def test_names_are_new_words() -> None:
    names = NameMaker(random.Random(1), {"Bada"}, lambda word: len(word) // 2)
    words = [word for _ in range(300) for word in names.name().split()]
    assert len(set(words)) == len(words) == 600
    assert "Bada" not in words
    assert max(map(len, words)) <= 8  # few tokens: 4 with the space before


def test_texts_that_cannot_be_read() -> None:
    with pytest.raises(ConfigError, match="--text /nowhere cannot be read"):
        read_text("/nowhere")
    with pytest.raises(ConfigError, match="--text /dev/null is empty"):
        read_text("/dev/null")
