"""Kernels for a CPU between products: rotation and storing of rows, attention over pages."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from cairn import LLM
from cairn.kernels.cpu import HEAD_DIMS, CpuKernels, CpuKernelsUnavailableError, Replays
from cairn.models.rope import rotate
from tests.helpers import TINY, TINY_EXPERTS, TINY_OLMO3, tokens_of, write_model

HEADS, KV_HEADS, SIZE = 6, 2, 16


@pytest.fixture(
    scope="module",
    params=["native", *(pytest.param(f"x86-64{v}", marks=pytest.mark.slow) for v in ("-v3", ""))],
)
def kernels(request: pytest.FixtureRequest) -> CpuKernels:
    try:
        return CpuKernels.load(request.param)
    except CpuKernelsUnavailableError as error:
        pytest.skip(str(error))


def normed(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-6) * weight


@pytest.mark.parametrize("with_norm", [False, True])
@pytest.mark.parametrize("dim", HEAD_DIMS)
def test_rotated_rows_are_stored_where_they_belong(
    dim: int, with_norm: bool, kernels: CpuKernels
) -> None:
    draw = torch.Generator().manual_seed(dim)
    rows = 5
    width = (HEADS + 2 * KV_HEADS) * dim
    qkv = torch.randn(rows, width + 7, generator=draw)[:, :width]  # of a wider product
    cos, sin = (torch.randn(rows, 1, dim, generator=draw) for _ in range(2))
    weights = torch.rand(2, dim, generator=draw)
    pages = torch.tensor([3, 3, 1, 2, 1], dtype=torch.int32)
    offsets = torch.tensor([0, 15, 4, 7, 5], dtype=torch.int32)
    cache = torch.full((4, 2 * KV_HEADS, SIZE, dim), 9.0)
    norm = (*weights, 1e-6) if with_norm else None
    query = kernels.rotate_and_store(qkv, HEADS, (cos, sin), norm, cache, pages, offsets)

    heads = qkv.reshape(rows, -1, dim)
    q, k, v = torch.split(heads, [HEADS, KV_HEADS, KV_HEADS], 1)
    if with_norm:
        q, k = normed(q, weights[0]), normed(k, weights[1])
    torch.testing.assert_close(query, rotate(q, cos, sin))
    expected = torch.full_like(cache, 9.0)
    expected.movedim(2, 1)[pages, offsets] = torch.cat((rotate(k, cos, sin), v), 1)
    torch.testing.assert_close(cache, expected)


@pytest.mark.parametrize("dim", HEAD_DIMS)
def test_attention_reads_the_rows_of_each_sequence_and_no_others(
    dim: int, kernels: CpuKernels
) -> None:
    draw = torch.Generator().manual_seed(dim)
    cache = torch.randn(12, 2 * KV_HEADS, SIZE, dim, generator=draw)
    table = torch.tensor([[5, 3, 0], [7, 9, 11], [1, 0, 0]], dtype=torch.int32)
    first, last = torch.tensor([0, 19, 0]), torch.tensor([23, 48, 1])
    query = 3 * torch.randn(3, HEADS, dim, generator=draw)
    cache[0] = cache[3, :, 23 % SIZE :] = cache[9, :, : 19 % SIZE] = float("nan")
    out = kernels.attend(query, cache, table, first, last, 0.3)
    for s in range(3):
        rows = cache[table[s].long()].movedim(1, 2).flatten(0, 1)[first[s] : last[s]]
        key, value = (x.repeat_interleave(HEADS // KV_HEADS, 1) for x in rows.chunk(2, 1))
        expected = F.scaled_dot_product_attention(
            query[s, :, None], key.transpose(0, 1), value.transpose(0, 1), scale=0.3
        )
        torch.testing.assert_close(out[s], expected[:, 0], rtol=1e-4, atol=1e-5)
        alone = slice(s, s + 1)
        single = kernels.attend(query[alone], cache, table[alone], first[alone], last[alone], 0.3)
        assert torch.equal(single, out[alone])


SIZES = {"hidden_size": 128, "intermediate_size": 64}
MODELS = {
    "llama": {**TINY, **SIZES, "architectures": ["LlamaForCausalLM"]},
    "norm of heads": {**TINY, **SIZES, "architectures": ["Qwen3ForCausalLM"], "head_dim": 32},
    "windows, norm of layers": {**TINY_OLMO3, **SIZES},
    "experts": {**TINY_EXPERTS, **SIZES, "head_dim": 32},
    "heads of another size": {**TINY, **SIZES, "architectures": ["LlamaForCausalLM"],
                              "num_attention_heads": 8},
}  # fmt: skip


@pytest.mark.parametrize("name", MODELS)
def test_models_say_the_same_with_kernels_and_without(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = write_model(tmp_path, MODELS[name])
    prompts = [tokens_of(n) for n in (3, 40, 17, 1)]
    options = {"device": "cpu", "quantization": "int8", "page_size": 16, "kv_cache_gib": 0.01}
    with LLM(folder, **options) as llm:
        if any("slowly" in note for note in llm.engine.notes):
            pytest.skip("there is no C++ compiler")
        scores = llm.logprobs(prompts[1])
        answers = [result.token_ids for result in llm.generate(prompts, max_tokens=20)]
        alone = [llm.generate(prompt, max_tokens=20).token_ids for prompt in prompts]
    assert answers == alone
    monkeypatch.setenv("CXX", "no-such-compiler")
    with LLM(folder, **options) as llm:
        torch.testing.assert_close(llm.logprobs(prompts[1]), scores, rtol=0, atol=2e-3)
        assert [r.token_ids for r in llm.generate(prompts, max_tokens=20)] == answers


HOST = '{"host_gib": 0.05}'
SPARSE = {"attention_backend": "hsa", "page_size": 8, "hsa_window": 16, "hsa_topk": 3}


@pytest.mark.parametrize("options", [{}, {**SPARSE, "hsa_policy": "spread"}])
@pytest.mark.parametrize("name", ["llama", "norm of heads"])
def test_steps_that_are_repeated_from_a_tape_say_the_same(
    name: str, options: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Alone and together, across pages, beyond the rows that sparse attention reads densely."""
    folder = write_model(tmp_path, MODELS[name])
    prompts = [tokens_of(n, seed=n) for n in (3, 30, 17, 1)]
    every = {"device": "cpu", "quantization": "int8", "kv_cache_gib": 0.01, **options}
    counts = {"record": 0, "replay": 0}

    def counting(name: str) -> None:
        function = getattr(CpuKernels, name)

        def counted(*args: Any) -> Any:
            counts[name] += 1
            return function(*args)

        monkeypatch.setattr(CpuKernels, name, counted)

    for each in counts:
        counting(each)
    found = []
    for most in (8, 0):
        monkeypatch.setattr("cairn.models.decoder._REPLAYED_ROWS", most)
        with LLM(folder, **every) as llm:
            if any("slowly" in note for note in llm.engine.notes):
                pytest.skip("there is no C++ compiler")
            together = [one.token_ids for one in llm.generate(prompts, max_tokens=40)]
            alone = [llm.generate(prompt, max_tokens=40).token_ids for prompt in prompts]
            found.append((together, alone, llm.logprobs(alone[1]).tolist()))
        if most:
            assert 1 <= counts["record"] <= 8 and counts["replay"] > 10 * counts["record"]
            counts.update(record=0, replay=0)
    assert found[0] == found[1]
    assert counts == {"record": 0, "replay": 0}


