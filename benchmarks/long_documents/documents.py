"""Data and scores of the tasks in this folder, for EleutherAI's harness (docs/quality.md).

A data file has LongBench's format: a JSON object in each line, with the fields `input` (the
question), `context` (the document), `answers` and, for document_choice, `all_classes`.
"""

from __future__ import annotations

from typing import Any

from datasets import load_dataset
from lm_eval.tasks.longbench.metrics import get_qa_f1_score, get_rouge_score


def load(data: str | None = None, **_: Any) -> Any:
    """The documents of a file, which `--metadata` names."""
    if data is None:
        raise ValueError("""no documents are given; add --metadata '{"data": "FILE.jsonl"}'""")
    return load_dataset("json", data_files={"test": data})


def f1(doc: dict[str, Any], results: list[str]) -> dict[str, float]:
    return dict(get_qa_f1_score(doc, results))


def rouge(doc: dict[str, Any], results: list[str]) -> dict[str, float]:
    return dict(get_rouge_score(doc, results))
