from __future__ import annotations

import json
from pathlib import Path

import pytest

from cairn.bench.profile import covered
from cairn.bench.workloads import seeded
from cairn.cli.main import main
from tests.helpers import TINY_LLAMA, byte_tokenizer, write_model


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("bench-model")
    config = {**TINY_LLAMA, "model_type": "llama", "vocab_size": 256}
    write_model(path, {**config, "max_position_embeddings": 4096})
    byte_tokenizer().save(str(path / "tokenizer.json"))
    return path


def test_seeded_requests_are_the_published_ones() -> None:
    workload = seeded(256, 151_936)
    lengths = [len(prompt) for prompt in workload.prompts]
    assert (sum(lengths), min(lengths), max(lengths)) == (142_827, 107, 1024)
    assert workload.total_output == 133_966
    assert lengths[:5] == [964, 724, 484, 508, 316]
    assert workload.output_lens[:5] == [845, 312, 607, 843, 500]
    assert workload.prompts[0][:5] == [6311, 6890, 663, 4242, 8376]


@pytest.mark.parametrize(
    "arguments",
    [
        ["latency", "--requests", "2", "--input-len", "20", "--output-len", "5"],
        ["offline", "--requests", "2"],
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


def test_kernels_that_overlap_are_not_counted_twice() -> None:
    assert covered([]) == 0
    assert covered([(0, 4), (3, 6), (1, 2), (10, 11)]) == 7
