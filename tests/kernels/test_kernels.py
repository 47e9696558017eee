"""Kernels without a GPU: run in Triton's interpreter, and compiled for one, each in a process."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

pytest.importorskip("triton")


@pytest.mark.parametrize(
    ("half", "which"),
    [
        *(("0", "not slow"), ("1", "not slow")),
        *(pytest.param(half, "slow", marks=pytest.mark.slow) for half in "01"),
    ],
)
def test_kernels_agree_with_their_references_in_the_interpreter(half: str, which: str) -> None:
    """Every other test of the files, so that two workers can share them."""
    tests = map(str, sorted(Path(__file__).parent.glob("interpreted*.py")))
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-m", which, *tests],
        env={**os.environ, "TRITON_INTERPRET": "1", "EVERY_OTHER_TEST": half},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    assert done.returncode == 0, done.stdout[-3000:]


@pytest.mark.parametrize("forms", ["some", pytest.param("all", marks=pytest.mark.slow)])
def test_kernels_compile_for_a_gpu_that_is_not_here(forms: str) -> None:
    script = Path(__file__).with_name("compile_for_gpu.py")
    done = subprocess.run([sys.executable, str(script), forms], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-3000:]


def test_sampling_draws_from_the_softmax(monkeypatch: pytest.MonkeyPatch) -> None:
    """By blocks, and within them: frequencies within five standard deviations."""
    from cairn.kernels import sampling
    from cairn.kernels.references import sample_reference

    monkeypatch.setattr(sampling, "_BLOCK", 4)
    rows, vocab = 20000, 10
    logits = torch.linspace(0, 2, vocab).expand(rows, -1)
    seeds = torch.arange(rows) * 0x9E3779B97F4A7C15 % 2**62
    tokens = sample_reference(logits, torch.ones(rows), seeds)
    expected = logits[0].softmax(-1)
    found = tokens.bincount(minlength=vocab) / rows
    deviation = (expected * (1 - expected) / rows).sqrt()
    assert ((found - expected).abs() < 5 * deviation).all()
