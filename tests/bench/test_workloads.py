"""Workloads of `cairn bench`: what they ask for, and that each one ends in a record."""

from __future__ import annotations

import gc
import json
from pathlib import Path

import pytest

from cairn import LLM
from cairn.bench import hsa
from cairn.bench.engines import settled
from cairn.bench.workloads import seeded
from cairn.cli.main import main


def test_seeded_requests_are_the_published_ones() -> None:
    workload = seeded(256, 151_936)
    lengths = [len(prompt) for prompt in workload.prompts]
    assert (sum(lengths), min(lengths), max(lengths)) == (142_827, 107, 1024)
    assert sum(workload.output_lens) == 133_966
    assert lengths[:5] == [964, 724, 484, 508, 316]
    assert workload.output_lens[:5] == [845, 312, 607, 843, 500]
    assert workload.prompts[0][:5] == [6311, 6890, 663, 4242, 8376]


@pytest.mark.parametrize(
    "arguments",
    [
        ["latency", "--requests", "2", "--input-len", "20", "--output-len", "5"],
        pytest.param(["offline", "--requests", "2"], marks=pytest.mark.slow),
        ["offline", "--lengths", "equal", "--requests", "3", "--input-len", "9"],
        ["offline", "--lengths", "mixed", "--requests", "3", "--output-len", "9"],
        ["rag", "--requests", "3", "--input-len", "200", "--output-len", "4"],
        ["summarize", "--input-len", "300", "--output-len", "8"],
    ],
    ids=lambda arguments: "-".join(arguments[:3]),
)
def test_each_workload_ends_in_one_json_line(
    arguments: list[str], folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    output, plot = tmp_path / "result.json", tmp_path / "plot.png"
    files = ["--output", str(output), "--plot", str(plot)]
    assert main(["bench", *arguments, "--model", str(folder), "--device", "cpu", *files]) == 0
    lines = capsys.readouterr().out.strip().splitlines()
    record = json.loads(lines[-1])
    assert record == json.loads(output.read_text())
    assert plot.read_bytes().startswith(b"\x89PNG")
    ours, theirs = record["results"]
    assert (ours["engine"], theirs["engine"]) == ("cairn", "transformers")
    assert ours["output_tokens"] == theirs["output_tokens"] > 0
    assert ours["tokens_per_second"] > 0 and theirs["tokens_per_second"] > 0
    if arguments[0] == "rag":
        assert ours["prefix_hit_rate"] > 0.5


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        (["offline", "--requests", "300"], "256 seeded"),
        (["offline", "--input-len", "9"], "--input-len has no effect on the seeded requests"),
        (["latency", "--output-len", "0"], "--output-len"),
        (["rag", "--text", "/nowhere"], "--text /nowhere"),
        (["latency", "--output", "/nowhere/x.json"], "--output /nowhere/x.json"),
    ],
)
def test_bad_workloads_are_named(
    arguments: list[str], named: str, folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["bench", *arguments, "--model", str(folder), "--device", "cpu"]) == 2
    assert named in capsys.readouterr().err


def test_the_collector_is_let_go_of_again() -> None:
    before = gc.get_freeze_count()
    with pytest.raises(ZeroDivisionError), settled():
        assert gc.get_freeze_count() > before
        raise ZeroDivisionError
    assert gc.get_freeze_count() == 0


def test_sparse_and_dense_engines_are_timed_alike(folder: Path) -> None:
    """What `bench hsa` does with each engine; there is no GPU here, so kernels are not watched."""
    options = {"device": "cpu", "page_size": 16, "kv_cache_gib": 0.05}
    with LLM(folder, attention_backend="hsa", **options) as llm:
        rows = list(hsa._decode(llm, "tiny", [90], [1, 2], profile=False))
        rows += hsa._prefill(llm, "tiny", [40], profile=False)
        assert not llm.engine.usage()[0].owned
    assert [(row["what"], row["context"], row["batch"]) for row in rows] == [
        ("decode", 90, 1),
        ("decode", 90, 2),
        ("prefill", 40, 1),
    ]
    assert all(0 < row["ms"] <= row.get("max_ms", row["ms"]) for row in rows)


def test_a_long_prompt_beside_streams(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    sizes = ["--long-tokens", "600", "--streams", "3", "--stream-tokens", "20"]
    engine = ["--model", str(folder), "--device", "cpu", "--chunked-prefill-size", "100"]
    assert main(["bench", "mix", *sizes, *engine]) == 0
    (row,) = json.loads(capsys.readouterr().out.splitlines()[-1])["results"]
    assert row["streams"] == 3 and row["ttft_beside_s"] > 0 and row["ttft_alone_s"] > 0
    gaps = row["between_tokens_ms"]
    assert 0 < gaps["p50"] <= gaps["p99"] <= gaps["max"] and gaps["before_p50"] > 0
