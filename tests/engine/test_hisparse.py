"""The host tier in a whole engine: on or off, every token is the same."""

from __future__ import annotations

import json
import random
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)
from safetensors.torch import load_file

from cairn import LLM, SamplingParams
from cairn.engine.request import Request
from tests.engine.lanes import LaggingRunner, Lane, ScriptedMover, tier_of
from tests.engine.tiered import MODELS, PAGE, check, check_clean, expected, tiered
from tests.helpers import (
    GOLDENS,
    poison_free_memory,
    tokens_of,
    write_model,
)

CASES = sorted(p.parent.name for p in GOLDENS.glob("[!h]*/layer_intermediates.safetensors"))
MACHINE_EXAMPLES = settings().max_examples // 20  # each is a whole life of an engine


# `test_hisparse_rows` has the quick tests of single rows.
PARAMS = [
    pytest.param(name, marks=[pytest.mark.slow] * (name == "rows"))
    for name in sorted(MODELS.keys() - {"many"})
]


@pytest.fixture(scope="module", params=PARAMS)
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp(request.param), MODELS[request.param][0])


FRAMES = 12
"""Two windows of 20 to 50 rows, a few tails, and a chunk of a page or two."""


@pytest.mark.parametrize(
    ("chunk", "radix"),
    [
        *((11, True), (100, False)),
        *(pytest.param(*own, marks=pytest.mark.slow) for own in ((16, True), (100, True))),
        *(pytest.param(*own, marks=pytest.mark.slow) for own in ((11, False), (16, False))),
    ],
)
def test_tokens_are_the_same_with_the_tier_and_without(
    model: Path, chunk: int, radix: bool
) -> None:
    shared = tokens_of(130, seed=9)
    prompts = [tokens_of(200), shared, [*shared[:100], *tokens_of(30, seed=5)], tokens_of(40)]
    params = SamplingParams(max_tokens=18, ignore_eos=True)
    wanted = [expected(model, tuple(prompt), params) for prompt in prompts]
    with tiered(
        model, frames=FRAMES, chunked_prefill_size=chunk, disable_radix_cache=not radix
    ) as llm:
        for _ in range(2):  # cold, then with prefixes that are in host memory
            results = llm.generate(prompts, params)
            check(llm.engine)
            assert [result.token_ids for result in results] == wanted
        stats = tier_of(llm.engine).stats
        assert stats.misses > 0 and stats.hits > 0 and stats.bytes_out > 0
        assert (llm.engine.scheduler.cache.stats.hit_tokens > 0) == radix
        windows = radix and "rows" not in model.name  # single rows are never fetched ahead
        assert (llm.engine.scheduler.cache.copies.fetched_pages > 0) == windows  # type: ignore[union-attr]
        check_clean(llm.engine)


def test_a_prompt_longer_than_the_device_is_prefilled(model: Path) -> None:
    prompt = tokens_of(480)
    params = SamplingParams(max_tokens=20, ignore_eos=True)
    with tiered(model, frames=8, max_running_requests=1, chunked_prefill_size=4096) as llm:
        assert llm.generate(prompt, params).token_ids == expected(model, tuple(prompt), params)
        assert llm.engine.max_tokens > 480 > 8 * PAGE
        assert llm.engine.scheduler.stats.retractions == 0
        check_clean(llm.engine)


@pytest.mark.parametrize(
    "case", [pytest.param(c, marks=[pytest.mark.slow] * (i % 2)) for i, c in enumerate(CASES)]
)
def test_golden_logits(case: str) -> None:
    tensors = load_file(GOLDENS / case / "golden.safetensors")
    config = json.loads((GOLDENS / case / "config.json").read_text())
    size, vocab = config["chunk_size"], config["vocab_size"]
    window = config["sliding_window"] // size + 3
    options: dict[str, Any] = {"page_size": None, "dtype": "float32", "chunked_prefill_size": 100}
    with tiered(
        GOLDENS / case, frames=window + 100 // size, hot=config["hils_topk"], **options
    ) as llm:
        for name in ("a", "b", "short", "edge"):
            ids = tensors[f"input_ids_{name}"].tolist()
            golden = tensors[f"logits_{name}"][:, :vocab].log_softmax(-1)
            torch.testing.assert_close(llm.logprobs(ids), golden, rtol=0, atol=2e-4)
        assert tier_of(llm.engine).stats.misses > 0
        check_clean(llm.engine)


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    return {
        name: write_model(tmp_path_factory.mktemp(name), MODELS[name][0])
        for name in ("quest", "windows", "hils", "dense", "pair", "rows")
    }


