"""guidellm: a short benchmark, none of whose requests fails."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.server.process import ServerProcess

pytest.importorskip("guidellm")


@pytest.mark.slow
def test_a_benchmark(server: ServerProcess, model_folder: Path, tmp_path: Path) -> None:
    report = tmp_path / "report.json"
    done = subprocess.run(
        [
            *(str(Path(sys.executable).parent / "guidellm"), "run", "--disable-console"),
            *("--backend", f"kind=openai_http,target={server.url},model={server.model}"),
            *("--profile", "kind=synchronous", "--constraint", "kind=max_requests,count=3"),
            *("--data", "kind=synthetic_text,prompt_tokens=32,output_tokens=8"),
            *("--tokenizer", f"kind=hf_auto,model={model_folder}"),
            *("--output", f"kind=json,path={report}"),
        ],
        capture_output=True,
        text=True,
        timeout=580,
        env={**os.environ, "HF_HUB_OFFLINE": "1", "HF_HOME": str(tmp_path / "hf")},
    )
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
    (benchmark,) = json.loads(report.read_text())["benchmarks"]
    totals = benchmark["metrics"]["request_totals"]
    assert totals["successful"] == 3 and totals["errored"] == 0
