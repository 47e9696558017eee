"""Run by test_steps.py in Triton's interpreter: kernels, and decode steps as graphs run them."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch

from cairn.kernels import sparse_decode, sparse_scratch
from tests.sglang.lanes import VOCAB, Lane

QUEST = {"policy": "quest", "topk": 1, "window": 4, "sinks": 0, "layers": "1", "prefill": "sparse"}


@pytest.fixture(autouse=True)
def two_strips(monkeypatch: pytest.MonkeyPatch) -> None:
    """A GPU is filled with up to 64 programs per sequence and head. The interpreter runs one after
    the other, and the few pages here leave all but the first without candidates."""
    for module in (sparse_decode, sparse_scratch):
        monkeypatch.setattr(module, "strips_of", lambda shape, seqs: 2)


@pytest.mark.parametrize(
    ("chunk_size", "page_size", "options"),
    [
        (None, 16, QUEST),
        (16, 15, {"topk": 1}),
    ],
    ids=["quest", "hils"],
)
def test_recorded_steps(chunk_size: int | None, page_size: int, options: dict[str, Any]) -> None:
    """Two requests one after the other on so few pages that the second gets those of the first;
    each completes a page in a recorded step and then selects it or another in recorded steps."""
    lane = Lane(
        chunk_size=chunk_size,
        page_size=page_size,
        options=options,
        num_pages=4,
        seed=1,
        window=4,
        kv_heads=1,
        dtype=torch.float32,
        interpreted=True,
    )
    lane.attention.prepare_recording(2)
    rng = random.Random(0)
    begin, end = 3 * page_size - 2, 3 * page_size + 7
    for slot in (1, 2):
        request = lane.pages.admit([rng.randrange(VOCAB) for _ in range(end)], slot)
        lane.compute([(request, begin)])
        for _ in range(begin, end):
            lane.replay([(request, 1)], padded=2)
        lane.check(request, 2e-5)
        lane.pages.finish(request)
    assert min(lane.pages.lives[1:]) == 2
