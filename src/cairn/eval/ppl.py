"""`cairn eval ppl`: perplexity of a text with dense and sparse attention, by page budget."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from typing import Any

from cairn.errors import ConfigError
from cairn.eval.needle import need_tokenizer
from cairn.eval.settings import Setting
from cairn.llm import LLM


def encode_text(llm: LLM, text: str, tokens: int) -> list[int]:
    """The first `tokens` tokens of a text."""
    ids = need_tokenizer(llm).encode(text)
    if len(ids) < tokens:
        raise ConfigError(
            f"--tokens is {tokens} and the text has {len(ids)}; lower it or give a longer --text"
        )
    return ids[:tokens]


def measure(
    settings: Sequence[Setting], text: str, tokens: int, progress: Callable[[int, int], None]
) -> list[dict[str, Any]]:
    """Score every token with each setting's attention. The tail is the second half of the text. The
    budget matters only there, since early tokens read everything."""
    rows: list[dict[str, Any]] = []
    for done, setting in enumerate(settings):
        progress(done, len(settings))
        begin = time.perf_counter()
        with LLM(**setting.options) as llm:
            ids = encode_text(llm, text, tokens)
            result = llm.generate(ids, max_tokens=1, prompt_logprobs=0)
        assert result.prompt_logprobs is not None
        scores = [score.logprob for score in result.prompt_logprobs if score is not None]
        row = {
            **setting.as_dict(),
            "tokens": tokens,
            "ppl": round(perplexity(scores), 4),
            "ppl_tail": round(perplexity(scores[len(scores) // 2 :]), 4),
            "seconds": round(time.perf_counter() - begin, 2),
        }
        first = rows[0] if rows else row
        row["ratio"] = round(row["ppl_tail"] / first["ppl_tail"], 4)
        rows.append(row)
    progress(len(settings), len(settings))
    return rows


def perplexity(logprobs: Sequence[float]) -> float:
    return math.exp(-math.fsum(logprobs) / len(logprobs))
