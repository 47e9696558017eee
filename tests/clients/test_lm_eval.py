"""lm-eval: a task from local files, by log-likelihood and by generation."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.server.process import ServerProcess

pytest.importorskip("lm_eval")

_CHOICE = """
task: colours
dataset_path: json
dataset_kwargs: {{data_files: {{test: {data}}}}}
test_split: test
output_type: multiple_choice
doc_to_text: "{{{{question}}}}"
doc_to_target: 0
doc_to_choice: ["red", "blue"]
metric_list: [{{metric: acc}}]
"""
_WRITTEN = """
task: spelled
dataset_path: json
dataset_kwargs: {{data_files: {{test: {data}}}}}
test_split: test
output_type: generate_until
doc_to_text: "{{{{question}}}}"
doc_to_target: "red"
generation_kwargs: {{until: ["\\n"], max_gen_toks: 8, temperature: 0}}
metric_list: [{{metric: exact_match}}]
"""


@pytest.mark.slow
def test_a_local_task(server: ServerProcess, model_folder: Path, tmp_path: Path) -> None:
    data = tmp_path / "data.jsonl"
    data.write_text("".join(json.dumps({"question": f"Colour {i} is"}) + "\n" for i in range(3)))
    (tmp_path / "choice.yaml").write_text(_CHOICE.format(data=data))
    (tmp_path / "written.yaml").write_text(_WRITTEN.format(data=data))
    address = f"base_url={server.url}/v1/completions,model={server.model}"
    tokens = f"tokenizer_backend=huggingface,tokenizer={model_folder},num_concurrent=1"
    done = subprocess.run(
        [
            *(sys.executable, "-m", "lm_eval", "--model", "local-completions"),
            *("--model_args", f"{address},{tokens},max_retries=1"),
            *("--tasks", "colours,spelled", "--include_path", str(tmp_path)),
            *("--output_path", str(tmp_path / "results")),
        ],
        capture_output=True,
        text=True,
        timeout=580,
        env={**os.environ, "HF_HUB_OFFLINE": "1", "HF_HOME": str(tmp_path / "hf")},
    )
    assert done.returncode == 0, done.stderr[-3000:]
    (written,) = (tmp_path / "results").rglob("results_*.json")
    results = json.loads(written.read_text())["results"]
    assert 0 <= results["colours"]["acc,none"] <= 1
    assert results["spelled"]["exact_match,none"] == 0  # random weights
