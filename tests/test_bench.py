from __future__ import annotations

import gc
import json
import os
import re
import signal
import subprocess
import sys
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

import cairn
from cairn import LLM
from cairn.bench import dsa, dsa_tier, hsa
from cairn.bench.client_speed import client_speed
from cairn.bench.engines import settled
from cairn.bench.hsa import LocalSelection
from cairn.bench.http_stream import HttpError, Reply
from cairn.bench.load import draw_requests, due_times, parse_load, redraw
from cairn.bench.profile import kind_of, per_step, share_out
from cairn.bench.replay import Prompts, read_trace, run
from cairn.bench.spec import _rate, fresh, loops
from cairn.bench.tier_engines import SMALL_BATCHES, full_length
from cairn.bench.tier_options import TierBench
from cairn.bench.workloads import seeded
from cairn.cli.main import main
from cairn.engine.inputs import StepInputs
from cairn.errors import ConfigError
from cairn.models.presets import PRESETS
from tests.helpers import TINY_DSA, TINY_EXPERTS, TINY_LLAMA, byte_tokenizer, exit_code, write_model


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
    assert sum(workload.output_lens) == 133_966
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
        assert all(row["the engine"].startswith("drafts") for row in rows)
        assert all(len(row["by place"].split()) == row["K"] for row in rows if row["share"])
        assert all(row["same text"] == f"{row['requests']}/{row['requests']}" for row in rows)
    else:
        assert found == [("quote", 1, 7), ("wrong", 1, 7)]
        assert rows[1]["accepted"].startswith("0/") and rows[1]["accepted"] > "0/1"
    assert all(row["plain tok/s"] > 0 and row["tok/s"] > 0 for row in rows)
    assert main(["bench", "spec", *engine, "--speculative", "ngram"]) == 2
    assert "leave it out" in capsys.readouterr().err


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


def test_profiles_need_a_gpu(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "profile", "--model", str(folder), "--device", "cpu"]) == 2
    assert "it needs a CUDA device" in capsys.readouterr().err


def test_the_collector_is_let_go_of_again() -> None:
    before = gc.get_freeze_count()
    with pytest.raises(ZeroDivisionError), settled():
        assert gc.get_freeze_count() > before
        raise ZeroDivisionError
    assert gc.get_freeze_count() == 0


def test_made_up_selections_have_the_published_locality() -> None:
    rows, pages, topk = 512, 2200, 32
    batches = [
        StepInputs.made_up(64, [rows], [pages * 64], [np.ones((1, pages))]).batch for _ in range(2)
    ]
    made_up = LocalSelection(SimpleNamespace(topk=topk))  # type: ignore[arg-type]
    select = partial(made_up, torch.zeros(rows, 2, topk, dtype=torch.int32))
    selected, again, later = (
        select(SimpleNamespace(batch=batch))  # type: ignore[arg-type]
        for batch in (batches[0], batches[0], batches[1])
    )
    assert again is selected and later is not selected  # once for all layers of a step
    assert (selected.diff(dim=-1) > 0).all()
    assert selected.min() >= 0 and selected.max() < pages - rows // 64 - 8
    for together, published in ((4, 2.5), (8, 3.4)):
        unions = selected.view(-1, together, 2, topk).transpose(1, 2).flatten(2)
        read = sum(len(own.unique()) for own in unions.flatten(0, 1))
        assert selected.numel() / read == pytest.approx(published, rel=0.04)


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


def test_kernels_that_overlap_are_not_counted_twice() -> None:
    assert share_out([]) == ({}, {})
    spans = [(0, 4, "a"), (3, 6, "b"), (1, 2, "c"), (10, 11, "a"), (11, 12, "b"), (15, 16, "a")]
    spent, idle = share_out(spans)
    assert spent == {"a": 6, "b": 3, "c": 0}
    assert idle == {"a": 7}


def test_kernels_of_one_shortened_name_are_added_up() -> None:
    long = 60 * "k"
    assert per_step({f"{long}1": 90.0, "a": 50.0, f"{long}2": 10.0}, 2, 1) == {48 * "k": 50.0}


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


