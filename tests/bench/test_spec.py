"""`cairn bench spec`: how drafts are measured."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from cairn.bench.spec import _rate, fresh, loops
from cairn.cli.main import main


@pytest.mark.parametrize(
    "parts", ["prose", pytest.param("quote,wrong", marks=pytest.mark.slow)], ids=["prose", "rest"]
)
def test_drafts_are_measured(parts: str, folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    small = ["--context", "300", "--batches", "1,2", "--tokens", "2,3", "--output-len", "6"]
    small += ["--repeat", "1", "--hsa-topk", "1", "--hsa-window", "32", "--hsa-dense-below", "0"]
    engine = ["--model", str(folder), "--device", "cpu", "--page-size", "16"]
    assert main(["bench", "spec", "--parts", parts, *small, *engine]) == 0
    rows = json.loads(capsys.readouterr().out.strip().splitlines()[-1])["results"]
    found = [(row["part"], row["requests"], row["K"]) for row in rows]
    if parts == "prose":
        assert found == [("prose", batch, count) for batch in (1, 2) for count in (2, 3)]
        assert all(row["longer"] == 48 and row["decided tok/s"] > 0 for row in rows)
        assert all("tok/s without" in row["the engine"] for row in rows)  # it timed itself
        assert all(len(row["by place"].split()) == row["K"] for row in rows if row["share"])
        assert all(row["same text"] == f"{row['requests']}/{row['requests']}" for row in rows)
    else:
        assert found == [("quote", 1, 7), ("wrong", 1, 7)]
        assert rows[1]["accepted"].startswith("0/") and rows[1]["accepted"] > "0/1"
    assert all(row["plain tok/s"] > 0 and row["tok/s"] > 0 for row in rows)
    for option, value, named in (
        ("--speculative", "ngram", "leave it out"),
        ("--speculative-tokens", "3", "--tokens"),
        ("--context-length", "340", "lower one of them"),
    ):
        assert main(["bench", "spec", "--parts", "prose", *small, *engine, option, value]) == 2
        assert named in capsys.readouterr().err


def test_loops_are_runs_that_come_again() -> None:
    assert not loops([*range(20), *range(7)]) and loops([*range(20), *range(8)])
    assert not loops([1, 2])
    assert fresh([*range(20), *range(8)]) == 20 and fresh([1, 2]) == 2 and fresh([5] * 30) == 1


def test_a_text_counts_until_it_repeats_itself() -> None:
    """Two requests get a token a step, the third two; it repeats itself after ten steps."""
    steps = np.arange(21)
    made = np.stack([steps, steps, 2 * steps], 1)
    texts = [list(range(20)), list(range(20)), list(range(20)) * 2]
    requests: Any = [SimpleNamespace(output_ids=text) for text in texts]
    assert _rate(made, steps * 0.5, requests) == pytest.approx((10 * 4 / 3 + 10) / 10)
