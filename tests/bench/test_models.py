"""Benchmarks of attention by index, of experts and of quantised models."""

from __future__ import annotations

import json
from typing import Any

import pytest
import torch

from cairn.bench import dsa, dsa_tier
from cairn.cli.main import main
from cairn.models.presets import PRESETS
from tests.helpers import TINY_DSA, TINY_EXPERTS


def test_an_index_beside_its_dense_twin(capsys: pytest.CaptureFixture[str]) -> None:
    sizes = ["--lengths", "100", "--batches", "1,2", "--topk", "60", "--new-rows", "50"]
    assert main(["bench", "dsa", "--device", "cpu", *sizes]) == 0
    record = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert [row["sequences"] for row in record["results"]] == [1, 2]
    assert all(row["dsa_ms"] > 0 and row["dense_ms"] > 0 for row in record["results"])
    narrow = ["bench", "dsa", "--device", "cpu", *sizes, "--kv-cache-dtype", "int8"]
    assert main(narrow) == 0
    assert main([*narrow, "--parts", "layer,step"]) == 2
    assert "has for the parts layer and prefill; leave step out" in capsys.readouterr().err
    assert main(["bench", "dsa", "--model", "qwen3-0.6b"]) == 2
    assert "bench dsa has dsv32-slice, dsv32-slice-long, glm5-slice" in capsys.readouterr().err


def test_scripted_rows_change_at_the_given_rate(capsys: pytest.CaptureFixture[str]) -> None:
    drawn = dsa_tier._draw(20, 3, 50, 1020, 0.2, torch.Generator().manual_seed(1))
    parts = drawn * 50 // 1020
    assert drawn.shape == (20, 3, 50) and (parts == torch.arange(50)).float().mean() > 0.95
    assert (drawn.diff(dim=-1) > 0).all() and (drawn >= 0).all() and (drawn < 1020).all()
    assert 0.15 < (drawn.diff(dim=0) != 0).float().mean() < 0.22
    fixed = dsa_tier._draw(3, 3, 50, 1020, 0.0, torch.Generator())
    assert not fixed.diff(dim=0).any()
    assert main(["bench", "dsa", "--device", "cpu", "--parts", "tier"]) == 2
    assert "bench dsa --parts tier measures CUDA kernels" in capsys.readouterr().err


def test_the_last_chunk_of_a_prompt_may_be_shorter(monkeypatch: pytest.MonkeyPatch) -> None:
    made = []

    class Layer(dsa.Layer):
        def __init__(
            self, preset: Any, device: Any, length: int, seqs: int, new: int, *more: Any
        ) -> None:
            made.append((length, new))
            super().__init__(preset, device, length, seqs, new, *more)

    monkeypatch.setattr(dsa, "Layer", Layer)
    monkeypatch.setattr(dsa, "_CHUNK", 40)
    rows = list(dsa._prefills(TINY_DSA, torch.device("cpu"), [100, 150], None))
    assert [row["prompt"] for row in rows] == [100, 150]
    assert rows[0]["dsa_ms"] < rows[1]["dsa_ms"]
    assert made == [(40, 40), (80, 40), (100, 20), (140, 40), (150, 10)]


def test_prompts_and_steps_by_index_beside_their_dense_twins(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(PRESETS, "tiny", TINY_DSA)
    parts = ["--parts", "prefill,step", "--model", "tiny", "--topk", "60"]
    given = ["bench", "dsa", "--device", "cpu", *parts, "--lengths", "100", "--batches", "1,2"]
    assert main(given) == 0
    prefill, *steps = json.loads(capsys.readouterr().out.splitlines()[-1])["results"]
    assert prefill["prompt"] == 100 and prefill["dsa_ms"] > 0 and prefill["dense_ms"] > 0
    assert [row["sequences"] for row in steps] == [1, 2]
    assert all(row["dsa_ms"] > 0 and row["dense_ms"] > 0 for row in steps)
    assert main([*given, "--model", "moe-toy"]) != 0
    assert "model is 'moe-toy'; bench dsa has dsv32-slice" in capsys.readouterr().err


def test_experts_beside_transformers(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "moe", "--device", "cpu", "--rows", "1,3"]) == 0
    record = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert [row["rows"] for row in record["results"]] == [1, 3]
    assert all(row["cairn_us"] > 0 and row["ratio"] > 0 for row in record["results"])
    assert main(["bench", "products"]) == 2
    assert "bench products measures CUDA kernels" in capsys.readouterr().err
    assert main(["bench", "moe", "--model", "qwen3-0.6b"]) == 2
    assert "bench moe has qwen3-30b-a3b, moe-toy" in capsys.readouterr().err


def test_steps_of_a_model_that_is_quantised(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(PRESETS, "tiny", TINY_EXPERTS)
    given = ["--model", "tiny", "--device", "cpu", "--quantizations", "none,fp8"]
    sizes = ["--batches", "2,1", "--context", "20", "--steps", "2"]
    assert main(["bench", "step", *given, *sizes]) == 0
    rows = json.loads(capsys.readouterr().out.splitlines()[-1])["results"]
    assert [(row["quantization"], row["rows"]) for row in rows] == [
        ("none", 1), ("none", 2), ("fp8", 1), ("fp8", 2),
    ]  # fmt: skip
    assert all(row["median_ms"] > 0 for row in rows)
    assert [row["times_as_fast"] for row in rows[:2]] == [1, 1]
    assert rows[2]["weights_MB"] < rows[0]["weights_MB"]