def test_a_run_is_repeated_with_other_inputs(kernels: CpuKernels) -> None:
    replays = Replays(kernels)
    cache = torch.zeros(4, 2 * KV_HEADS, SIZE, 32)
    width = (HEADS + 2 * KV_HEADS) * 32
    draw = torch.Generator().manual_seed(0)
    runs = []

    def run(qkv: torch.Tensor, *rest: torch.Tensor) -> torch.Tensor:
        cos, sin, pages, offsets, table, first, last = rest
        runs.append(0)
        query = kernels.rotate_and_store(qkv, HEADS, (cos, sin), None, cache, pages, offsets)
        return kernels.attend(query, cache, table, first, last, 0.3)

    for step in range(4):
        qkv = torch.randn(2, width, generator=draw)
        cos, sin = (torch.randn(2, 1, 32, generator=draw) for _ in range(2))
        offsets = torch.tensor([step, step], dtype=torch.int32)
        table = torch.zeros(2, 3 + step, dtype=torch.int32)  # its rows grow
        table[:, 0] = torch.tensor([1, 2])
        inputs = (qkv, cos, sin, table[:, 0].clone(), offsets, table, torch.zeros(2).long(),
                  torch.full((2,), step + 1))  # fmt: skip
        out = replays(partial(run, *inputs), inputs).clone()
        before = cache.clone()
        torch.testing.assert_close(out, run(*inputs), rtol=0, atol=0)
        assert torch.equal(before, cache)
    assert len(runs) == 5  # once for the tape, and four to compare


