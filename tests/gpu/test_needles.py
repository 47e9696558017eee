"""Facts in long texts, with caches of 16 and of 8 bits."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from cairn.cli.main import main

pytestmark = pytest.mark.gpu
# (tokens, samples): each sample asks for five facts
LENGTHS = [
    (65536, 2),
    *(pytest.param(*own, marks=pytest.mark.slow) for own in [(65536, 10), (524288, 2)]),
]


@pytest.mark.parametrize(("length", "samples"), LENGTHS)
def test_cairn_nano_finds_as_many_facts(length: int, samples: int, tmp_path: Path) -> None:
    found = {}
    for cache in ("auto", "fp8", "int8"):
        answers = tmp_path / cache
        asked = ["--model", "cairn-nano", "--lengths", str(length), "--samples", str(samples)]
        more = ["--kv-cache-dtype", cache, "--chunked-prefill-size", "16384", "--kv-cache-gib", "8"]
        assert main(["eval", "needle", *asked, *more, "--answers", str(answers)]) == 0
        lines = [json.loads(line) for line in answers.read_text().splitlines()]
        found[cache] = sum(bool(line.get("right")) for line in lines)
    assert found["auto"] >= 4 * samples
    assert min(found.values()) >= found["auto"] - 1
