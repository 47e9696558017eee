"""Examples of README and docs/serving.md run; the schema holds under a generator of requests."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.patience import PATIENCE
from tests.server.process import ServerProcess

ROOT = Path(__file__).parents[2]
TEXTS = [(ROOT / name).read_text() for name in ("README.md", "docs/serving.md")]
BLOCKS = [block for text in TEXTS for block in re.findall(r"```sh\n(curl .*?)```", text, re.DOTALL)]


@pytest.mark.skipif(shutil.which("curl") is None, reason="needs curl")
@pytest.mark.parametrize("block", BLOCKS)
def test_the_examples_run(server: ServerProcess, block: str) -> None:
    command = block.replace("http://127.0.0.1:8000", server.url).replace("smollm2", server.model)
    done = subprocess.run(["sh", "-c", command], capture_output=True, text=True, timeout=PATIENCE)
    assert done.returncode == 0, done.stderr
    if "/v1/messages" in block or "/v1/responses" in block:
        assert "usage" in done.stdout or "input_tokens" in done.stdout
    elif "stream" in block:
        assert done.stdout.rstrip().endswith("data: [DONE]")
    elif "metrics" in block:
        assert "cairn_pages" in done.stdout
    else:
        answer = json.loads(done.stdout)
        if "json_schema" in block:
            assert set(json.loads(answer["choices"][0]["message"]["content"])) == {"cold", "sure"}
        if "tools" in block:
            assert answer["choices"][0]["finish_reason"] == "tool_calls"


@pytest.mark.parametrize("block", re.findall(r"```python\n(.*?)```", TEXTS[0], re.DOTALL))
def test_the_python_examples_run(block: str, model_folder: Path) -> None:
    """With a tiny model instead of the default one."""
    given = f"model={str(model_folder)!r}, device='cpu', kv_cache_gib=0.05, "
    exec(re.sub(r"LLM\((?=\)|\w)", f"LLM({given}", block), {})


def test_there_are_examples_of_every_route(server: ServerProcess) -> None:
    routes = server.get("/openapi.json").json()["paths"]
    assert len(BLOCKS) >= 10
    for route in routes:
        assert route.replace("{name}", "NAME").replace("{response_id}", "ID") in TEXTS[1]


def test_every_flag_is_in_the_help() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "cairn.cli.main", "serve", "--help"],
        capture_output=True,
        text=True,
        timeout=PATIENCE,
    )
    for flag in ("--host", "--port", "--api-key", "--cors-origin", "--max-body-mib", "--page-size"):
        assert flag in done.stdout
    assert "--help" in done.stdout


@pytest.mark.parametrize(
    ("examples", "phases"),
    [
        (3, "fuzzing"),  # about 35 cases
        # Of 19 operations 11 have parameters or a body: 10,000 cases, and those of other phases.
        pytest.param(920, "examples,coverage,fuzzing,stateful", marks=pytest.mark.slow),
    ],
)
def test_schemathesis_finds_no_server_error(
    model_folder: Path, tmp_path: Path, examples: int, phases: str
) -> None:
    pytest.importorskip("schemathesis")
    # Answers are as long as the context unless a request says otherwise: a short one is quicker.
    with ServerProcess(model_folder, tmp_path / "log", "--context-length=64") as server:
        run_schemathesis(server, tmp_path, f"--max-examples={examples}", f"--phases={phases}")


def run_schemathesis(server: ServerProcess, tmp_path: Path, *flags: str) -> None:
    done = subprocess.run(
        [
            str(Path(sys.executable).parent / "schemathesis"),
            "run",
            f"{server.url}/openapi.json",
            "--checks=not_a_server_error",
            "--seed=1",
            f"--request-timeout={PATIENCE}",
            "--workers=4",
            "--no-color",
            *flags,
        ],
        capture_output=True,
        text=True,
        cwd=tmp_path,
        env={**os.environ, "PYTHONIOENCODING": "utf-8"},
    )
    assert done.returncode == 0, done.stdout[-6000:]
    assert server.get("/health").status_code == 200
    server.wait_until_idle()
