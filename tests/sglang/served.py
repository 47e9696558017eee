"""Stock SGLang, started from its command line with the plug-in, and what it answers."""

from __future__ import annotations

import contextlib
import json
import os
import random
import shutil
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch

from cairn import LLM
from tests.helpers import TINY, write_model

TOLERANCE = 5e-5
_START_SECONDS = 400

NEEDS_SGLANG = pytest.mark.skipif(
    find_spec("sglang") is None, reason="needs sglang: `make test-sglang` has it"
)


@dataclass(frozen=True)
class Answer:
    token_ids: list[int]
    cached_tokens: int
    prompt_tokens: int
    logprobs: torch.Tensor
    """[tokens, vocab]: after each prompt token from `first` on, then after all but the last
    generated token."""
    first: int


class Served:
    def __init__(self, url: str, vocab: int) -> None:
        self._url = url
        self._vocab = vocab

    def generate(self, prompt: list[int], max_tokens: int, first: int = 0) -> Answer:
        return self.batch([prompt], max_tokens, first)[0]

    def batch(self, prompts: Sequence[list[int]], max_tokens: int, first: int = 0) -> list[Answer]:
        """`first`: the prompt's token after which log-probabilities begin. SGLang computes them
        anew, so that a prefix can be taken from its cache only up to there."""
        answers = self.post(
            "/generate",
            {
                "input_ids": list(prompts),
                "sampling_params": {
                    "temperature": 0,
                    "max_new_tokens": max_tokens,
                    "ignore_eos": True,
                },
                "return_logprob": True,
                "logprob_start_len": first,
                "top_logprobs_num": self._vocab,
            },
        )
        return [self._answer(answer, first) for answer in answers]

    def _answer(self, answer: dict[str, Any], first: int) -> Answer:
        meta = answer["meta_info"]
        # The first entry of a prompt is about its first token, which nothing comes before.
        rows = [*meta["input_top_logprobs"][1:], *meta["output_top_logprobs"]]
        logprobs = torch.full((len(rows), self._vocab), float("nan"))
        for row, scores in zip(logprobs, rows, strict=True):
            for score, token, _ in scores:
                row[token] = score
        return Answer(
            answer["output_ids"], meta["cached_tokens"], meta["prompt_tokens"], logprobs, first
        )

    def post(self, path: str, body: dict[str, Any]) -> Any:
        request = urllib.request.Request(
            self._url + path, json.dumps(body).encode(), {"content-type": "application/json"}
        )
        with urllib.request.urlopen(request, timeout=120) as reply:
            return json.load(reply)


def environment() -> dict[str, str]:
    """For SGLang on a CPU."""
    return {
        **os.environ,
        "SGLANG_USE_CPU_ENGINE": "1",
        "CUDA_VISIBLE_DEVICES": "",
        "HF_HUB_OFFLINE": "1",
        "OMP_NUM_THREADS": "1",
    }


def command(folder: Path, port: int, options: dict[str, Any], *flags: str) -> list[str]:
    overrides = json.dumps({"cairn_hsa": options}) if options else "{}"
    return [
        *(sys.executable, "-m", "sglang.launch_server"),
        *("--model-path", str(folder), "--port", str(port), "--attention-backend", "hsa"),
        *("--json-model-override-args", overrides, "--device", "cpu", "--dtype", "float32"),
        *("--skip-tokenizer-init", "--skip-server-warmup", "--grammar-backend", "none"),
        *("--disable-cuda-graph", "--disable-overlap-schedule", "--mem-fraction-static", "0.1"),
        *flags,
    ]


def write_plain(folder: Path, model_type: str) -> Path:
    """A random Llama or Qwen3."""
    own = {
        "architectures": [f"{model_type.capitalize()}ForCausalLM"],
        "model_type": model_type,
        "head_dim": 8,
        "hidden_act": "silu",
        "bos_token_id": 1,
        "num_hidden_layers": 3,
        "max_position_embeddings": 2048,
        "tie_word_embeddings": False,
    }
    return write_model(folder, {**TINY, **own})


def copy_model(source: Path, target: Path) -> Path:
    """SGLang loads every .safetensors file of a folder, golden logits included."""
    target.mkdir(parents=True)
    for name in ("config.json", "model.safetensors"):
        shutil.copy(source / name, target / name)
    return target


@contextlib.contextmanager
def serve(
    folder: Path, vocab: int, log: Path, options: dict[str, Any], *flags: str
) -> Iterator[Served]:
    port = _free_port()
    url = f"http://127.0.0.1:{port}"
    with log.open("w") as output:
        process = subprocess.Popen(
            command(folder, port, options, *flags),
            env=environment(),
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
    try:
        deadline = time.monotonic() + _START_SECONDS
        while not _answers(url):
            if process.poll() is not None or time.monotonic() > deadline:
                raise AssertionError(f"SGLang did not start:\n{log.read_text()[-5000:]}")
            time.sleep(1)
        yield Served(url, vocab)
    finally:
        # Its own session: scheduler and detokenizer go with it.
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def _free_port() -> int:
    """SGLang adds to it for its other ports, so it must not be too high."""
    for port in random.sample(range(20_000, 40_000), 100):
        with socket.socket() as free, contextlib.suppress(OSError):
            free.bind(("127.0.0.1", port))
            return port
    raise AssertionError("no port is free")


def _answers(url: str) -> bool:
    try:
        with urllib.request.urlopen(f"{url}/health", timeout=5) as reply:
            return bool(reply.status == 200)
    except (urllib.error.URLError, ConnectionError, TimeoutError):
        return False


def assert_same(answer: Answer, prompt: list[int], llm: LLM) -> None:
    """After every token, of the prompt or generated, from the first that was asked for."""
    expected = llm.logprobs(prompt + answer.token_ids[:-1])[answer.first :]
    torch.testing.assert_close(answer.logprobs, expected, rtol=0, atol=TOLERANCE)
