"""`cairn eval policies`: equal bytes, and comparison with dense attention."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from cairn.cli.main import main
from cairn.errors import ConfigError
from cairn.eval import command
from cairn.eval.needle import kept
from cairn.eval.policies import VARIANTS, make_points

TOKENS = 1024


def test_the_command_knows_every_policy() -> None:
    assert tuple(VARIANTS) == command._VARIANTS


@pytest.mark.parametrize(
    "policies",
    [
        "cairn.sparsity.quest:QuestPolicy,snapkv",
        pytest.param("spread,streaming,top-p,by-layer", marks=pytest.mark.slow),
    ],
)
def test_policies_read_what_the_budget_says(
    policies: str,
    folder: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    plot, points = tmp_path / "policies.png", tmp_path / "points.jsonl"
    arguments = ["eval", "policies", "--model", str(folder), "--device", "cpu"]
    arguments += ["--kv-cache-gib", "0.05", "--tokens", str(TOKENS), "--budgets", "40"]
    arguments += ["--policies", policies, "--samples", "1", "--rows", "2"]
    arguments += ["--tasks", "vt", "--points", str(points)]
    assert main([*arguments, "--plot", str(plot)]) == 0
    record: dict[str, Any] = json.loads(capsys.readouterr().out.strip().splitlines()[-1])
    dense, *rows = record["results"]
    assert dense["policy"] == "dense" and dense["bytes"] == 1 and dense["ratio"] == 1
    assert dense["facts"] == 0  # of random weights, so there is nothing to keep
    assert [row["policy"] for row in rows] == policies.split(",")
    for row in rows:
        if row["policy"] == "top-p":
            assert 0 < row["bytes"] < 1
        else:
            assert row["bytes"] == pytest.approx(0.4, abs=0.01)
        expected = 0 if row["policy"] in ("streaming", "snapkv") else 1 / 16
        assert row["landmarks"] == pytest.approx(expected)
        assert row["kept"] is row["kept_low"] is row["kept_high"] is None
        if row["policy"] == "snapkv":
            assert row["ratio"] is None  # it has no sparse prompts
        else:
            assert row["ratio"] > 0
        assert 0 <= row["facts"] <= 1 and 0 <= row["ruler"] <= 1
        assert "--attention-backend hsa" in row["flags"]
    assert plot.read_bytes().startswith(b"\x89PNG")

    # Points that are in the file are not measured again.
    monkeypatch.setattr("cairn.eval.policies.LLM", None)
    assert main([*arguments, "--resume"]) == 0
    again = json.loads(capsys.readouterr().out.strip().splitlines()[-1])
    assert again["results"] == record["results"]


def test_dense_layers_count(folder: Path) -> None:
    given = {"model": str(folder), "device": "cpu"}
    with pytest.raises(ConfigError, match="--budgets has 25%, and window, sinks and dense layers"):
        make_points(given, TOKENS, ["dense-layers"], [0.25])


def test_kept_is_a_ratio_of_paired_answers() -> None:
    base = [True, True, False, True] * 25
    assert kept(base, base) == (1.0, 1.0, 1.0)
    assert kept([False] * 100, base) == (0.0, 0.0, 0.0)
    found = kept([True, False, False, True] * 25, base)
    assert found is not None
    share, low, high = found
    assert share == pytest.approx(2 / 3, abs=1e-4) and 0.5 < low < share < high < 0.8
    assert kept([True, False], [False, False]) is None
