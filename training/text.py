"""The text that training reads, its tokenizer, and the same text as tokens."""

from __future__ import annotations

import lzma
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers

Tokens = npt.NDArray[np.int32]

DATA = Path(__file__).parent / "data"
EOS = "<|end|>"
VOCAB_SIZE = 4095
"""With the landmark's row this makes a table of 4096 rows."""

_HELD_OUT = 0.04  # the end of each text, for evaluation
_REPEATED = 500
# Two digits are one token, with the space before them if there is one. So a number has few tokens,
# and begins right after the word that announces it.
_WORDS = r"'(?:[sdmt]|ll|ve|re)| ?\p{L}+| ?\p{N}{1,2}| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s"


def read_texts(folder: Path = DATA) -> list[str]:
    paths = sorted(folder.glob("*.txt.xz"))
    if not paths:
        raise FileNotFoundError(f"{folder} holds no .txt.xz files")
    return [lzma.decompress(path.read_bytes()).decode() for path in paths]


def train_tokenizer(
    texts: Sequence[str], phrases: Sequence[str], vocab_size: int = VOCAB_SIZE
) -> Tokenizer:
    """Byte-level BPE. Words of the `phrases` and numbers are rare in prose, so they are read many
    times."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(_WORDS), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[EOS],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )

    def pieces() -> Iterator[str]:
        numbers = "".join(f" {n:02d}{n:02d}" for n in range(100))  # after a space, and inside
        yield from (numbers + " 0 1 2 3 4 5 6 7 8 9" for _ in range(_REPEATED))
        for phrase in phrases:
            yield from (phrase for _ in range(_REPEATED))
        for text in texts:
            yield from text.splitlines(keepends=True)

    tokenizer.train_from_iterator(pieces(), trainer)
    return tokenizer


def load_tokenizer(folder: Path = DATA) -> Tokenizer:
    return Tokenizer.from_file(str(folder / "tokenizer.json"))


@dataclass(frozen=True, slots=True)
class Corpus:
    """Texts one after the other as tokens, and where a sentence may be put between two others."""

    tokens: Tokens
    breaks: npt.NDArray[np.int64]
    """Ascending: a sentence ends right before each of these places."""

    @classmethod
    def of(cls, parts: Sequence[Tokens], tokenizer: Tokenizer) -> Corpus:
        tokens = np.concatenate(parts)
        ends = [tokenizer.token_to_id(t) for t in (".", "Ġ.", "?", "!", ".Ċ")]
        after = np.isin(tokens, [end for end in ends if end is not None])
        return cls(tokens, np.flatnonzero(after) + 1)

    def excerpt(self, rng: np.random.Generator, length: int) -> tuple[Tokens, list[int]]:
        """`length` tokens from the start of a sentence, wrapping around, and the breaks in them."""
        if length == 0:
            return self.tokens[:0], [0]
        start = int(self.breaks[rng.integers(len(self.breaks))])
        pieces, breaks, have = [], [0], 0
        while have < length:
            start %= len(self.tokens)
            piece = self.tokens[start : start + length - have]
            low, high = np.searchsorted(self.breaks, (start + 1, start + len(piece) + 1))
            breaks.extend((self.breaks[low:high] - start + have).tolist())
            pieces.append(piece)
            have += len(piece)
            start += len(piece)
        return np.concatenate(pieces), breaks


def load_corpora(tokenizer: Tokenizer, folder: Path = DATA) -> tuple[Corpus, Corpus]:
    """The part to train on, and the part that is held out."""
    seen, held = [], []
    for text in read_texts(folder):
        lines = text.splitlines(keepends=True)
        encoded = tokenizer.encode_batch(lines, add_special_tokens=False)
        tokens = np.concatenate([np.asarray(line.ids, np.int32) for line in encoded])
        cut = int(len(tokens) * (1 - _HELD_OUT))
        seen.append(tokens[:cut])
        held.append(tokens[cut:])
    return Corpus.of(seen, tokenizer), Corpus.of(held, tokenizer)
