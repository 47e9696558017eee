"""Recorded traffic, replayed."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from cairn import LLM
from cairn.bench.replay import Prompts, read_trace, run
from cairn.errors import ConfigError
from tests.helpers import TINY_LLAMA, write_model


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