class TierMachine(RuleBasedStateMachine):
    """Requests come, run, are retracted, end or are aborted; pages are given up; copies end when
    they like. All books balance after every step, and what comes out is what a request by itself,
    without the tier, would have got."""

    folders: dict[str, Path]
    llm: LLM

    @initialize(data=st.data(), seed=st.integers(0, 2**16))
    def setup(self, data: st.DataObject, seed: int) -> None:
        self.rng = random.Random(seed)
        self.folder = self.folders[data.draw(st.sampled_from(sorted(self.folders)))]
        self.llm = tiered(
            self.folder,
            frames=data.draw(st.sampled_from([8, 12, 20])),
            pages=data.draw(st.sampled_from([16, 24, 60])),
            hot=data.draw(st.sampled_from([3, 8, 30])),
            overlap=data.draw(st.booleans()),
            max_running_requests=data.draw(st.integers(1, 4)),
            chunked_prefill_size=data.draw(st.sampled_from([1, 7, 40, 200])),
            disable_radix_cache=data.draw(st.sampled_from([False, False, True])),
        )
        self.engine = self.llm.engine
        self.lane = Lane()
        if self.engine.overlap and data.draw(st.booleans()):
            LaggingRunner(self.engine, self.lane)
            poison_free_memory(self.engine, self.lane.add)
        late = data.draw(st.booleans())
        self.mover = ScriptedMover(self.engine, self.lane, late=late, rng=self.rng)
        self.requests: list[tuple[Request, tuple[int, ...]]] = []

    @rule(
        length=st.sampled_from([1, 15, 16, 17, 47, 90, 160]),
        family=st.integers(0, 1),
        most=st.integers(1, 40),
    )
    def add(self, length: int, family: int, most: int) -> None:
        prompt = tuple(tokens_of(160, seed=family)[:length])
        params = SamplingParams(max_tokens=most, ignore_eos=True)
        (request,) = self.engine.make_requests(prompt, params)
        self.engine.submit(request)
        self.requests.append((request, prompt))

    @precondition(lambda self: self.engine.has_work)
    @rule(steps=st.integers(1, 6), ending=st.integers(0, 4))
    def step(self, steps: int, ending: int) -> None:
        for _ in range(steps):
            self.engine.step()
            self.mover.finish(ending)
            check(self.engine)

    @precondition(lambda self: self.engine.has_work)
    @rule(data=st.data())
    def abort(self, data: st.DataObject) -> None:
        open_ = [request for request, _ in self.requests if request.finish_reason is None]
        self.engine.abort(data.draw(st.sampled_from(open_)).id)

    @precondition(lambda self: self.engine.scheduler.num_running)
    @rule(data=st.data())
    def retract(self, data: st.DataObject) -> None:
        running = list(self.engine.scheduler._running.values())
        self.engine.scheduler._retract(data.draw(st.sampled_from(running)))

    @rule(data=st.data(), count=st.integers(1, 5))
    def evict(self, data: st.DataObject, count: int) -> None:
        tree, groups = self.engine.scheduler.cache.tree, self.engine.scheduler.cache.groups
        group = data.draw(st.integers(0, len(groups) - 1))
        for _ in range(min(count, tree.evictable_pages(group))):
            tree.evict_one(group)

    @rule(count=st.integers(1, 20))
    def copies_end(self, count: int) -> None:
        self.mover.finish(count)

    @invariant()
    def books_balance(self) -> None:
        if hasattr(self, "engine"):
            check(self.engine)

    def teardown(self) -> None:
        if not hasattr(self, "engine"):
            return
        for _ in range(5000):
            if not self.engine.has_work:
                break
            self.engine.step()
            self.mover.finish(self.rng.randrange(3))
        assert not self.engine.has_work
        self.engine.step()
        self.lane.run(self.lane.end)
        for request, prompt in self.requests:
            if request.finish_reason == "length":
                wanted = expected(self.folder, prompt, replace(request.params, max_tokens=40))
                assert request.output_ids == wanted[: request.params.max_tokens]
        check_clean(self.engine)
        self.llm.close()


def test_any_interleaving(folders: dict[str, Path]) -> None:
    machine = type("Machine", (TierMachine,), {"folders": folders})
    run_state_machine_as_test(machine, settings=settings(max_examples=MACHINE_EXAMPLES))
