"""The host tier at row granularity on a CUDA device: rows in pinned memory, plans and copies by
kernels, recorded steps; same tokens and same selections with the tier and without."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from cairn import LLM, SamplingParams
from cairn.attention.backend import Graph
from cairn.memory.prompt_stage import PromptStage
from tests.engine.lanes import tier_of
from tests.engine.test_hisparse_rows import golden_tier, leave_the_device
from tests.engine.tiered import check_clean, load, tiered
from tests.gpu.test_tier import SLEEP, delay
from tests.helpers import GOLDENS, TINY_DSA, tokens_of, write_model
from tests.kernels import swap_rows_case
from tests.models.test_dsa import CASES, read_by
from tests.models.test_dsa import load as load_recording

pytestmark = pytest.mark.gpu

CUDA = torch.device("cuda")
NAMES = ("a", "short", "b")  # b begins as a does; they part inside a page
OPTIONS: dict[str, Any] = {"device": "cuda", "dtype": "float32", "chunked_prefill_size": 100}
PROMPTS = [tokens_of(60) + tokens_of(n, seed=n) for n in (20, 250, 90, 160)]
DRAWN = SamplingParams(max_tokens=40, temperature=0.8, seed=5, ignore_eos=True)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("rows"), {**TINY_DSA, "index_head_dim": 32})


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("shape", [*swap_rows_case.SHAPES, (16, 512, 16384, 64)])
def test_swap_in_of_rows(shape: tuple[int, int, int, int], dtype: torch.dtype) -> None:
    swap_rows_case.check(*shape, CUDA, dtype, steps=12, width=7 if shape[0] == 1 else 24)


def test_null_rows() -> None:
    swap_rows_case.check_null_rows(CUDA)


def check_same_selections(on: LLM, off: LLM, topk: int) -> None:
    """Rows that see more than `topk` rows selected the same ones, in every layer. With a tier,
    fewer rows may have been found cached."""
    with_tier, without = (
        {place: rows for place, rows in read_by(llm).items() if place[1] >= topk}
        for llm in (on, off)
    )
    assert with_tier.keys() >= without.keys() and without
    assert {place: with_tier[place] for place in without} == without


@pytest.mark.parametrize("page_size", [16, 64, 128])
@pytest.mark.parametrize("case", CASES)
def test_goldens_select_the_same_rows(case: str, page_size: int) -> None:
    """As few frames and hot rows as one request needs, and whatever can leave the device does."""
    golden = load_file(GOLDENS / case / "golden.safetensors")
    options = {**OPTIONS, "disable_cuda_graph": True, "page_size": page_size}
    off = load_recording(GOLDENS / case, kv_cache_gib=0.1, **options)
    with golden_tier(case, **options) as on, off:
        backend: Any = on.engine.runner.stepper.backend
        backend.ready = True
        topk = backend._parts.config.topk
        assert tier_of(on.engine).row_swap is not None
        for name in NAMES:
            ids = golden[f"input_ids_{name}"].tolist()
            for llm in (on, off):
                read_by(llm).clear()
                for _ in range(2):  # the recorder compares what is computed twice
                    result = llm.generate(ids, max_tokens=32, ignore_eos=True)
                    assert result.token_ids == golden[f"greedy_ids_{name}"].tolist()
            check_same_selections(on, off, topk)
        stats = tier_of(on.engine).stats
        assert stats.misses > 0 and stats.bytes_out > 0
        check_clean(on.engine)


@pytest.mark.parametrize("case", CASES)
def test_recorded_steps_say_what_goldens_say(case: str) -> None:
    """Several requests at once, cold and on prefixes in host memory; and a device with room for
    all of them."""
    golden = load_file(GOLDENS / case / "golden.safetensors")
    prompts = [golden[f"input_ids_{name}"].tolist() for name in NAMES]
    resident = {Graph("resident", mixed=own) for own in (False, True)}
    for frames, kinds in ((16, {Graph("sparse", mixed=False)}), (200, resident)):
        options = {**OPTIONS, "max_running_requests": 3, "overlap": True}
        with tiered(GOLDENS / case, frames=frames, hot=24, pages=200, **options) as llm:
            graphs = llm.engine.runner.stepper.graphs
            assert graphs is not None
            recorded = {own for own, _ in graphs._graphs}
            assert recorded == resident | {Graph("sparse", mixed=False)}
            used = watch_graphs(llm)
            for _ in range(2):
                results = llm.generate(prompts, max_tokens=32, ignore_eos=True)
                for name, result in zip(NAMES, results, strict=True):
                    assert result.token_ids == golden[f"greedy_ids_{name}"].tolist()
            assert kinds <= used
            assert (tier_of(llm.engine).stats.misses > 0) or frames == 200
            check_clean(llm.engine)


def watch_graphs(llm: LLM) -> set[Graph]:
    """Kinds of graphs that are replayed from now on."""
    used, run = set[Graph](), llm.engine.runner.stepper.replay

    def noted(host: Any, form: Any, *given: Any, **options: Any) -> Any:
        used.add(form.graph)
        return run(host, form, *given, **options)

    llm.engine.runner.stepper.replay = noted  # type: ignore[method-assign]
    return used


def answers(llm: LLM) -> list[list[int]]:
    """Cold, and again on prefixes that are in host memory by then."""
    found = [result.token_ids for result in llm.generate(PROMPTS, DRAWN)]
    return found + [result.token_ids for result in llm.generate(PROMPTS[1:3], DRAWN)]


@pytest.fixture(scope="module")
def expected(folder: Path) -> Iterator[list[list[int]]]:
    with load(folder, kv_cache_gib=0.1, max_running_requests=4, **OPTIONS) as llm:
        yield answers(llm)


@pytest.mark.parametrize("graph", [True, False], ids=["graph", "eager"])
def test_prompts_behind_a_prefix(graph: bool, folder: Path) -> None:
    """On the device, in host memory, and on the device again; alone and beside decoding requests.
    Answers are those without a tier."""
    options = {**OPTIONS, "max_running_requests": 4, "disable_cuda_graph": not graph}
    prefix = tokens_of(300)
    alone, *together = [prefix + tokens_of(n, seed=n) for n in (50, 3, 40, 90)]

    def say(llm: LLM, *, away: bool = False) -> list[list[int]]:
        found = []
        for prompts in ([alone], together):
            if away:
                leave_the_device(llm.engine)
            found += [own.token_ids for own in llm.generate(prompts, DRAWN)]
        return found

    with load(folder, kv_cache_gib=0.1, **options) as llm:
        llm.generate(prefix, DRAWN)
        wanted = say(llm)
    with tiered(folder, frames=200, hot=12, pages=200, overlap=True, **options) as llm:
        used = watch_graphs(llm)
        llm.generate(prefix, DRAWN)
        assert say(llm) == wanted
        assert (Graph("resident", mixed=True) in used) == graph
        assert say(llm, away=True) == wanted
        assert say(llm) == wanted
        check_clean(llm.engine)


@pytest.mark.parametrize("late", ["nothing", "before", "after", "steps", "stage"])
@pytest.mark.parametrize("graph", [True, False], ids=["graph", "eager"])
def test_copies_and_steps_that_are_late_change_nothing(
    late: str, graph: bool, folder: Path, expected: list[list[int]]
) -> None:
    options = {**OPTIONS, "max_running_requests": 4, "disable_cuda_graph": not graph}
    with tiered(folder, frames=20, hot=12, overlap=True, **options) as llm:
        stage = tier_of(llm.engine).stage
        assert isinstance(stage, PromptStage)
        if late in ("before", "after", "steps"):
            delay(llm, late)
        elif late == "stage":
            real = stage._copy_in

            def slowly(*given: Any) -> None:
                torch.cuda._sleep(SLEEP)  # type: ignore[no-untyped-call]
                real(*given)

            stage._copy_in = slowly  # type: ignore[assignment, method-assign]
        assert answers(llm) == expected
        stats = tier_of(llm.engine).stats
        assert stats.misses > 0 and stats.hits > 0 and stage.bytes_in > 0
        check_clean(llm.engine)


def test_a_prompt_longer_than_the_device(folder: Path) -> None:
    options = {**OPTIONS, "chunked_prefill_size": 48, "max_running_requests": 1}
    prompt = tokens_of(440)
    with load(folder, kv_cache_gib=0.1, **options) as llm:
        wanted = llm.generate(prompt, DRAWN).token_ids
    with tiered(folder, frames=6, hot=2, **options) as llm:
        for _ in range(2):
            assert llm.generate(prompt, DRAWN).token_ids == wanted
            leave_the_device(llm.engine)
        check_clean(llm.engine)


def test_a_step_that_fails_between_layers_of_one_plan(folder: Path) -> None:
    """The plan says that both layers have the rows, and only the first has copied them."""
    options = {**OPTIONS, "disable_cuda_graph": True, "max_running_requests": 1}
    with load(folder, kv_cache_gib=0.1, **options) as llm:
        wanted = llm.generate(tokens_of(200), DRAWN).token_ids
    with tiered(folder, frames=8, hot=4, **options) as llm:
        engine, swap = llm.engine, tier_of(llm.engine).row_swap
        assert swap is not None
        (request,) = engine.make_requests(tokens_of(200), DRAWN)
        engine.submit(request)
        while request.num_output < 2:
            engine.step()
        leave_the_device(engine)
        again = swap.locate_again

        def fail(layer: int) -> None:
            raise KeyboardInterrupt

        swap.locate_again = fail  # type: ignore[method-assign]
        with pytest.raises(KeyboardInterrupt):
            engine.step()
        swap.locate_again = again  # type: ignore[method-assign]
        while engine.has_work:
            engine.step()
        assert request.output_ids == wanted
        check_clean(engine)
