"""Long texts of an exact number of tokens, with sentences hidden at given depths.

A text is split into sentences, and each is encoded once. Hidden sentences go between them, never
inside one.
"""

from __future__ import annotations

import random
import re
from bisect import bisect_left
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from cairn.errors import ConfigError
from cairn.llm import LLM
from cairn.text.prose import bundled_prose
from cairn.text.tokenizer import Tokenizer

_SENTENCE_END = re.compile(r"(?<=[.?!])(?=\s)")
_LONGEST = 2000  # characters; longer sentences are split at spaces


def read_text(path: str | None) -> str:
    """The user's text, or the one that comes with the package."""
    if path is None:
        return bundled_prose()
    try:
        text = Path(path).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"--text {path} cannot be read: {error}") from error
    if not text.strip():
        raise ConfigError(f"--text {path} is empty; give a file with some sentences")
    return text


def need_tokenizer(llm: LLM) -> Tokenizer:
    if llm.tokenizer is None:
        raise ConfigError(
            f"eval needs text and {llm.config.model} has no tokenizer.json; add one to its folder"
        )
    return llm.tokenizer


def encode_text(llm: LLM, text: str, tokens: int) -> list[int]:
    """The first `tokens` tokens of a text."""
    ids = need_tokenizer(llm).encode(text)
    if len(ids) < tokens:
        raise ConfigError(
            f"--tokens is {tokens} and the text has {len(ids)}; lower it or give a longer --text"
        )
    return ids[:tokens]


def split_sentences(text: str) -> list[str]:
    """The sentences of a text. Each begins with the space before it; the first gets a space too."""
    sentences = []
    for sentence in _SENTENCE_END.split(text.strip()):
        while len(sentence) > _LONGEST:
            cut = sentence.rfind(" ", 1, _LONGEST)
            cut = _LONGEST if cut < 1 else cut
            sentences.append(sentence[:cut])
            sentence = sentence[cut:]
        if sentence.strip():
            sentences.append(sentence)
    sentences[0] = f" {sentences[0]}"
    return sentences


@dataclass(frozen=True, slots=True)
class Excerpt:
    tokens: list[int]
    breaks: list[int]
    """Ascending: positions at which a sentence begins, and the end of the excerpt."""


class Prose:
    """A text as sentences of tokens, repeated as often as needed."""

    def __init__(self, text: str, encode: Callable[[str], list[int]]) -> None:
        self.words = set(re.findall(r"\w+", text))
        self._sentences = [tokens for s in split_sentences(text) if (tokens := encode(s))]
        if not self._sentences:
            raise ConfigError("the text to hide facts in has no tokens; give another --text")

    def excerpt(self, length: int, seed: int) -> Excerpt:
        """`length` tokens that begin at a random sentence and wrap around at the end of the text.

        After one round the sentences are shuffled. The same seed gives the same text, cut to
        `length`.
        """
        rng = random.Random(seed)
        count = len(self._sentences)
        start = rng.randrange(count)
        order = [(start + i) % count for i in range(count)]
        tokens: list[int] = []
        breaks = []
        while len(tokens) < length:
            for index in order:
                breaks.append(len(tokens))
                tokens += self._sentences[index]
                if len(tokens) >= length:
                    break
            rng.shuffle(order)
        return Excerpt(tokens[:length], [*breaks, length])


@dataclass(frozen=True, slots=True)
class Hidden:
    """A text, or a whole prompt, with pieces hidden in it."""

    tokens: list[int]
    starts: list[int]
    """Where each piece begins, in the order the pieces were given."""


def hide(excerpt: Excerpt, pieces: Sequence[tuple[float, Sequence[int]]], span: int) -> Hidden:
    """Put pieces between the sentences, each at the first break at or after its depth.

    A depth is a share of the first `span` tokens; 1 is the very end. Pieces of equal depth keep
    their order.
    """
    tokens: list[int] = []
    starts = [0] * len(pieces)
    done = 0
    for index in sorted(range(len(pieces)), key=lambda i: pieces[i][0]):
        depth, piece = pieces[index]
        place = len(excerpt.tokens)
        if depth < 1:
            place = excerpt.breaks[bisect_left(excerpt.breaks, round(depth * span))]
        tokens += excerpt.tokens[done:place]
        done = max(done, place)
        starts[index] = len(tokens)
        tokens += piece
    return Hidden(tokens + excerpt.tokens[done:], starts)
