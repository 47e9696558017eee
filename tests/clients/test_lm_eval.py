"""lm-eval: tasks from local files, by log-likelihood and by generation."""

from __future__ import annotations

import json
import os
import random
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from cairn.eval.tasks import fact, question
from cairn.models.source import BUNDLED
from cairn.text.prose import bundled_prose
from tests.server.process import ServerProcess

pytest.importorskip("lm_eval")
pytestmark = pytest.mark.slow

LONG_DOCUMENTS = Path(__file__).parents[2] / "benchmarks" / "long_documents"
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


def evaluate(
    server: ServerProcess, tokenizer: Path, folder: Path, tasks: str, home: Path, *flags: str
) -> dict[str, Any]:
    """The harness's results for tasks of a folder."""
    address = f"base_url={server.url}/v1/completions,model={server.model}"
    tokens = f"tokenizer_backend=huggingface,tokenizer={tokenizer},num_concurrent=1"
    done = subprocess.run(
        [
            *(sys.executable, "-m", "lm_eval", "--model", "local-completions"),
            *("--model_args", f"{address},{tokens},max_retries=1,max_length=8192"),
            *("--tasks", tasks, "--include_path", str(folder), *flags),
            *("--output_path", str(home / "results")),
        ],
        capture_output=True,
        text=True,
        timeout=580,
        env={**os.environ, "HF_HUB_OFFLINE": "1", "HF_HOME": str(home / "hf")},
    )
    assert done.returncode == 0, done.stderr[-3000:]
    (written,) = (home / "results").rglob("results_*.json")
    results: dict[str, Any] = json.loads(written.read_text())["results"]
    return results


def test_a_local_task(server: ServerProcess, model_folder: Path, tmp_path: Path) -> None:
    data = tmp_path / "data.jsonl"
    data.write_text("".join(json.dumps({"question": f"Colour {i} is"}) + "\n" for i in range(3)))
    (tmp_path / "choice.yaml").write_text(_CHOICE.format(data=data))
    (tmp_path / "written.yaml").write_text(_WRITTEN.format(data=data))
    results = evaluate(server, model_folder, tmp_path, "colours,spelled", tmp_path)
    assert 0 <= results["colours"]["acc,none"] <= 1
    assert results["spelled"]["exact_match,none"] == 0  # random weights


def document(rng: random.Random) -> dict[str, Any]:
    """About 2,700 tokens with a fact in the middle."""
    prose = bundled_prose()
    begin = prose.index(". ", rng.randrange(len(prose) // 2)) + 1
    cuts = [prose.index(". ", begin + size) + 1 for size in (5_000, 10_000)]
    values = rng.sample([str(value) for value in range(10_000, 100_000)], 4)
    facts = [fact("Mira Kolvane", value) for value in values]
    return {
        "input": question("Mira Kolvane"),
        "context": (prose[begin : cuts[0]] + facts[0] + prose[cuts[0] : cuts[1]]).strip(),
        "answers": [facts[0].strip()],
        "all_classes": sorted(one.strip() for one in facts),
    }


def test_questions_over_long_documents(tmp_path: Path) -> None:
    """A model that finds facts gets every point, but those for an answer that is not there."""
    rng = random.Random(0)
    documents = [document(rng) for _ in range(3)]
    documents[1] |= {"answers": ["Nobody knows."], "all_classes": ["Nobody knows.", "It is late."]}
    documents[1]["all_classes"] += documents[0]["answers"]
    data = tmp_path / "documents.jsonl"
    data.write_text("".join(json.dumps(one) + "\n" for one in documents))
    nano = BUNDLED["cairn-nano"]
    tasks, given = "document_qa,document_summary,document_choice", json.dumps({"data": str(data)})
    short = ("--gen_kwargs", "max_gen_toks=24", "--metadata", given)
    with ServerProcess(nano, tmp_path / "requests.jsonl") as server:
        results = evaluate(server, nano, LONG_DOCUMENTS, tasks, tmp_path, *short)
    assert results["document_qa"]["qa_f1_score,none"] == pytest.approx(2 / 3)
    assert results["document_choice"]["acc,none"] == pytest.approx(2 / 3)
    # It writes prose in place of a summary, so that few words are in the answer.
    assert 0 < results["document_summary"]["rouge_score,none"] < 0.2
