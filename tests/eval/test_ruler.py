"""RULER's samples, by the numbers of its published definitions."""

from __future__ import annotations

import json
import math
import re
from collections import Counter
from pathlib import Path
from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cairn.cli.main import main
from cairn.errors import ConfigError
from cairn.eval import command
from cairn.eval.haystack import read_text
from cairn.eval.ruler_tasks import DEPTHS, NOISE, TASKS, Corpus, Sample, fit_size, read_questions

TEXT = read_text(None)
SQUAD = {
    "data": [
        {
            "paragraphs": [
                {
                    "context": f"Town {i}{part} lies on river R{i}{part}.",
                    "qas": [
                        {
                            "question": f"On which river lies town {i}{part}?",
                            "answers": [{"text": f"R{i}{part}"}, {"text": f"river R{i}{part}"}],
                            "is_impossible": part == "c",
                        }
                    ],
                }
                for part in "abc"
            ]
        }
        for i in range(40)
    ]
}
HOTPOT = [
    {
        "question": "Who?",
        "answer": "Ada",
        "context": [["One", ["a. ", "b."]], [f"Two {i}", ["Ada wrote it."]]],
    }
    for i in range(3)
]
NUMBERS = {  # keys asked about, values of each, needles beside them
    "niah_single_1": (1, 1, 0),
    "niah_single_2": (1, 1, 0),
    "niah_single_3": (1, 1, 0),
    "niah_multikey_1": (1, 1, 3),
    "niah_multikey_2": (1, 1, None),
    "niah_multikey_3": (1, 1, None),
    "niah_multivalue": (1, 4, 0),
    "niah_multiquery": (4, 1, 0),
}
UUID = r"[0-9a-f]{8}-[0-9a-f]{4}-4[0-9a-f]{3}-[89ab][0-9a-f]{3}-[0-9a-f]{12}"


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Corpus:
    path = tmp_path_factory.mktemp("qa") / "squad.json"
    path.write_text(json.dumps(SQUAD))
    return Corpus(TEXT, *read_questions(str(path)))


def count(sample: Sample) -> int:
    return len((sample.prompt + sample.answer_start).split())


def test_the_command_names_all_tasks() -> None:
    assert tuple(TASKS) == command.RULER_TASKS


@settings(max_examples=60)
@given(name=st.sampled_from(sorted(NUMBERS)), seed=st.integers(0, 10**6), size=st.integers(40, 400))
def test_needles(corpus: Corpus, name: str, seed: int, size: int) -> None:
    queries, values, others = NUMBERS[name]
    sample = TASKS[name].make(Random(seed), corpus, size, 4096, 0)
    kind = "uuid" if name in ("niah_single_3", "niah_multikey_3") else "number"
    pattern = UUID if kind == "uuid" else r"\d{7}"
    needles = re.findall(
        rf"One of the special magic {kind}s for (.+?) is: ({pattern})\.", sample.prompt
    )
    assert len(set(needles)) == len(needles)
    expected = queries * values + (size if others is None else others)
    assert len(needles) == expected
    assert len(sample.answers) == queries * values
    question = sample.prompt.rsplit("\n", 1)[1]
    facts = [(key, value) for key, value in needles if value in sample.answers]
    assert all(key in question for key, _ in facts)
    assert len({key for key, _ in facts}) == queries
    plural = queries * values > 1
    assert sample.prompt.startswith("Some special" if plural else "A special")
    assert sample.answer_start.endswith(" are" if plural else " is")
    lines = sample.prompt.split("\n")
    if name == "niah_single_1":
        assert lines.count(NOISE) == size
    elif others is not None:  # an essay: needles stand at RULER's depths, between sentences
        assert len(lines) == 3
        words = " ".join(
            re.split(rf"One of the special magic .*? is: {pattern}\.", lines[1])
        ).split()
        assert words == (corpus.essay * 9)[:size]


def test_needles_stand_at_the_published_depths() -> None:
    assert (len(DEPTHS), DEPTHS[0], DEPTHS[1], DEPTHS[-1]) == (40, 0, 3, 100)
    text = " ".join(f"Sentence number {i}." for i in range(1000))
    corpus, found = Corpus(text), set()
    for seed in range(200):
        sample = TASKS["niah_single_2"].make(Random(seed), corpus, 3000, 4096, 0)
        before = sample.prompt.split("One of the special")[0]
        found.add(before.count("Sentence number"))
    assert found <= {10 * depth for depth in DEPTHS} and len(found) > 30


@settings(max_examples=40)
@given(seed=st.integers(0, 10**6), size=st.integers(5, 200))
def test_a_chain_of_variables_can_be_followed(corpus: Corpus, seed: int, size: int) -> None:
    sample = TASKS["vt"].make(Random(seed), corpus, size, 4096, 0)
    lines = sample.prompt.split("\n")
    assert lines.count(NOISE) == size
    chain = [line for line in lines if line.startswith("VAR ")]
    value = re.search(r"assigned the value (\d{5}) in", sample.prompt)
    assert value is not None
    known = {value[1]}
    for line in chain:  # each variable stands after the one that it copies
        name, source = re.fullmatch(r"VAR (\w{5}) = (?:VAR )?(\w{5}) ?", line).groups()  # type: ignore[union-attr]
        assert source in known
        known.add(name)
    assert set(sample.answers) == known - {value[1]} and len(sample.answers) == 5


