"""The adapter between SGLang's batches and Cairn's attention, without SGLang."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from cairn.sglang.hooks import extend_slots
from cairn.sglang.step import PageLives
from tests.sglang.lanes import Lane

QUEST = {"policy": "quest", "topk": 2, "window": 20, "sinks": 1, "prefill": "sparse"}


@pytest.mark.parametrize(
    ("chunk_size", "page_size", "options"),
    [
        (None, 8, QUEST),
        (None, 8, {**QUEST, "policy": "mean", "unit_size": 4, "layers": "1", "dense_below": 30}),
        (8, 7, {}),
    ],
    ids=["quest", "mean-in-units", "hils"],
)
@pytest.mark.parametrize(
    "seed", [0, *(pytest.param(seed, marks=pytest.mark.slow) for seed in (1, 2))]
)
def test_recycled_and_shared_pages_change_nothing(
    chunk_size: int | None, page_size: int, options: dict[str, Any], seed: int
) -> None:
    lane = Lane(
        chunk_size=chunk_size, page_size=page_size, options=options, num_pages=56, seed=seed
    )
    seen = lane.serve(250, 1e-9)
    assert seen["hits"] > 10 and seen["recycled"] > 2


def test_a_landmark_of_an_earlier_life_would_be_noticed() -> None:
    """The same day with a counter of lives that stands still is not survived."""
    lane = Lane(chunk_size=None, page_size=8, options=QUEST, num_pages=60, seed=0)
    lane.attention._lives.counts.fill_(1)
    lane.attention._lives.begin = lambda pages, offsets: None  # type: ignore[method-assign]
    with pytest.raises(Exception, match=r"already has its landmark|not close"):
        lane.serve(250, 1e-9)


@pytest.mark.slow
def test_recorded_decode_steps_in_the_interpreter() -> None:
    pytest.importorskip("triton")
    tests = Path(__file__).with_name("interpreted.py")
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", str(tests)],
        env={**os.environ, "TRITON_INTERPRET": "1"},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout[-3000:]


def test_lives_rise_with_first_rows_only() -> None:
    lives = PageLives(4, torch.device("cpu"))
    lives.begin(torch.tensor([2, 2, 3]), torch.tensor([0, 1, 5]))
    lives.begin(torch.tensor([2, 4]), torch.tensor([0, 0]))
    assert lives.counts.tolist() == [0, 0, 2, 0, 1]


@pytest.mark.parametrize("size", [1, 7, 8, 63])
def test_slots_of_new_tokens(size: int) -> None:
    generator = torch.Generator().manual_seed(size)
    for _ in range(50):
        prefix = torch.randint(0, 5 * size, (4,), generator=generator)
        length = prefix + torch.randint(1, 4 * size + 2, (4,), generator=generator)
        free = torch.randperm(100, generator=generator) + 1
        last = torch.where(prefix > 0, 1000 * size + (prefix - 1) % size, -1)
        total = int((length - prefix).sum())
        found = extend_slots(prefix, length, last, free, size, total).tolist()
        expected, pages = [], iter(free.tolist())
        for s in range(4):
            slot = int(last[s])
            for position in range(int(prefix[s]), int(length[s])):
                slot = next(pages) * size if position % size == 0 else slot + 1
                expected.append(slot)
        assert found == expected