def test_short_prompts_run_with_a_host_tier(tmp_path: Path) -> None:
    """Their rows are few and dense, and some of their pages are in host memory."""
    folder = write_model(tmp_path, MODELS["llama"])
    every = {"device": "cpu", "quantization": "int8", **SPARSE, "hsa_dense_below": 100}
    answers = []
    for tier in ({"kv_cache_gib": 0.01}, {"enable_hisparse": True, "hisparse_config": HOST}):
        with LLM(folder, **every, **tier) as llm:
            answers.append([llm.generate(tokens_of(n), max_tokens=40).token_ids for n in (5, 30)])
    assert answers[0] == answers[1]


def _grow(x: torch.Tensor) -> torch.Tensor:
    x += 1
    return x


def _write(x: torch.Tensor) -> torch.Tensor:
    x[0] = 1
    return x


COMPUTED: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "a product": lambda x: x * 2,
    "an addition in place": lambda x: x.add_(1),
    "a copy": lambda x: x.flip(1),
    "a choice of rows": lambda x: x[torch.tensor([0])],
    "an operator in place": _grow,
    "a written row": _write,
    "a result elsewhere": lambda x: torch.neg(x, out=x),
    "a function": lambda x: F.silu(x),
}


@pytest.mark.parametrize("what", [*COMPUTED, "an input is missing", "one input twice"])
def test_what_a_tape_would_miss_is_not_recorded(what: str, kernels: CpuKernels) -> None:
    cache = torch.randn(4, 2 * KV_HEADS, SIZE, 32)
    query, table = torch.randn(1, HEADS, 32), torch.tensor([[1, 2]], dtype=torch.int32)
    first, last = torch.tensor([0]), torch.tensor([20])
    inputs = [query, table, first, last]

    def run() -> torch.Tensor:
        own = COMPUTED[what](query) if what in COMPUTED else query
        return kernels.attend(own, cache, table, first, last, 0.3).flatten(1)

    if what == "an input is missing":
        del inputs[1]
    elif what == "one input twice":
        inputs.append(last)
    assert kernels.record(run, inputs)[1] is None
    assert kernels.record(lambda: kernels.attend(query, cache, table, first, last, 0.3)[:, :2],
                          [query, table, first, last])[1] is not None  # fmt: skip


def test_recordings_keep_a_bounded_amount_of_memory(kernels: CpuKernels) -> None:
    cache, tables = torch.randn(4, 2 * KV_HEADS, SIZE, 32), torch.tensor([[1, 2]] * 3).int()
    query = torch.randn(3, HEADS, 32)
    runs = []

    def run(query: torch.Tensor, *rest: torch.Tensor) -> torch.Tensor:
        runs.append(len(query))
        table, first, last = rest
        return kernels.attend(query, cache, table, first, last, 0.3)

    replays = Replays(kernels, most_bytes=3 * 2 * query[0].nbytes)  # queries and outputs of 3 rows
    for rows in (1, 2, 3, 1, 2, 3):
        inputs = (query[:rows], tables[:rows], torch.zeros(rows).long(), torch.full((rows,), 20))
        replays(partial(run, *inputs), inputs)
    assert runs == [1, 2, 3, 3]
