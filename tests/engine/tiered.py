"""Engines with a host tier and so little on the device that pages leave it as soon as they can.

Memory nobody owns is NaN, on the device and in host memory.
"""

from __future__ import annotations

import re
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from cairn import LLM, SamplingParams
from cairn.engine.engine import Engine
from cairn.engine.resolve import EngineChoices
from cairn.engine.tier_sizes import TierSizes, size_tier, slots_per_page
from tests.engine.lanes import tier_of
from tests.helpers import (
    TINY_DSA,
    TINY_HILS,
    TINY_LLAMA,
    TINY_OLMO3,
    poison_free_memory,
    stale_slices,
)

PAGE = 16
DENSE = {"attention_backend": "hsa", "hsa_topk": 2, "hsa_window": 20, "hsa_sinks": 1}
DENSE["hsa_policy"] = "quest"  # the default with a tier, but not without one
SPARSE = {**DENSE, "hsa_prefill": "sparse"}
MODELS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "quest": (TINY_LLAMA, SPARSE),
    "mean": (TINY_LLAMA, {**SPARSE, "hsa_policy": "mean", "hsa_dense_below": 50}),
    "many": (TINY_LLAMA, {**SPARSE, "hsa_topk": 6}),  # nearly every page is read
    "spread": (TINY_LLAMA, {**SPARSE, "hsa_policy": "spread", "page_size": 8, "hsa_topk": 6}),
    "mixed": (TINY_LLAMA, {**SPARSE, "hsa_layers": "1"}),  # layer 0 is dense and stays resident
    "windows": (TINY_OLMO3, SPARSE),
    "hils": (TINY_HILS, {}),
    "fp8": (TINY_LLAMA, {**SPARSE, "kv_cache_dtype": "fp8"}),
    "dense": (TINY_LLAMA, DENSE),  # prompts are read densely
    "rows": (TINY_DSA, {}),  # single rows are read, by an index
    "pair": (TINY_OLMO3, {**DENSE, "attention_backend": "torch,hsa", "hsa_dense_below": 50}),
}


def options_of(folder: Path) -> dict[str, Any]:
    """Those of a model in MODELS if the folder has its name, with a number or `-variant`."""
    form = r"(\d*|-.*)"
    named = (own for name, (_, own) in MODELS.items() if re.fullmatch(name + form, folder.name))
    own = next(named, {})
    return {"page_size": PAGE, "dtype": "float64", "device": "cpu", **own}


def load(folder: Path, **options: Any) -> LLM:
    llm = LLM(folder, **{**options_of(folder), **options})
    poison_free_memory(llm.engine)
    return llm


def tiered(
    folder: Path,
    *,
    frames: int,
    pages: int = 200,
    hot: int = 8,
    overlap: bool = False,
    **options: Any,
) -> LLM:
    """An engine with so many frames, pages in host memory and hot pages, whatever they cost."""

    def sized(choices: EngineChoices) -> TierSizes:
        sizes, ids = size_tier(choices), choices.groups[-1].copy_of
        assert ids is not None
        num_pages = [*sizes.num_pages[:-1], frames]
        num_pages[ids] = pages
        running = options.get("max_running_requests", 4)
        slots = hot * slots_per_page(choices)
        return sizes._replace(num_pages=num_pages, hot_slots=slots, max_running_requests=running)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("cairn.engine.memory_plan.size_tier", sized)
        tier = {
            "enable_hisparse": True,
            "kv_cache_gib": 1.0,
            "hisparse_config": '{"host_gib": 0.1}',
        }
        llm = load(folder, **{**tier, **options})
    llm.engine.overlap = overlap
    return llm


def check(engine: Engine) -> None:
    """All invariants, and every tag against the bytes of the page it names, where the device has
    caught up with the host."""
    engine.scheduler.check()
    lane = getattr(engine.runner, "lane", None)
    if lane is not None and lane.ran < lane.end:
        return
    memory = engine.scheduler.cache
    (ids,) = (allocator for g, allocator in enumerate(memory.allocators) if g == memory._page_group)
    lives = [
        ids.generation(page) if ids.refcounts[page] else -1 for page in range(ids.num_pages + 1)
    ]
    assert stale_slices(tier_of(engine), lives) == []


def check_clean(engine: Engine) -> None:
    """Nobody runs: nothing is owned, every page is free or cached, and all can be given up."""
    while engine.scheduler.cache.reclaim():
        pass
    check(engine)
    assert all(usage.owned == 0 for usage in engine.usage())
    engine.scheduler.cache.clear()
    check(engine)
    assert all(usage.free == usage.total for usage in engine.usage())


@cache
def expected(folder: Path, prompt: tuple[int, ...], params: SamplingParams) -> list[int]:
    with load(folder, disable_radix_cache=True, chunked_prefill_size=4096) as llm:
        return llm.generate(list(prompt), params).token_ids
