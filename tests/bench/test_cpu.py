"""`cairn bench cpu`: its engines, each in a process of its own."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from cairn import LLM
from cairn.bench import cpu
from cairn.cli.main import main
from cairn.models.pull import pulled_path
from tests.helpers import TINY_LLAMA, write_model
from tests.models.test_gguf import write_gguf


@pytest.mark.parametrize(
    "engines", ["cairn", pytest.param("cairn,transformers", marks=pytest.mark.slow)]
)
def test_cpu_engines_answer_in_turn(
    engines: str,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    path = write_gguf(tmp_path / "m.gguf", write_model(tmp_path, TINY_LLAMA))
    small = ["--model", str(path), "--threads", "1", "--scale", "0.05", "--repeat", "3"]
    assert main(["bench", "cpu", *small, "--engines", engines]) == 0
    *workloads, memory, served = json.loads(capsys.readouterr().out.splitlines()[-1])["results"]
    assert [row["workload"] for row in workloads] == [
        "batch 1",
        "batch 8, equal lengths",
        "batch 8, mixed lengths",
        "first token of a 2K prompt",
        "later questions on a 2K prefix",
    ]
    for row in workloads:
        for engine in engines.split(","):
            assert row[engine] == sorted(row["runs"][engine])[1] > 0
    assert served["cairn"] > memory["cairn"] > 10


def test_cpu_engines_that_are_missing_are_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = write_model(tmp_path, TINY_LLAMA)
    assert main(["bench", "cpu", "--model", str(folder), "--engines", "cairn"]) == 2
    assert "bench cpu needs a GGUF file" in capsys.readouterr().err
    path = write_gguf(tmp_path / "m.gguf", folder)
    monkeypatch.setattr(cpu, "find_spec", lambda name: None)
    assert main(["bench", "cpu", "--model", str(path), "--engines", "cairn,llama.cpp"]) == 2
    assert "pip install llama-cpp-python, or leave it out" in capsys.readouterr().err


@pytest.mark.slow
def test_llama_cpp_says_what_cairn_says() -> None:
    """Greedy text of the default model, alone and in a batch, and over a cached prefix."""
    pytest.importorskip("llama_cpp")
    with LLM("smollm2", device="cpu") as llm:
        assert llm.tokenizer is not None
        prompts = [
            llm.tokenizer.encode(t) for t in ("The capital of France is", "One, two, three,")
        ]
        expected = [result.token_ids for result in llm.generate(prompts, max_tokens=5)]
    command = [sys.executable, str(Path(cpu.__file__).with_name("llama_worker.py"))]
    requests = [
        {"prompts": prompts, "outputs": [5, 5], "keep": False},
        {"prompts": prompts[:1], "outputs": [5], "keep": False},
        {"prompts": prompts[:1], "outputs": [5], "keep": True},
    ]
    done = subprocess.run(
        [*command, str(pulled_path("smollm2")), "1", "512", "2"],
        input="".join(json.dumps(request) + "\n" for request in requests),
        capture_output=True,
        text=True,
        check=True,
    )
    ready, *answers = done.stdout.splitlines()
    assert ready == "ready"
    texts = [json.loads(answer)["texts"] for answer in answers]
    assert texts == [expected, expected[:1], expected[:1]]