@settings(max_examples=20)
@given(seed=st.integers(0, 10**6), size=st.integers(11, 300), length=st.sampled_from([2048, 4096]))
def test_common_words_are_the_most_common(
    corpus: Corpus, seed: int, size: int, length: int
) -> None:
    sample = TASKS["cwe"].make(Random(seed), corpus, size, length, 0)
    example, asked = (part.split("Question:")[0] for part in sample.prompt.split("Below is")[1:])
    for part, common, words in ((example, (3, 10), (20, 40)), (asked, (6, 30), (size, size))):
        entries = re.findall(r"(\d+)\. (\S+(?: [a-z]\S*)*?)(?= \d+\. |\n)", part)
        assert [int(number) for number, _ in entries] == list(range(1, len(entries) + 1))
        counts = Counter(word for _, word in entries)
        times = common[length == 4096]
        assert len(counts) == words[length == 4096]
        assert sorted(counts.values())[-10:] == [times] * 10
        assert set(counts.values()) <= {times, 3 if length == 4096 else 1}
    assert {word for word, n in counts.items() if n == times} == set(sample.answers)


@settings(max_examples=20)
@given(seed=st.integers(0, 10**6), size=st.integers(30, 3000))
def test_frequent_words_follow_the_zeta_distribution(corpus: Corpus, seed: int, size: int) -> None:
    sample = TASKS["fwe"].make(Random(seed), corpus, size, 4096, 0)
    text = sample.prompt.split("coded words. ")[1].split("\n")[0]
    counts = Counter(text.split())
    expected = [int(size / rank**2 / (math.pi**2 / 6)) for rank in range(1, 82)]
    assert sorted(counts.values(), reverse=True) == [n for n in expected if n]
    assert counts["..."] == expected[0]
    assert [counts[word] for word in sample.answers] == expected[1:4]


@settings(max_examples=30)
@given(seed=st.integers(0, 10**6), size=st.integers(1, 120), index=st.integers(0, 200))
def test_questions_come_with_their_document(
    corpus: Corpus, seed: int, size: int, index: int
) -> None:
    assert len(corpus.qa) == 80  # the impossible ones are left out
    sample = TASKS["qa"].make(Random(seed), corpus, size, 4096, index)
    documents = re.findall(r"Document (\d+):\n(.*)", sample.prompt)
    assert [int(number) for number, _ in documents] == list(range(1, size + 1))
    assert len({text for _, text in documents}) == size
    question = corpus.qa[index % 80]
    assert question.text in sample.prompt and sample.answers == question.answers
    texts = [text for _, text in documents]
    assert corpus.documents[question.sources[0]] in texts
    related = {corpus.documents[number] for number in question.related}
    assert len(related & set(texts)) == min(size - 1, 2)  # its article first
    assert TASKS["qa"].score("It is r0A", ["R0a", "x"]) == 1.0


def test_hotpot_files_are_read(tmp_path: Path) -> None:
    path = tmp_path / "hotpot.json"
    path.write_text(json.dumps(HOTPOT))
    questions, documents = read_questions(str(path))
    assert documents == ("One\na. b.", *(f"Two {i}\nAda wrote it." for i in range(3)))
    assert questions[1].sources == (0, 2) and questions[1].answers == ("Ada",)
    path.write_text('{"data": 3}')
    with pytest.raises(ConfigError, match="--qa"):
        read_questions(str(path))


@pytest.mark.parametrize("name", TASKS)
def test_samples_fill_the_length_and_do_not_exceed_it(corpus: Corpus, name: str) -> None:
    task, length = TASKS[name], 1500
    size = fit_size(task, corpus, length, count, "seed")
    small, large = (
        count(task.make(Random("seed"), corpus, n, length, 0)) + task.max_tokens
        for n in (size, size + 1)
    )
    assert small <= length
    assert large > length or (name == "qa" and size == len(corpus.documents))
    with pytest.raises(ConfigError, match="too short"):
        fit_size(task, corpus, 40, count, "seed")


def test_scores_count_the_answers_that_were_said() -> None:
    task = TASKS["niah_multiquery"]
    assert task.score("They are 12 and 34.", ["12", "34", "56", "78"]) == 0.5
    assert task.score("ABC", ["abc"]) == 1.0


def test_the_command_can_be_stopped_and_resumed(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    answers, output = tmp_path / "answers.jsonl", tmp_path / "out.jsonl"
    base = ["eval", "ruler", "--model", "cairn-nano", "--tasks", "niah_single_1,vt"]
    base += ["--lengths", "400", "--kv-cache-gib", "0.1", "--answers", str(answers)]
    assert main([*base, "--samples", "2"]) == 0
    whole = answers.read_text().splitlines()
    assert len(whole) == 5
    answers.write_text("\n".join(whole[:3]) + '\n{"task": "vt", "len')  # cut off while writing
    asked = [*base, "--samples", "2", "--resume", "--output", str(output)]
    assert main([*asked, "--plot", str(tmp_path / "heat.png")]) == 0
    rows = json.loads(output.read_text())["results"]
    assert {(row["task"], row["asked"]) for row in rows if row["task"] != "all"} == {
        ("niah_single_1", 2),
        ("vt", 2),
    }
    assert all(row["tokens"] <= 400 for row in rows if "tokens" in row)
    assert (tmp_path / "heat.png").stat().st_size > 1000
    assert sorted(answers.read_text().splitlines()) == sorted(whole)
    capsys.readouterr()
    assert main([*base, "--samples", "2", "--resume", "--seed", "9"]) != 0
    assert "seed was 0" in capsys.readouterr().err
