"""aider edits a file through the server. It pins its packages: install it apart, and into PATH."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
from pathlib import Path

import pytest

from tests.server.process import ServerProcess

# Random weights know no Python, so the answer is bound. aider asks, streams, reads and edits.
_ANSWER = "calc.py\n```\ndef add(a, b):\n    return a + b\n```\n"


@pytest.mark.slow
def test_a_file_is_edited(server: ServerProcess, tmp_path: Path) -> None:
    aider = shutil.which("aider")
    if aider is None:
        pytest.skip("needs aider in PATH")
    (tmp_path / "calc.py").write_text("def add(a, b):\n    return a - b\n")
    settings = [
        {
            "name": f"openai/{server.model}",
            "edit_format": "whole",
            "extra_params": {"extra_body": {"structured_outputs": {"choice": [_ANSWER]}}},
        }
    ]
    (tmp_path / "settings.yml").write_text(json.dumps(settings))  # JSON is YAML
    done = subprocess.run(
        [
            *(aider, "--model", f"openai/{server.model}", "--no-git", "--yes-always"),
            *("--model-settings-file", "settings.yml", "--map-tokens", "0", "--no-check-update"),
            *("--no-show-model-warnings", "--analytics-disable", "--no-show-release-notes"),
            *("--message", "Let add return the sum.", "calc.py"),
        ],
        capture_output=True,
        text=True,
        timeout=580,
        cwd=tmp_path,
        env={
            **os.environ,
            "HOME": str(tmp_path),
            "OPENAI_API_BASE": f"{server.url}/v1",
            "OPENAI_API_KEY": "unused",
        },
    )
    assert done.returncode == 0, done.stderr[-2000:]
    assert "Applied edit to calc.py" in done.stdout, done.stdout[-2000:]
    assert (tmp_path / "calc.py").read_text() == "def add(a, b):\n    return a + b\n"
