"""SGLang goes on without a plug-in that fails: these tests are who notices."""

from __future__ import annotations

import json
import logging
import subprocess
import sys
import tomllib
from importlib.util import find_spec
from pathlib import Path
from pkgutil import resolve_name
from typing import Any

import pytest

from cairn.sglang import check, plugin
from tests.sglang.served import NEEDS_SGLANG, command, environment, write_plain

ROOT = Path(__file__).parents[2]
HAS_SGLANG = find_spec("sglang") is not None


def test_the_entry_point_is_the_function() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    (value,) = project["entry-points"][check.GROUP].values()
    assert resolve_name(value) is plugin.register
    assert list(project["entry-points"][check.GROUP]) == [plugin.NAME]


@pytest.mark.skipif(HAS_SGLANG, reason="sglang is installed here")
def test_without_sglang_it_says_so(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.ERROR, logger="cairn"), pytest.raises(ImportError, match="sglang"):
        plugin.register()
    assert "cairn doctor --sglang" in caplog.text
    (finding,) = check.examine()
    assert finding.problem == "not installed; pip install 'cairn-llm[sglang]'"


def doctor(*arguments: str, **changed: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "cairn.cli.main", "doctor", "--sglang", *arguments],
        env={**environment(), **changed},
        capture_output=True,
        text=True,
        timeout=300,
    )


@pytest.mark.skipif(HAS_SGLANG, reason="sglang is installed here")
def test_the_doctor_fails_without_sglang() -> None:
    done = doctor()
    assert done.returncode == 1 and "cairn-llm[sglang]" in done.stdout


@pytest.mark.slow
@NEEDS_SGLANG
def test_the_doctor_finds_every_part() -> None:
    done = doctor("--json")
    found = json.loads(done.stdout)
    assert done.returncode == 0, found
    assert {part: state["problem"] for part, state in found.items()} == dict.fromkeys(
        (
            "sglang",
            "entry point sglang.srt.plugins",
            "registration",
            "--attention-backend hsa",
            "backend",
            "model classes",
            "model configs",
            "hooks",
        )
    )


@pytest.mark.slow
@NEEDS_SGLANG
def test_the_doctor_sees_a_plug_in_that_is_left_out_or_fails(tmp_path: Path) -> None:
    done = doctor("--json", SGLANG_PLUGINS="other")
    assert done.returncode == 1
    assert "leaves hsa out" in json.loads(done.stdout)["entry point sglang.srt.plugins"]["problem"]
    # A model class that cannot be imported: SGLang logs it and would start.
    (tmp_path / "sitecustomize.py").write_text(
        "import sys\nsys.modules['cairn.sglang.models.hils'] = None\n"
    )
    path = environment().get("PYTHONPATH", "")
    done = doctor("--json", PYTHONPATH=f"{tmp_path}:{path}")
    found = json.loads(done.stdout)
    assert done.returncode == 1
    assert "cairn.sglang.models.hils" in found["registration"]["problem"]
    # Nothing of it is offered: a server asked for hsa stops at its command line.
    assert found["--attention-backend hsa"]["problem"] == "the command line does not know it"


@pytest.mark.slow
@NEEDS_SGLANG
def test_what_cannot_be_is_refused_at_the_start(tmp_path: Path) -> None:
    folder = write_plain(tmp_path / "llama", "llama")
    cases: tuple[tuple[dict[str, Any], tuple[str, ...], str], ...] = (
        ({"top_k": 3}, ("--page-size", "16"), "cairn_hsa has top_k; known: policy, unit_size"),
        ({}, (), "page_size is 1, with which every row would be a page"),
    )
    for options, flags, message in cases:
        done = subprocess.run(
            command(folder, 30999, options, *flags),
            env=environment(),
            capture_output=True,
            text=True,
            timeout=300,
        )
        assert message in done.stdout + done.stderr
