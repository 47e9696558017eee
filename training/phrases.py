"""The sentences of the tasks, encoded once. Parts begin where the tokenizer splits anyway."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from tokenizers import Tokenizer

from training.samples import Kind, Piece
from training.text import EOS, Tokens

ATTRIBUTES = (
    "access code",
    "locker number",
    "badge number",
    "phone number",
    "ticket number",
    "vault code",
    "account number",
    "room number",
)
LEAD_INS = (" The", " The", " The", " Note that the", " Remember that the", " By the way, the")
QUESTIONS = (
    " What is the {} of",
    " What is the {} of",
    " Can you tell me the {} of",
    " Do you know the {} of",
    " Who knows the {} of",
)
QUESTION, ANSWER, UNKNOWN = "\nQuestion:", "\nAnswer:", " unknown"
VALUE_OF, VARIABLE = " What is the value of", " VAR"


def all_phrases() -> list[str]:
    """For the tokenizer, which should know these words."""
    phrases = [f"{QUESTION} What is?{ANSWER}{UNKNOWN}.", f"{VARIABLE} x = y.", VALUE_OF]
    phrases += [f"{lead} {attribute} of is" for lead in LEAD_INS for attribute in ATTRIBUTES]
    return phrases + [form.format(attribute) for form in QUESTIONS for attribute in ATTRIBUTES]


@dataclass(frozen=True, slots=True)
class Phrases:
    tokenizer: Tokenizer
    leads: tuple[tuple[Tokens, ...], ...]  # [attribute][lead-in]: " The access code of"
    questions: tuple[tuple[Tokens, ...], ...]  # [attribute][form]
    value_question: Tokens
    question: Tokens
    question_end: Tokens
    answer: Tokens
    is_: Tokens
    equals: Tokens
    variable: Tokens
    end: Tokens
    full_stop: Tokens
    unknown: Tokens
    digits: Tokens  # [10], one digit at the end of a number
    pairs: Tokens  # [2, 100]: two digits inside a number, and after a space

    @classmethod
    def of(cls, tokenizer: Tokenizer) -> Phrases:
        def encode(text: str) -> Tokens:
            return np.asarray(tokenizer.encode(text, add_special_tokens=False).ids, np.int32)

        inside = [encode(f" 00{n:02d}")[1:] for n in range(100)]
        leading = [encode(f" {n:02d}") for n in range(100)]
        return cls(
            tokenizer,
            tuple(tuple(encode(f"{x} {a} of") for x in LEAD_INS) for a in ATTRIBUTES),
            tuple(tuple(encode(form.format(a)) for form in QUESTIONS) for a in ATTRIBUTES),
            value_question=encode(VALUE_OF),
            question=encode(QUESTION),
            question_end=encode("?"),
            answer=encode(ANSWER),
            is_=encode(" is"),
            equals=encode(" ="),
            variable=encode(VARIABLE),
            end=np.concatenate((encode("."), encode(EOS))),
            full_stop=encode("."),
            unknown=encode(UNKNOWN),
            digits=np.concatenate([encode(f" 00{n}")[1:] for n in range(10)]),
            pairs=np.stack((np.concatenate(inside), np.concatenate(leading))),
        )

    def code(self, rng: np.random.Generator) -> Tokens:
        """A random number of 4 to 6 digits, as it reads after a space."""
        count = int(rng.integers(4, 7))
        values = rng.integers(100, size=count // 2)
        parts = [self.pairs[1][values[:1]], self.pairs[0][values[1:]]]
        if count % 2:
            parts.append(self.digits[rng.integers(10, size=1)])
        return np.concatenate(parts)

    def fact(self, attribute: int, lead: int, name: Tokens, code: Tokens) -> Piece:
        """ " The access code of Mira Kolvane is 48213." """
        return Piece.of(
            (self.leads[attribute][lead], Kind.NONE),
            (name, Kind.NONE),
            (self.is_, Kind.NONE),
            (code, Kind.NONE),
            (self.full_stop, Kind.NONE),
        )

    def restated(self, attribute: int, name: Tokens, code: Tokens) -> Piece:
        """The same sentence again, whose value can be predicted now."""
        return Piece.of(
            (self.leads[attribute][0], Kind.NONE),
            (name, Kind.NONE),
            (self.is_, Kind.NONE),
            (code[:1], Kind.FIRST),
            (code[1:], Kind.REST),
            (self.full_stop, Kind.NONE),
        )

    def asked(self, attribute: int, form: int, name: Tokens, code: Tokens | None) -> Piece:
        """A question and its answer, which repeats the fact's own words before the value."""
        question = (self.question, self.questions[attribute][form], name, self.question_end)
        value = [(self.unknown[:1], Kind.ABSENT), (self.unknown[1:], Kind.FORM)]
        if code is not None:
            value = [(code[:1], Kind.FIRST), (code[1:], Kind.REST)]
        return Piece.of(
            *((part, Kind.NONE) for part in (*question, self.answer)),
            (self.leads[attribute][0], Kind.FORM),
            (name, Kind.FORM),
            (self.is_, Kind.FORM),
            *value,
            (self.end, Kind.FORM),
            answer_from=sum(len(part) for part in (*question, self.answer)),
        )

    def assigned(self, name: Tokens, value: Tokens) -> Piece:
        """ " VAR Kolu = 48213." or " VAR Mive = Kolu." """
        parts = (self.variable, name, self.equals, value, self.full_stop)
        return Piece.of(*((part, Kind.NONE) for part in parts))

    def traced(self, chain: list[Tokens]) -> Piece:
        """The question for the value of chain[0], answered with the whole chain."""
        question = (self.question, self.value_question, chain[0], self.question_end, self.answer)
        links = [(part, Kind.VARIABLE) for link in chain[1:] for part in (self.equals, link)]
        return Piece.of(
            *((part, Kind.NONE) for part in question),
            (chain[0], Kind.FORM),
            *links,
            (self.end, Kind.FORM),
            answer_from=sum(len(part) for part in question),
        )
