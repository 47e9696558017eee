"""`cairn bench tier`: the host tier, small enough for a CPU."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from cairn.bench import engines
from cairn.bench.tier_engines import SMALL_BATCHES, full_length
from cairn.bench.tier_options import TierBench
from cairn.cli.main import main
from tests.helpers import TINY_DSA, exit_code, write_model


def tier_bench(folder: Path) -> list[str]:
    """Everything small enough for a CPU."""
    sizes = {
        "contexts": "1024,300",
        "concurrency": "1,2,4",
        "kv-cache-gib": "0.0008",
        "most-host-gib": "0.004",
        "short-context": "100",
        "prefix": "400",
        "longest": "3900",
        "chunk": "128",
        "page-size": "16",
        "topk": "4",
        "window": "32",
        "warm-steps": "4",
        "steps": "4",
        "text-models": f"{folder},cairn-nano",
        "text-tokens": "1500",
        "text-rows": "40",
        "text-topk": "8",
        "hot-sizes": "1,2",
        "bandwidth-gib": "0.05",
    }
    return [item for name, value in sizes.items() for item in (f"--{name}", value)]


def rows_of(
    part: str, folder: Path, capsys: pytest.CaptureFixture[str], *more: str
) -> list[dict[str, Any]]:
    small = ["--model", str(folder), "--device", "cpu", *tier_bench(folder), *more]
    assert main(["bench", "tier", "--parts", part, *small]) == 0
    rows: list[dict[str, Any]] = json.loads(capsys.readouterr().out.strip().splitlines()[-1])[
        "results"
    ]
    assert all(row["part"] == part for row in rows) and rows[-1]["seconds"] > 0
    return rows[:-1]


@pytest.mark.slow
def test_tier_throughput(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    rows = rows_of("throughput", folder, capsys)
    with_tier = [row for row in rows if row.get("tier") and row["context"] == 1024]
    without = [row for row in rows if row.get("tier") is False and row["context"] == 1024]
    # The device holds fewer contexts than host memory does.
    assert [row["running"] for row in without] == [1, 2]
    assert [row["running"] for row in with_tier] == [1, 2, 4]
    assert with_tier[-1]["resident"] < 1 and with_tier[-1]["hit_rate"] > 0
    assert with_tier[0]["resident"] == 1
    assert sum("best_with / best_without" in row for row in rows) == 2


def test_no_ratio_is_shown_if_only_the_tier_has_room(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    rows = rows_of("throughput", folder, capsys, "--contexts", "1024", "--concurrency", "4")
    assert [(row["tier"], row["running"]) for row in rows] == [(True, 4)]


def test_tier_small_batches_are_resident(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    rows = rows_of("small", folder, capsys)
    assert [(row["tier"], row["batch"]) for row in rows] == [
        (tier, batch) for tier in (False, True) for batch in (1, 2, 4)
    ]
    assert all(row["resident"] == 1 and row["with / without"] > 0 for row in rows[3:])


def test_tier_requests_outlive_what_is_measured() -> None:
    bench = TierBench(concurrency=(1,), warm_steps=10, steps=5)
    for batches in (1, 4):
        assert full_length(bench, 1000, batches) >= 1000 + len(SMALL_BATCHES) * (10 + 2 * 5)


@pytest.mark.slow
def test_tier_hits_grow_with_the_hot_cache(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    rows = rows_of("hits", folder, capsys)
    assert [(row["topk"], row["hot"]) for row in rows[:2]] == [(8, 1), (8, 2)]
    assert rows[0]["hit_rate"] < rows[1]["hit_rate"]
    # Landmark rows select beside tokens: for these models less than twice would not do.
    assert len(rows) == 3 and rows[2]["hot"] == 2 and rows[2]["hit_rate"] > 0
    assert all(row["resident"] == 0 and row["rows"] >= 24 for row in rows)


def test_tier_first_tokens(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    without, branches, resident, tier_branches, host = rows_of("ttft", folder, capsys)
    assert [row.get("prefix_on") for row in (without, resident, host)] == ["device"] * 2 + ["host"]
    assert resident["mb_in"] == 0 and without["ms"] > 0 and host["ms"] > 0
    for row in (branches, tier_branches):  # one copy of the prefix, and what each one adds
        assert row["more_pages_on_device"] <= 16 * 6
    assert host["mb_in"] > 0


def test_tier_contexts_beyond_the_device(
    folder: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """It tells how far the prompt is."""
    monkeypatch.setattr(engines, "_TELL_EVERY", 0.0)
    told: list[str] = []
    monkeypatch.setattr(engines, "print", lambda text, **_: told.append(text), raising=False)
    (row,) = rows_of("beyond", folder, capsys)
    done = [int(text.split()[0]) for text in told]
    assert done == sorted(done) and done[-1] == 3900 and "of 3900 prompt tokens" in told[0]
    assert row["context"] == 3900 and row["resident"] < 1 and row["prefill_s"] > 0


@pytest.mark.slow
def test_tier_prompts(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    rows = rows_of("prompt", folder, capsys, "--contexts", "3900,300")
    assert [(row["tier"], row["context"]) for row in rows] == [
        (tier, context) for context in (3900, 300) for tier in (False, True)
    ]
    assert all(row["first_token_s"] > 0 for row in rows)
    assert all(row["with / without"] > 0 for row in rows if row["tier"])
    # The device holds the shorter one, and nothing without a tier is copied.
    assert [row["gb_in"] > 0 for row in rows] == [False, True, False, False]


def test_tier_bandwidth(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    rows = rows_of("bandwidth", folder, capsys)
    assert [row["what"] for row in rows] == [
        "plain copy, to the device",
        "plain copy, to the host",
        "misses of 1 rows",
        "misses of 4 rows",
        "misses of 16 rows",
        "128 whole pages in",
        "128 whole pages out",
    ]
    assert all(row["gb_per_s"] > 0 for row in rows)


@pytest.mark.slow
def test_a_tier_of_rows(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Prompts and first tokens of a model with an index."""
    folder = write_model(tmp_path, {**TINY_DSA, "max_position_embeddings": 2048})
    without, _, _, _, host = rows_of("ttft", folder, capsys, "--prefix", "300")
    assert without["ms"] > 0 and host["mb_in"] > 0
    (row,) = rows_of("beyond", folder, capsys, "--longest", "1500", "--kv-cache-gib", "0.0007")
    assert row["context"] == 1500 and row["resident"] < 1 and row["prefill_s"] > 0


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        (["--parts", "speed"], "--parts: has 'speed'; choose among throughput"),
        (["--contexts", "many"], "--contexts: has 'many'; write whole numbers from 1, with commas"),
        (["--hot-sizes", "2,0"], "--hot-sizes: has '0'; write numbers from 1, with commas"),
        (["--chunk", "0"], "chunk is 0; it must be a whole number from 1"),
        (["--parts", "bandwidth", "--bandwidth-gib", "0.01"], "raise --bandwidth-gib"),
        (["--model", "dsv32-slice"], "whose index selects rows; the part throughput scripts pages"),
        (["--profile"], "--profile shows kernels of a GPU; leave it out with --device cpu"),
    ],
)
def test_bad_tier_benches_are_named(
    arguments: list[str], named: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert exit_code(["bench", "tier", "--device", "cpu", *arguments]) == 2
    assert named in capsys.readouterr().err
