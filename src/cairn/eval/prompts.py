"""Builds prompts from a text and a question, in the model's chat format or as plain completion."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from cairn.errors import ConfigError, RequestError
from cairn.eval.haystack import Hidden, Prose, hide
from cairn.text.tokenizer import Tokenizer

Style = Literal["plain", "chat"]

_MARK = "\u2063text\u2063"  # stands for the text while the template is rendered
_INTRODUCTION = "Read the text below. It holds facts that you will be asked for.\n\n"
_INSTRUCTION = "Answer with the number alone. If the text does not say it, answer unknown."


def plain_question(question: str) -> str:
    """The form that `cairn-nano` is trained on."""
    return f"\nQuestion: {question}\nAnswer:"


def choose_style(tokenizer: Tokenizer, asked: str) -> Style:
    """`auto` chooses the chat format if the model has one that differs from the plain form."""
    if asked == "chat" and tokenizer.template is None:
        raise ConfigError("--prompt is chat and the model has no chat template; use plain")
    if asked != "auto":
        return "chat" if asked == "chat" else "plain"
    if tokenizer.template is None:
        return "plain"
    probe = [{"role": "system", "content": "Text."}, {"role": "user", "content": "What?"}]
    try:
        own = tokenizer.template.render(probe)
    except RequestError:  # some templates do not support a system message
        return "chat"
    return "plain" if own == f"Text.{plain_question('What?')}" else "chat"


@dataclass(frozen=True, slots=True)
class Frame:
    """What comes before and after a text in a prompt. All prompts over one text begin the same."""

    tokenizer: Tokenizer
    style: Style
    answer_start: str = ""
    """Words that begin the answer; {name} stands for the name in the question."""

    def around(self, question: str, name: str) -> tuple[list[int], list[int]]:
        start = self.answer_start.replace("{name}", name)
        if self.style == "plain":
            return self.tokenizer.encode(""), self.encode(plain_question(question) + start)
        template = self.tokenizer.template
        assert template is not None
        content = f"{_INTRODUCTION}{_MARK}\n\n{question} {_INSTRUCTION}"
        rendered = template.render([{"role": "user", "content": content}])
        first, found, last = rendered.partition(_MARK)
        if not found:
            raise ConfigError("the chat template changes the message; use --prompt plain")
        return self.encode(first), self.encode(last + start)

    def encode(self, text: str) -> list[int]:
        return self.tokenizer.encode(text, add_special_tokens=False)


@dataclass(frozen=True, slots=True)
class Query:
    """One question over a text with sentences hidden in it."""

    pieces: tuple[tuple[float, str], ...]  # depth and sentence
    question: str
    name: str


def build_prompts(
    frame: Frame, prose: Prose, queries: Sequence[Query], length: int, seed: int
) -> list[Hidden]:
    """Prompts of exactly `length` tokens each, over the same text except for the hidden pieces."""
    parts = []
    for query in queries:
        before, after = frame.around(query.question, query.name)
        pieces = [(depth, frame.encode(text)) for depth, text in query.pieces]
        room = length - len(before) - len(after) - sum(len(piece) for _, piece in pieces)
        parts.append((before, after, pieces, room))
    span = min(room for _, _, _, room in parts)
    if span < 0:
        raise ConfigError(
            f"a length of {length} tokens is too short: the question and what is hidden take "
            f"{length - span}; raise it, or hide less (--keys, --depths)"
        )
    prompts = []
    for before, after, pieces, room in parts:
        hidden = hide(prose.excerpt(room, seed), pieces, span)
        starts = [len(before) + start for start in hidden.starts]
        prompts.append(Hidden([*before, *hidden.tokens, *after], starts))
    return prompts
