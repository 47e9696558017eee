"""The tasks of RULER (Hsieh et al., 2024), by its published definitions.

A task turns a size (words, sentences, documents) into a `Sample`. Prompts, numbers and scores are
those of RULER's synthetic benchmark (https://github.com/NVIDIA/RULER, Apache-2.0). Differences: the
essay is any text, its sentences are split by a rule instead of by NLTK, and questions come from a
file of the user's in the format of SQuAD or HotpotQA.
"""

from __future__ import annotations

import itertools
import json
import math
import string
import uuid
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from pathlib import Path
from random import Random
from typing import Any, Literal

from cairn.errors import ConfigError
from cairn.eval.haystack import split_sentences

Kind = Literal["numbers", "words", "uuids"]

NOISE = "The grass is green. The sky is blue. The sun is yellow. Here we go. There and back again."
_NEEDLE = "One of the special magic {kind} for {key} is: {value}."
DEPTHS = [round(100 * i / 39) for i in range(40)]
"""Places of needles in an essay, in % of its sentences."""
_COMMON_WORDS = 10
_SHORT = 4096  # tokens; shorter lists of words repeat their words less often
_HOPS = 4  # of a chain of variables
_ALPHA = 2.0  # of the zeta distribution of coded words
_CODED_LENGTH = 6  # letters


@dataclass(frozen=True, slots=True)
class Sample:
    prompt: str
    answer_start: str
    """Words that begin the model's answer."""
    answers: tuple[str, ...]


@dataclass(frozen=True)
class Corpus:
    """What samples are made of."""

    text: str
    """The essay in which needles are hidden."""
    qa: tuple[Question, ...] = ()
    """Questions over documents, in the order in which they are asked."""
    documents: tuple[str, ...] = ()

    @cached_property
    def essay(self) -> list[str]:
        return self.text.split()

    @cached_property
    def name_parts(self) -> tuple[list[str], list[str]]:
        """Adjectives and nouns. The key of a needle is one of each."""
        return _words("adjectives"), _words("nouns")

    @cached_property
    def words(self) -> list[str]:
        return sorted({word for kind in ("nouns", "adjectives", "verbs") for word in _words(kind)})


@dataclass(frozen=True, slots=True)
class Question:
    text: str
    answers: tuple[str, ...]
    sources: tuple[int, ...]
    """Documents that hold the answer."""
    related: tuple[int, ...] = ()
    """Documents to add before others."""


Make = Callable[[Random, Corpus, int, int, int], Sample]
"""(rng, corpus, size, length, index) -> the sample with this index. `size` grows with the wanted
`length` in tokens."""


@dataclass(frozen=True, slots=True)
class Task:
    make: Make
    max_tokens: int
    """Of an answer."""
    least_size: int = 1
    most_size: Callable[[Corpus], int] | None = None
    """If the corpus limits the size."""
    scores: Literal["all", "part"] = "all"

    def score(self, said: str, answers: Sequence[str]) -> float:
        """The share of answers that `said` contains; with "part", 1 if it contains any."""
        found = [answer.lower() in said.lower() for answer in answers]
        return float(any(found)) if self.scores == "part" else sum(found) / len(found)


def _niah(
    rng: Random,
    corpus: Corpus,
    size: int,
    length: int,
    index: int,
    *,
    haystack: Literal["noise", "essay", "needle"] = "essay",
    key_kind: Kind = "words",
    value_kind: Kind = "numbers",
    keys: int = 1,
    values: int = 1,
    queries: int = 1,
) -> Sample:
    """Find the values of one or more keys."""
    draw_key, draw_value = (_drawer(rng, kind, corpus) for kind in (key_kind, value_kind))
    facts = {draw_key(): [draw_value() for _ in range(values)] for _ in range(max(keys, queries))}

    def needle(key: str, value: str) -> str:
        return _NEEDLE.format(kind=value_kind, key=key, value=value)

    needles = [needle(key, value) for key, own in facts.items() for value in own]
    rng.shuffle(needles)
    if haystack == "essay":
        context = _hide_in_essay(rng, corpus.essay, size, needles)
    else:
        lines = [
            NOISE if haystack == "noise" else needle(draw_key(), draw_value()) for _ in range(size)
        ]
        context = "\n".join(_insert(rng, lines, needles))
    asked = rng.sample(list(facts), queries)
    query = asked[0] if queries == 1 else f"{', '.join(asked[:-1])}, and {asked[-1]}"
    answers = tuple(value for key in asked for value in facts[key])
    if len(answers) == 1:
        start, are, what, kind = "A", "is", "is", value_kind[:-1]
    else:
        start, are, what, kind = "Some", "are", "are all", str(value_kind)
    return Sample(
        f"{start} special magic {kind} {are} hidden within the following text. Make sure to "
        f"memorize it. I will quiz you about the {kind} afterwards.\n{context}\nWhat {what} the "
        f"special magic {kind} for {query} mentioned in the provided text?",
        f" The special magic {kind} for {query} mentioned in the provided text {are}",
        answers,
    )