def test_tier_contexts_beyond_the_device(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (row,) = rows_of("beyond", folder, capsys)
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


def test_an_index_beside_its_dense_twin(capsys: pytest.CaptureFixture[str]) -> None:
    sizes = ["--lengths", "100", "--batches", "1,2", "--topk", "60", "--new-rows", "50"]
    assert main(["bench", "dsa", "--device", "cpu", *sizes]) == 0
    record = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert [row["sequences"] for row in record["results"]] == [1, 2]
    assert all(row["dsa_ms"] > 0 and row["dense_ms"] > 0 for row in record["results"])
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


@pytest.mark.slow
def test_a_tier_of_rows(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Prompts and first tokens of a model with an index."""
    folder = write_model(tmp_path, {**TINY_DSA, "max_position_embeddings": 2048})
    without, _, _, _, host = rows_of("ttft", folder, capsys, "--prefix", "300")
    assert without["ms"] > 0 and host["mb_in"] > 0
    (row,) = rows_of("beyond", folder, capsys, "--longest", "1500", "--kv-cache-gib", "0.0007")
    assert row["context"] == 1500 and row["resident"] < 1 and row["prefill_s"] > 0


def test_the_last_chunk_of_a_prompt_may_be_shorter(monkeypatch: pytest.MonkeyPatch) -> None:
    made = []

    class Layer(dsa.Layer):
        def __init__(self, preset: Any, device: Any, length: int, seqs: int, new: int) -> None:
            made.append((length, new))
            super().__init__(preset, device, length, seqs, new)

    monkeypatch.setattr(dsa, "Layer", Layer)
    monkeypatch.setattr(dsa, "_CHUNK", 40)
    rows = list(dsa._prefills(TINY_DSA, torch.device("cpu"), [100, 150]))
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


OF_MODULES = {
    "sparse attention": "index_scan top_rows choose_rows row_attention attend_rows sparse_select "
    "sparse_extend union_attention",
    "attention": "latent latent_decode latent_prompt paged_decode paged_extend",
    "matrix products": "gemv fp8 packed",
    "experts": "experts route",
    "sampling": "sampling",
    "host memory": "swap_in swap_rows",
}


@pytest.mark.parametrize("kind", OF_MODULES)
def test_kernels_count_for_what_they_compute(kind: str) -> None:
    folder = Path(cairn.__file__).parent / "kernels"
    for module in OF_MODULES[kind].split():
        names = re.findall(r"def (_\w+_kernel)\(", (folder / f"{module}.py").read_text())
        if (folder / f"{module}.cu").exists():
            names.append(module)
        assert names and {kind_of(name) for name in names} == {kind}, (module, names)


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


# -- servers under load -----------------------------------------------------------------------


@pytest.mark.parametrize(
    ("spec", "count", "lengths", "outputs"),
    [
        ("64x1024-6144:100-300", 64, (1024, 6144), (100, 300)),
        ("16x30000:256", 16, (30_000, 30_000), (256, 256)),
        ("7:2", 1, (7, 7), (2, 2)),
        ("20,100,500:2+concurrency=1", 3, (20, 500), (2, 2)),
        ("8x100:5+prefix=50+rate=2.5", 8, (150, 150), (5, 5)),
    ],
)
def test_workloads_have_the_lengths_they_name(
    spec: str, count: int, lengths: tuple[int, int], outputs: tuple[int, int]
) -> None:
    load = parse_load(spec)
    (asked,) = cold = draw_requests(load, 0, 1000)
    (again,) = redraw(load, cold, 1, 1000)
    assert draw_requests(load, 0, 1000) == cold  # for every server
    assert len(asked) == count
    for requests in (asked, again):
        found = [len(one.prompt) for one in requests]
        assert lengths[0] <= min(found) and max(found) <= lengths[1]
        assert all(outputs[0] <= one.output_len <= outputs[1] for one in requests)
        assert all(0 <= token < 1000 for one in requests for token in one.prompt)
        (part,) = load.parts
        prefixes = {tuple(one.prompt[: part.prefix]) for one in requests}
        assert len(prefixes) == 1
    shapes = [[(len(one.prompt), one.output_len) for one in some] for some in (asked, again)]
    assert shapes[0] == shapes[1]
    assert all(a.prompt[:5] != b.prompt[:5] for a, b in zip(asked, again, strict=True))


def test_workloads_can_run_at_once_or_at_a_rate() -> None:
    load = parse_load(" 4x10:2   3x7:1+rate=100+prefix=2 ")
    assert load.spec == "4x10:2 3x7:1+rate=100+prefix=2"
    assert [[len(one.prompt) for one in part] for part in draw_requests(load, 0, 9)] == [
        [10] * 4,
        [9] * 3,
    ]
    at_once, paced = (due_times(part, 0) for part in load.parts)
    assert at_once == [0.0] * 4
    assert sorted(paced) == paced and paced[0] > 0 and paced[-1] < 1


def test_seeded_requests_can_be_served() -> None:
    (asked,) = draw_requests(parse_load("256x100-1024:100-1024"), 0, 10_001)
    published = seeded(256, 151_936)
    assert [one.prompt for one in asked] == published.prompts
    assert [one.output_len for one in asked] == published.output_lens


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        ("", "it is empty"),
        ("64", "'64' is not of the form COUNTxIN:OUT"),
        ("0x5:1", "COUNT is '0'; it must be a whole number from 1"),
        ("x5:1", "COUNT is ''"),
        ("3x:1", "IN is ''"),
        ("3x9-4:1", "IN is '9-4'; write the lower end first"),
        ("3x9:-1", "OUT is ''"),
        ("3x9:1.5", "OUT is '1.5'; it must be a whole number"),
        ("3x9,10:1", "IN is a list with one request for each length; remove COUNT"),
        ("3x9:1+prefix=", "prefix is ''"),
        ("3x9:1+rate=0", "rate is '0'; it must be a number above 0"),
        ("3x9:1+rate=1+concurrency=2", "concurrency and rate exclude each other; give one"),
        ("3x9:1+rate=1+rate=2", "rate is given twice"),
        ("3x9:1+burst=2", "'burst' is no option; choose among prefix, concurrency, rate"),
    ],
)
def test_bad_specs_are_named(spec: str, message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "serve", "--workload", spec, "--url", "http://127.0.0.1:9/v1"]) == 2
    error = capsys.readouterr().err
    assert message in error and "write it like 64x1024-6144:100-300" in error


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--workload", "1:1"], "there is no server; add --spawn FLAGS"),
        (["--spawn", "x="], "there is no workload; add one like --workload 64x1024-6144:100-300"),
        (["--workload", "1:1", "--url", "nowhere"], "it must be like http://127.0.0.1:8000/v1"),
        (["--workload", "1:1", "--spawn", "a=--model 'x"], "close every quote"),
        (["--workload", "1:1", "--spawn", "a=--tp 1", "--spawn", "a=--tp 2"], "called 'a'"),
        (
            ["--workload", "1:1", "--spawn", "--model hils-345m-hd128 --load-format dummy"],
            "preset hils-345m-hd128 cannot be given a tokenizer",
        ),
        (["--workload", "1:1", "--spawn", "a=", "--json", "/nowhere/x"], "there is no such folder"),
        (["--client-speed", "--workload", "1:1"], "give it alone"),
    ],
)
def test_bad_loads_are_named(
    arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["bench", "serve", *arguments]) == 2
    assert message in capsys.readouterr().err


def test_replies_are_taken_apart_with_the_moments_of_their_bytes() -> None:
    def chunk(data: bytes) -> bytes:
        return b"%x\r\n%b\r\n" % (len(data), data)

    head = b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n"
    first = chunk(b'data: {"a": 1}\n\ndata: {"a"')
    rest = chunk(b": 2}\r\n\r\n") + chunk(b'data: {"a": 3}\n\ndata: [DONE]\n\n')
    raw = head + first + rest + b"0\r\n\r\n"
    one, two, three = (raw.index(mark) + len(mark) for mark in (b"1}\n", b"2}\r\n", b"3}\n"))
    for cut in range(1, len(raw)):
        reply = Reply([raw[:cut], raw[cut:]], [1.0, 2.0])
        expected = [(1.0 if end <= cut else 2.0) for end in (one, two, three)]
        found = list(reply.events())
        assert [moment for moment, _ in found] == expected
        assert [event["a"] for _, event in found] == [1, 2, 3]
        if cut < len(raw) - 4:
            with pytest.raises(HttpError, match=r"ends too early|without an answer"):
                list(Reply([raw[:cut]], [1.0]).events())
    refused = Reply([b"HTTP/1.1 404 Not Found\r\nContent-Length: 4\r\n\r\nnone"], [1.0])
    with pytest.raises(HttpError, match="404 none"):
        refused.body()


def test_the_client_measures_itself() -> None:
    found = client_speed(streams=8, events=50)
    assert found["events"] == 400 and 8 <= found["reads"] <= 8 + 400 + 8
    assert found["events_per_second"] > 0 and found["events_per_cpu_second"] > 0


def test_a_server_is_started_measured_twice_and_stopped(
    folder: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    output = tmp_path / "out.json"
    workloads = ["6x10-30:5-9", "20,100:2+concurrency=1 4x30:6+prefix=128", "3x8:4+rate=200"]
    arguments = [item for spec in workloads for item in ("--workload", spec)]
    flags = f"tiny=--model {folder} --device cpu --threads 1 --page-size 64"
    servers = [
        "--spawn",
        flags,
        "--spawn",
        "bad=--model /nowhere",
        "--url",
        "http://127.0.0.1:9/v1",
    ]
    more = ["--vocab-size", "256", "--json", str(output)]
    assert main(["bench", "serve", *arguments, *servers, *more]) == 1  # of the last two
    out, err = capfd.readouterr()
    record = json.loads(output.read_text())
    passes = record.pop("requests")
    assert json.loads(out.splitlines()[-1]) == record
    good, bad, silent = record["results"]
    first = good["workloads"][0]
    assert f"tiny, cold, {workloads[0]}: {first['seconds']:.2f} s, " in err
    assert good["server"] == "tiny" and good["model"] == folder.name and good["error"] is None
    assert good["seconds_to_ready"] > 0
    assert [(one["workload"], one["pass"]) for one in good["workloads"]] == [
        (spec, name) for name in ("cold", "warm") for spec in workloads
    ]
    for one in good["workloads"]:
        assert one["failed"] == 0 and one["seconds"] > 0 and one["output_tokens_per_second"] > 0
        assert 0 < one["first_token_ms_p50"] <= one["first_token_ms_p99"] < 1e3 * one["seconds"]
        assert one["between_tokens_ms_p50"] <= one["largest_gap_ms"] < 1e3 * one["seconds"]
        # Nothing is cached but the prefix that requests of a part share, all but the first.
        shared = 3 * 128 if "prefix" in one["workload"] else 0
        assert one["cached_tokens"] == shared
    assert [[len(some) for some in passes[0][name]] for name in ("cold", "warm")] == [[6, 6, 3]] * 2
    alone = [one for one in passes[0]["warm"][1] if one["part"] == 0]
    assert [one["prompt_tokens"] for one in alone] == [20, 100]
    assert alone[1]["begin"] >= alone[0]["begin"] + alone[0]["total"]
    assert alone[0]["output_tokens"] == 2
    # Events of random bytes may be fewer than tokens, but each has its moment.
    assert all(len(one["gaps"]) < one["output_tokens"] for one in passes[0]["cold"][0])
    assert "tiny, cold" in out and "first token of 100 in, ms" in out
    # The other two have nothing to show but why.
    assert bad["error"] == "it ended with exit code 2 before it was ready"
    assert "model '/nowhere' is no folder" in err
    assert "does not answer with a list of models" in silent["error"]
    children = Path(f"/proc/self/task/{os.getpid()}/children").read_text().split()
    commands = [Path(f"/proc/{child}/cmdline").read_bytes() for child in children]
    assert not any(str(folder).encode() in command for command in commands)


def test_a_server_that_dies_is_reported_with_its_output(folder: Path, tmp_path: Path) -> None:
    output = tmp_path / "out.json"
    bench = subprocess.Popen(
        [
            *(sys.executable, "-m", "cairn.cli.main", "bench", "serve", "--vocab-size=256"),
            *("--workload=1x10:1", "--workload=2x10:4000", f"--json={output}"),
            f"--spawn=tiny=--model {folder} --device cpu --threads 1",
        ],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
    )
    with bench:
        assert bench.stderr is not None
        lines = []
        for line in bench.stderr:
            lines.append(line)
            if "tiny, cold, 1x10:1: " in line:
                pid = bench.pid
                (server,) = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
                os.kill(int(server), signal.SIGKILL)
        assert bench.wait() == 1, lines
    printed = "".join(lines)
    assert "tiny failed: it ended with exit code -9; it printed:" in printed
    assert "Cairn serves" in printed.partition("it printed:")[2]
    (result,) = json.loads(output.read_text())["results"]
    first, second = result["workloads"]  # and no warm ones
    assert first["failed"] == 0 and second["failed"] == 2 and second["first_error"]
