"""Drafts change no token on a GPU either, from recorded steps or not, and compile nothing."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from cairn import LLM, SamplingParams
from cairn.memory.landmarks import LandmarkPool
from tests.engine.test_speculation import Always, Liar
from tests.helpers import TINY_HILS, TINY_LLAMA, TINY_OLMO3, tokens_of, write_model
from tests.memory.test_landmarks import shape

pytestmark = pytest.mark.gpu

LARGE = {"hidden_size": 64, "max_position_embeddings": 4096}  # heads of 16
DRAFTS = {"hsa_topk": 2, "hsa_window": 32, "hsa_dense_below": 0}
KINDS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "ngram": (TINY_LLAMA, {}),
    "windows": (TINY_OLMO3, {}),
    "hils": (TINY_HILS, {}),
    "hsa": (TINY_LLAMA, {"attention_backend": "hsa", **DRAFTS}),
    "sparse": (TINY_LLAMA, {"speculative": "sparse", **DRAFTS}),
}

PARAMS = [
    SamplingParams(max_tokens=60, ignore_eos=True),
    SamplingParams(max_tokens=60, ignore_eos=True, temperature=0.8, seed=7),
    SamplingParams(max_tokens=60, ignore_eos=True, repetition_penalty=1.2),
]


@pytest.mark.parametrize("graphs", [True, False])
@pytest.mark.parametrize("kind", KINDS)
def test_drafts_change_no_token(kind: str, graphs: bool, tmp_path: Path) -> None:
    config, own = KINDS[kind]
    folder = write_model(tmp_path / kind, {**config, **LARGE})
    options = {"page_size": 16, "speculative": "ngram", "speculative_tokens": 5, **own}
    if kind == "hils":
        del options["page_size"]
    prompts = [tokens_of(n, seed=n) for n in (1, 15, 16, 90, 300, 700)]
    with LLM(
        folder,
        device="cuda",
        dtype="float32",
        kv_cache_gib=0.2,
        max_running_requests=20,
        disable_cuda_graph=not graphs,
        **options,
    ) as llm:
        speculation = llm.engine.scheduler.speculation
        assert speculation is not None
        speculation.pace = Always()
        for many in (1, 6, 18):
            asked = (prompts * 3)[:many] if many > 1 else prompts[3:4]
            for params in PARAMS:
                plain = replace(params, speculation=False)
                expected = [result.token_ids for result in llm.generate(asked, plain)]
                if not speculation.drafter.by_model:
                    truth = [(*p, *o) for p, o in zip(asked, expected, strict=True)]
                    speculation.drafter = Liar(truth, many, honest=0.9)
                results = llm.generate(asked, params)
                assert [result.token_ids for result in results] == expected
                assert sum(result.usage.accepted_tokens for result in results) > 0
        llm.engine.scheduler.check()
        if graphs:
            assert llm.engine.compilations.serving == 0


def test_pages_of_failed_drafts_are_forgotten_without_waiting_for_the_device() -> None:
    """The host forgets them while the device drafts on."""
    pool = LandmarkPool(shape(), 8, torch.device("cuda"))
    pages = np.array([1, 3])
    torch.cuda.set_sync_debug_mode("error")
    try:
        pool.seal(pages, np.array([5, 5], dtype=np.int32))
        pool.invalidate(pages[:1])
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert pool.sealed.tolist() == [-1, 0, 0, 5, 0, 0, 0, 0, 0]