def _variables(rng: Random, corpus: Corpus, size: int, length: int, index: int) -> Sample:
    """Find the variables that got a value directly or through others."""
    names: list[str] = []
    while len(names) < _HOPS + 1:
        name = "".join(rng.choices(string.ascii_uppercase, k=5))
        if name not in names:
            names.append(name)
    value = str(rng.randrange(10_000, 99_999))
    chain = [f"VAR {names[0]} = {value}"]
    chain += [f"VAR {later} = VAR {earlier} " for earlier, later in itertools.pairwise(names)]
    lines = [NOISE] * size
    for done, place in enumerate(sorted(rng.sample(range(size), len(chain)))):
        lines.insert(place + done, chain[done])
    context = "\n".join(lines)
    return Sample(
        "Memorize and track the chain(s) of variable assignment hidden in the following text.\n\n"
        f"{context}\nQuestion: Find all variables that are assigned the value {value} in the text "
        "above.",
        " Answer: According to the chain(s) of variable assignment in the text above, "
        f"{len(names)} variables are assigned the value {value}, they are: ",
        tuple(names),
    )


def _common_words(rng: Random, corpus: Corpus, size: int, length: int, index: int) -> Sample:
    """Find the words that appear most often in a list. An example with its answer comes first."""

    def listed(words: int, common_times: int, other_times: int) -> tuple[str, list[str]]:
        chosen = rng.sample(corpus.words, words)
        common, others = chosen[:_COMMON_WORDS], chosen[_COMMON_WORDS:]
        entries = common * common_times + others * other_times
        rng.shuffle(entries)
        return _numbered(entries), common

    if length < _SHORT:
        example, shown = listed(20, 3, 1)
        context, common = listed(size, 6, 1)
    else:
        example, shown = listed(40, 10, 3)
        context, common = listed(size, 30, 3)

    def ask(entries: str) -> str:
        return (
            "Below is a numbered list of words. In these words, some appear more often than "
            f"others. Memorize the ones that appear most often.\n{entries}\nQuestion: What are the "
            f"{_COMMON_WORDS} most common words in the above list?"
        )

    start = f" Answer: The top {_COMMON_WORDS} words that appear most often in the list are:"
    prompt = f"{ask(example)}{start} {_numbered(shown)}\n{ask(context)}"
    return Sample(prompt, start, tuple(common))


