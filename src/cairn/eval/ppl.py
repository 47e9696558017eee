"""`cairn eval ppl`: perplexity of a text with dense and sparse attention, by page budget."""

from __future__ import annotations

import argparse
import math
from collections.abc import Sequence
from typing import Any

from cairn.attention.backend import sparse_class
from cairn.errors import ConfigError
from cairn.eval import report
from cairn.eval.settings import compare
from cairn.llm import LLM

_COLUMNS = ("setting", "topk", "ppl", "ppl_tail", "ratio", "seconds")


def command(arguments: argparse.Namespace) -> int:
    backend = getattr(arguments, "attention_backend", "") or "auto"
    names = [name.strip() for name in backend.split(",")]
    if len(names) > 1 and sparse_class(names) is not None:
        raise ConfigError(
            f"--attention-backend is {backend!r}, which reads prompts densely, and a text is "
            f"scored as a prompt; use {names[-1]} alone"
        )
    record = compare(arguments, "ppl", measure, dense=True)
    for row in record["results"]:
        row["ratio"] = round(row["ppl_tail"] / record["results"][0]["ppl_tail"], 4)
    report.show_rows(record, _COLUMNS)
    report.finish(record, arguments)
    return 0


def measure(llm: LLM, ids: list[int]) -> dict[str, Any]:
    """Perplexity of the text and of its second half, the tail. The budget matters only there, since
    early tokens read everything."""
    result = llm.generate(ids, max_tokens=1, prompt_logprobs=0)
    assert result.prompt_logprobs is not None
    scores = [score.logprob for score in result.prompt_logprobs if score is not None]
    tail = scores[len(scores) // 2 :]
    return {"ppl": round(perplexity(scores), 4), "ppl_tail": round(perplexity(tail), 4)}


def perplexity(logprobs: Sequence[float]) -> float:
    return math.exp(-math.fsum(logprobs) / len(logprobs))
