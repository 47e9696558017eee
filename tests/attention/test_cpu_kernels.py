"""Kernels for a CPU between products: rotation and storing of rows, attention over pages."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import torch.nn.functional as F

from cairn import LLM
from cairn.kernels.cpu import HEAD_DIMS, CpuKernels, CpuKernelsUnavailableError
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