def _frequent_words(rng: Random, corpus: Corpus, size: int, length: int, index: int) -> Sample:
    """Find the three most frequent coded words. Frequencies follow a zeta distribution, whose first
    rank is noise."""
    ranks = max(4, length // 50)
    vocabulary: dict[str, None] = {"...": None}
    while len(vocabulary) < ranks:
        vocabulary["".join(rng.choices(string.ascii_lowercase, k=_CODED_LENGTH))] = None
    words = list(vocabulary)
    zeta = math.pi**2 / 6  # of _ALPHA = 2
    text = [w for rank, w in enumerate(words, 1) for _ in range(int(size * rank**-_ALPHA / zeta))]
    rng.shuffle(text)
    return Sample(
        "Read the following coded text and track the frequency of each coded word. Find the three "
        f"most frequently appeared coded words. {' '.join(text)}\nQuestion: Do not provide any "
        "explanation. Please ignore the dots '....'. What are the three most frequently appeared "
        "words in the above coded text?",
        " Answer: According to the coded text above, the three most frequently appeared words are:",
        tuple(words[1:4]),
    )


def _questions(rng: Random, corpus: Corpus, size: int, length: int, index: int) -> Sample:
    """Answer a question from one of many documents."""
    question = corpus.qa[index % len(corpus.qa)]
    chosen = list(question.sources)
    related = [number for number in question.related if number not in chosen]
    room = max(0, size - len(chosen))
    if room <= len(related):
        chosen += rng.sample(related, room)
    else:
        taken = {*chosen, *related}
        others = [number for number in range(len(corpus.documents)) if number not in taken]
        chosen += related + rng.sample(others, min(len(others), room - len(related)))
    rng.shuffle(chosen)
    documents = (f"Document {i}:\n{corpus.documents[n]}" for i, n in enumerate(chosen, 1))
    instruction = (
        "Answer the question based on the given documents. Only give me the answer and do not "
        "output any other words.\n\n"
    )
    context = "\n\n".join(documents)
    return Sample(
        f"{instruction}The following are given documents.\n\n{context}\n\n{instruction}"
        f"Question: {question.text}",
        " Answer:",
        question.answers,
    )


def _hide_in_essay(rng: Random, essay: list[str], size: int, needles: Sequence[str]) -> str:
    """Put needles between the sentences of the essay's first `size` words, repeated if needed."""
    words = (essay * (-(-size // len(essay))))[:size]
    sentences = [sentence.strip() for sentence in split_sentences(" ".join(words))]
    places = sorted(len(sentences) * depth // 100 for depth in rng.sample(DEPTHS, len(needles)))
    parts, done = [], 0
    for needle, place in zip(needles, places, strict=True):
        parts += [*sentences[done:place], needle]
        done = place
    return " ".join([*parts, *sentences[done:]])


def _insert(rng: Random, lines: list[str], needles: Sequence[str]) -> list[str]:
    places = sorted(rng.sample(range(len(lines)), len(needles)), reverse=True)
    for place, needle in zip(places, needles, strict=True):
        lines.insert(place, needle)
    return lines


def _drawer(rng: Random, kind: Kind, corpus: Corpus) -> Callable[[], str]:
    if kind == "numbers":
        return lambda: str(rng.randrange(10**6, 10**7))
    if kind == "uuids":
        return lambda: str(uuid.UUID(int=rng.getrandbits(128), version=4))
    adjectives, nouns = corpus.name_parts
    return lambda: f"{rng.choice(adjectives)}-{rng.choice(nouns)}"


def _numbered(words: Sequence[str]) -> str:
    return " ".join(f"{i}. {word}" for i, word in enumerate(words, 1))


def _words(part_of_speech: str) -> list[str]:
    try:
        from wonderwords import RandomWord
    except ImportError as error:
        raise ConfigError(
            "RULER draws its words from the package wonderwords, which is not installed; "
            "pip install 'cairn-llm[eval]'"
        ) from error
    words: list[str] = RandomWord().filter(include_parts_of_speech=[part_of_speech])
    return words


def read_questions(path: str) -> tuple[tuple[Question, ...], tuple[str, ...]]:
    """Questions and documents of a file in the format of SQuAD or of HotpotQA."""
    try:
        data: Any = json.loads(Path(path).read_text(encoding="utf-8"))
        found = _hotpot(data) if isinstance(data, list) else _squad(data)
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ConfigError(
            f"--qa {path} cannot be read as JSON of SQuAD or HotpotQA: {error!r}"
        ) from error
    if not found[0]:
        raise ConfigError(f"--qa {path} has no question with an answer")
    return found


def _squad(data: dict[str, Any]) -> tuple[tuple[Question, ...], tuple[str, ...]]:
    articles = [article["paragraphs"] for article in data["data"]]
    documents = sorted({part["context"] for article in articles for part in article})
    number = {text: i for i, text in enumerate(documents)}
    questions = []
    for article in articles:
        all_parts = [number[part["context"]] for part in article]
        for part in article:
            source = number[part["context"]]
            related = tuple(dict.fromkeys(n for n in all_parts if n != source))
            for qa in part["qas"]:
                answers = tuple(answer["text"] for answer in qa["answers"])
                if answers and not qa.get("is_impossible", False):
                    questions.append(Question(qa["question"], answers, (source,), related))
    return tuple(questions), tuple(documents)


def _hotpot(data: list[dict[str, Any]]) -> tuple[tuple[Question, ...], tuple[str, ...]]:
    contexts = [[f"{title}\n{''.join(lines)}" for title, lines in each["context"]] for each in data]
    documents = sorted({text for own in contexts for text in own})
    number = {text: i for i, text in enumerate(documents)}
    questions = tuple(
        Question(each["question"], (each["answer"],), tuple(number[text] for text in own))
        for each, own in zip(data, contexts, strict=True)
    )
    return questions, tuple(documents)


TASKS: Mapping[str, Task] = {
    "niah_single_1": Task(partial(_niah, haystack="noise"), 128),
    "niah_single_2": Task(_niah, 128),
    "niah_single_3": Task(partial(_niah, value_kind="uuids"), 128),
    "niah_multikey_1": Task(partial(_niah, keys=4), 128),
    "niah_multikey_2": Task(partial(_niah, haystack="needle"), 128),
    "niah_multikey_3": Task(
        partial(_niah, haystack="needle", key_kind="uuids", value_kind="uuids"), 128
    ),
    "niah_multivalue": Task(partial(_niah, values=4), 128),
    "niah_multiquery": Task(partial(_niah, queries=4), 128),
    "vt": Task(_variables, 30, _HOPS + 1),
    "cwe": Task(_common_words, 120, _COMMON_WORDS + 1, lambda corpus: len(corpus.words)),
    "fwe": Task(_frequent_words, 50, 30),
    "qa": Task(_questions, 32, 1, lambda corpus: len(corpus.documents), scores="part"),
}


def fit_size(
    task: Task, corpus: Corpus, length: int, count_tokens: Callable[[Sample], int], seed: str
) -> int:
    """The largest size whose first sample, with room for its answer, has at most `length` tokens.
    Smaller if the corpus has no more."""

    def fits(size: int) -> bool:
        sample = task.make(Random(seed), corpus, size, length, 0)
        return count_tokens(sample) + task.max_tokens <= length

    low, high = task.least_size, 2 * task.least_size
    if not fits(low):
        raise ConfigError(
            f"--lengths has {length}, which is too short for the smallest sample of a task; "
            "raise it or leave the task out"
        )
    most = math.inf if task.most_size is None else task.most_size(corpus)
    while high <= most and fits(high):
        low, high = high, 2 * high
    high = int(min(high, most + 1))
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if fits(middle) else (low, middle)
    return low
