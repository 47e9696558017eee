"""Everything that a request can ask for and everything that can happen to it, drawn at random.

Requests sample, score and embed; some take allowed tokens only, whose masks come late, and some are
traced. All draft, with drafts that lie. Pages are few, so that requests are retracted. Requests are
aborted, pages are evicted, launches and steps fail. Steps overlap or not. What a request gets is
what it gets alone, in float64.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch

from cairn import LLM, SamplingParams
from cairn.engine.engine import Engine
from cairn.engine.memory_plan import size_pools
from cairn.engine.plan import Allowed, PromptScores
from cairn.engine.request import Request, State
from cairn.engine.resolve import EngineChoices
from tests.engine.test_equality import PAGE, SPARSE
from tests.engine.test_speculation import Always, Liar
from tests.helpers import (
    TINY_HILS,
    TINY_LLAMA,
    TINY_OLMO3,
    poison_free_memory,
    tokens_of,
    write_model,
)

KINDS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "llama": (TINY_LLAMA, {}),
    "windows": (TINY_OLMO3, {}),
    "hils": (TINY_HILS, {}),
    "quest": (TINY_LLAMA, {**SPARSE, "hsa_policy": "quest", "hsa_prefill": "sparse"}),
    "both": (TINY_OLMO3, {**SPARSE, "hsa_policy": "mean"}),
}


class Asked(NamedTuple):
    prompt: tuple[int, ...]
    params: SamplingParams
    returns: PromptScores
    masked: bool
    traced: bool


class Masks:
    """Which tokens may follow depends on the output. Known when `arrive` was called for it."""

    def __init__(self, request: Request, vocab: int) -> None:
        self._request, self._vocab = request, vocab
        self._known: dict[int, Allowed] = {}  # by length of the output

    def __call__(self, count: int) -> Allowed | None:
        return self._known.get(count)

    def arrive(self, drafts: list[int]) -> None:
        output = self._request.output_ids
        kept: list[int] = []
        masks = [self._mask(output)]
        for draft in drafts:
            if not masks[-1][draft]:
                break
            kept.append(draft)
            masks.append(self._mask([*output, *kept]))
        packed = (np.packbits(mask, bitorder="little").tobytes() for mask in masks)
        self._known[len(output)] = Allowed(tuple(packed), tuple(kept))

    def _mask(self, output: list[int]) -> np.ndarray:
        rng = random.Random(repr(output))
        mask = np.array([rng.random() < 0.4 for _ in range(self._vocab)])
        mask[rng.randrange(self._vocab)] = True
        return mask


def draw(rng: random.Random, *, traces: bool) -> Asked:
    def some(share: float, **fields: Any) -> dict[str, Any]:
        return fields if rng.random() < share else {}

    most = rng.choice((1, 2, 5, 17, 30))
    params = SamplingParams(
        max_tokens=most,
        ignore_eos=rng.random() < 0.7,
        **some(0.5, temperature=rng.choice((0.5, 1.5)), seed=rng.randrange(4)),
        **some(0.2, top_k=rng.choice((1, 3, 20))),
        **some(0.2, top_p=0.7, min_p=0.05),
        **some(0.25, repetition_penalty=1.4, presence_penalty=0.3, frequency_penalty=0.5),
        **some(0.2, logit_bias={5: 2.0, 7: -3.0}),
        **some(0.3, stop_token_ids=(11, 12, 13, 14, 20, 21)),
        **some(0.2, min_tokens=min(most, 7)),
        **some(0.3, logprobs=rng.choice((0, 2))),
        **some(0.2, prompt_logprobs=rng.choice((0, 2))),
    )
    length = rng.choice((1, 2, 15, 16, 17, 31, 33, 47, 64, 90, 130))
    prompt = tuple(tokens_of(130, seed=rng.randrange(3))[:length])
    choices: tuple[PromptScores, ...] = ("none", "whole", "mean", "last")
    (returns,) = rng.choices(choices, (8, 1, 1, 1))
    free = returns == "none"
    return Asked(
        prompt,
        params,
        returns,
        masked=free and rng.random() < 0.25,
        traced=free and traces and rng.random() < 0.3,
    )


def submit(engine: Engine, asked: Asked) -> tuple[Request, Masks | None]:
    (request,) = engine.make_requests(
        asked.prompt, asked.params, returns=asked.returns, traced=asked.traced
    )
    masks = None
    if asked.masked:
        masks = Masks(request, engine.spec.vocab_size)
        request.allowed_tokens, request.host_tokens = masks, True
    engine.submit(request)
    return request, masks


@cache
def plain(folder: Path, kind: str) -> LLM:
    """Without drafts and prefix cache; each prompt is read at once."""
    options = {"page_size": PAGE, "chunked_prefill_size": 4096, "disable_radix_cache": True}
    return LLM(folder, dtype="float64", device="cpu", **options, **KINDS[kind][1])


@cache
def alone(folder: Path, kind: str, asked: Asked) -> Request:
    engine = plain(folder, kind).engine
    request, masks = submit(engine, asked)
    while engine.has_work:
        if masks is not None:
            masks.arrive([])
        engine.step()
    return request


def check_same(found: Request, wanted: Request) -> None:
    """An aborted request has a part of what it would have got."""
    count = found.num_output
    assert found.output_ids == wanted.output_ids[:count]
    assert [own.token_id for own in found.logprobs] == [
        own.token_id for own in wanted.logprobs[:count]
    ]
    of_tokens = [own.logprob for own in found.logprobs]
    np.testing.assert_allclose(of_tokens, [own.logprob for own in wanted.logprobs[:count]])
    for read, expected in zip(found.selections, wanted.selections, strict=False):
        assert _pages(read) == _pages(expected)
    assert len(found.selections) == (count if found.traced else 0)
    if found.finish_reason == "abort":
        return
    assert found.finish_reason == wanted.finish_reason
    of_prompt = [own.logprob for own in found.prompt_logprobs]
    np.testing.assert_allclose(of_prompt, [own.logprob for own in wanted.prompt_logprobs])
    if wanted.distributions:
        torch.testing.assert_close(torch.cat(found.distributions), torch.cat(wanted.distributions))
    if wanted.hidden_sums:
        torch.testing.assert_close(found.embedding(), wanted.embedding())


def _pages(read: dict[int, Any]) -> dict[int, list[list[int]]]:
    """The pages of each layer and head, without padding."""
    return {
        layer: [[page for page in head if page >= 0] for head in own.page_index[0].tolist()]
        for layer, own in read.items()
    }


class BrokenError(Exception):
    pass


def broken_step(engine: Engine, rng: random.Random) -> None:
    """A step whose launch fails, before or after the device has run it, or which never ends."""
    runner: Any = engine.runner
    name = rng.choice(("launch", "finish"))
    real: Callable[[Any], Any] | None = getattr(runner, name) if rng.random() < 0.5 else None

    def breaks(given: Any) -> None:
        if real is not None:
            real(given)
        raise BrokenError

    setattr(runner, name, breaks)
    try:
        engine.step()
    except BrokenError:
        pass
    finally:
        delattr(runner, name)


def run(folder: Path, kind: str, seed: int) -> None:
    rng = random.Random(seed)
    pages = rng.choice((12, 16, 40))

    def sized(choices: EngineChoices) -> list[int]:
        """The fewest pages that window layers can do with."""
        size_pools(choices)
        least = (group.peak_pages(999, 1, choices.geometry) for group in choices.groups)
        return [min(pages, own) for own in least]

    options: dict[str, Any] = {
        "page_size": PAGE,
        "chunked_prefill_size": rng.choice((1, 7, 16, 17, 40, 200)),
        "max_running_requests": rng.randint(1, 5),
        "speculative_tokens": rng.choice((1, 4, 9)),
        **rng.choice(({"disable_radix_cache": True}, {"eviction": "lru"}, {"eviction": "lfu"})),
    }
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("cairn.engine.memory_plan.size_pools", sized)
        own = {"dtype": "float64", "device": "cpu", "speculative": "ngram"}
        llm = LLM(folder, **own, **options, **KINDS[kind][1])
    with llm:
        engine, scheduler = llm.engine, llm.engine.scheduler
        poison_free_memory(engine)
        engine.overlap = rng.random() < 0.6
        drawn = (draw(rng, traces=engine.can_trace) for _ in range(8))
        asked = [
            own for own in drawn if len(own.prompt) + own.params.max_tokens < engine.max_tokens
        ]
        wanted = [alone(folder, kind, own) for own in asked]
        speculation = scheduler.speculation
        assert speculation is not None
        truth = [tuple(own.token_ids) for own in wanted]
        speculation.pace = Always()
        speculation.drafter = Liar(truth, seed, honest=rng.choice((0.0, 0.8, 1.0)))
        running: list[tuple[Request, Masks | None]] = []
        fails = rng.choice((0.0, 0.05))
        while len(running) < len(asked) or engine.has_work:
            if len(running) < len(asked) and rng.random() < 0.5:
                running.append(submit(engine, asked[len(running)]))
            for request, masks in running:
                waits = masks is not None and masks(request.num_output) is None
                if masks is not None and waits and rng.random() < 0.6:
                    masks.arrive(speculation.suggest(request))
            event = rng.random()
            alive = [own for own, _ in running if own.state is State.RUNNING]
            if alive and event < 0.03:
                scheduler._retract(rng.choice(alive))
            elif alive and event < 0.05:
                engine.abort(rng.choice(alive).id)
            elif event < 0.08 and scheduler.cache.tree.evictable_pages(0):
                scheduler.cache.tree.evict_one(0)
            if rng.random() < fails:
                broken_step(engine, rng)
            else:
                engine.step()
            scheduler.check()
        engine.step()
        for (request, _), expected in zip(running, wanted, strict=True):
            check_same(request, expected)
        scheduler.cache.clear()
        scheduler.check()
        assert all(group.free == group.total for group in engine.usage())


QUICK = ("windows", "both")
PARAMS = [pytest.param(name, marks=[pytest.mark.slow] * (name not in QUICK)) for name in KINDS]


@pytest.fixture(scope="module", params=PARAMS)
def model(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> tuple[Path, str]:
    folder = tmp_path_factory.mktemp(request.param)
    return write_model(folder, KINDS[request.param][0]), request.param


def test_a_few_requests(model: tuple[Path, str]) -> None:
    run(*model, seed=1)


@pytest.mark.slow
def test_many_requests(model: tuple[Path, str]) -> None:
    for seed in range(2, 22):
        run(*model, seed)
