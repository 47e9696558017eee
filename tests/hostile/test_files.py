"""Changed model files load or are refused by name, within limits of time and memory."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

KINDS = ("gguf", "safetensors", "config", "tokenizer", "template")


def check(folder: Path, count: int, *kinds: str) -> None:
    command = [sys.executable, "-m", "tests.hostile.cases", str(folder), "0", str(count), *kinds]
    done = subprocess.run(command, capture_output=True, text=True)
    last = (done.stdout.splitlines() or [""])[-1]
    if done.returncode:
        pytest.fail(f"case {last} ended the process ({done.returncode}): {done.stderr[-2000:]}")
    report = json.loads(last)
    assert not report["failures"], "\n".join(report["failures"])
    for kind in kinds:
        outcomes = report["outcomes"][kind]
        assert sum(outcomes.values()) == count
        assert count / 50 < outcomes["loaded"] < count / 2  # neither all broken, nor all harmless


def test_fifty_changed_files_of_each_kind(tmp_path: Path) -> None:
    check(tmp_path, 50, *KINDS)


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_thousands_of_changed_files(kind: str, tmp_path: Path) -> None:
    check(tmp_path, 5000, kind)
