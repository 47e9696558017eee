from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from cairn import LLM
from cairn.bench.profile import covered
from cairn.bench.replay import Prompts, read_trace, run
from cairn.bench.workloads import seeded
from cairn.cli.main import main
from cairn.errors import ConfigError
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


def write_trace(path: Path) -> Path:
    """Three requests, the last two of which share two blocks with the first."""
    lines = [
        {"timestamp": 0, "input_length": 1100, "output_length": 4, "hash_ids": [7, 8, 9]},
        {"timestamp": 20, "input_length": 1200, "output_length": 3, "hash_ids": [7, 8, 10]},
        {"timestamp": 40, "input_length": 600, "output_length": 1, "hash_ids": [7, 11]},
        {"timestamp": 50, "input_length": 9000, "output_length": 1, "hash_ids": [*range(18)]},
    ]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return path


@pytest.mark.parametrize("tier", [False, True])
def test_replay_is_faithful_in_lengths_and_prefixes(tmp_path: Path, tier: bool) -> None:
    trace = read_trace(write_trace(tmp_path / "trace.jsonl"), 10)
    prompts = Prompts(61)
    first, second, third, _ = (prompts.of(request) for request in trace)
    assert [len(first), len(second), len(third)] == [1100, 1200, 600]
    assert first[:1024] == second[:1024] and first[:512] == third[:512]
    assert first[1024:] != second[1024:1100]
    config = {**TINY_LLAMA, "max_position_embeddings": 2048}
    options: dict[str, Any] = {"attention_backend": "hsa", "max_running_requests": 2}
    if tier:
        options |= {"enable_hisparse": True, "hisparse_config": '{"host_gib": 0.02}'}
        options["kv_cache_gib"] = 0.01
    with LLM(write_model(tmp_path / "model", config), device="cpu", **options) as llm:
        result = run(llm, trace, time_scale=1.0)
        assert llm.engine.stats.generated_tokens == 8
    assert result["requests"] == 3 and result["too_long"] == 1
    # Whole pages of 64: two blocks of the first, one of the second.
    assert result["prefix_hit_rate"] == round((1024 + 512) / (1100 + 1200 + 600), 4)
    assert set(result["ttft_ms"]) == {"p50", "p90", "p99"}
    assert (result["tier"] is not None) == tier


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("{", "line 1 of .* is no request"),
        ('{"timestamp": 0, "input_length": 5, "output_length": 1}', "hash_ids"),
        (
            '{"timestamp": 0, "input_length": 513, "output_length": 1, "hash_ids": [1]}',
            "takes 2 hash_ids of 512 tokens, there are 1",
        ),
        ("", "holds no request"),
    ],
)
def test_bad_traces_are_named(tmp_path: Path, line: str, message: str) -> None:
    path = tmp_path / "trace.jsonl"
    path.write_text(line)
    with pytest.raises(ConfigError, match=message):
        read_trace(path, 5)
    with pytest.raises(ConfigError, match="cannot be read"):
        read_trace(tmp_path / "none", 5)
