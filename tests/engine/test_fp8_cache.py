"""Keys and values of 8 bits: what a row loses, what a model loses, and who refuses them."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from cairn import LLM
from cairn.attention.backend import AttentionShape, dense_class, refusal
from cairn.attention.sgl_kernel_backend import SglKernelBackend
from cairn.attention.torch_backend import TorchBackend
from cairn.attention.triton_backend import TritonBackend
from cairn.attention.widened import overflowing_seqs, widened_bytes
from cairn.errors import ConfigError, LoadError
from cairn.kernels.fp8_rows import (
    FP8,
    hadamard,
    page_rows,
    quantize,
    rows_and_scales,
    store_rows,
    widen,
)
from cairn.memory.groups import group_layers
from cairn.memory.kv_pool import KVPool
from cairn.memory.layout import KV, CacheLayout
from tests.helpers import (
    GOLDENS,
    TINY_LLAMA,
    poison_free_memory,
    tokens_of,
    write_model,
)


def rounded(rows: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    """What float64 rows are widened to with a scale: e4m3 has 3 bits after the leading one."""
    scaled = rows / scale
    step = torch.exp2((scaled.abs().log2().floor() - 3).clamp(min=-9))
    return (scaled / step).round() * step * scale


def exact(rows: torch.Tensor) -> torch.Tensor:
    """What rows without a query should be widened to, number by number: with the best of eight
    scales."""
    wide = rows.double()
    least = (rows.float().abs().amax(-1, keepdim=True) / 448).clamp(min=2.0**-40).double()
    tried = torch.stack([rounded(wide, least * factor) for factor in torch.arange(8, 16) / 8])
    best = (tried - wide).square().sum(-1, keepdim=True).argmin(0, keepdim=True)
    return tried.take_along_dim(best, 0)[0]


def widened_rows(rows: torch.Tensor, query: torch.Tensor | None = None) -> torch.Tensor:
    """What rows are widened to, in float64."""
    stored, scales = quantize(rows, query=query)
    return stored.double() * scales[..., None].double()


def exact_latents(rows: torch.Tensor) -> torch.Tensor:
    """What latent rows and index keys should be widened to: each span of 128 columns has the
    smallest power of two as its scale."""
    spans = [rows[..., first : first + 128].double() for first in range(0, rows.shape[-1], 128)]
    least = [(span.abs().amax(-1, keepdim=True) / 448).log2().ceil() for span in spans]
    scales = [torch.exp2(power).clamp(min=2.0**-40) for power in least]
    return torch.cat([rounded(*each) for each in zip(spans, scales, strict=True)], -1)


def test_a_row_is_rounded_to_three_bits_with_the_best_scale() -> None:
    torch.manual_seed(0)
    rows = torch.randn(200, 64) * torch.exp(4 * torch.randn(200, 1))
    rows[0], rows[1], rows[2] = 0.0, 448.0, -448.0
    rows[3] *= 1e-30  # below the smallest scale
    stored, scales = quantize(rows)
    assert stored.dtype == FP8 and torch.isfinite(stored.float()).all()
    assert scales[:3].tolist() == [2.0**-40, 1.0, 1.0]
    widened = widened_rows(rows)
    torch.testing.assert_close(widened, exact(rows), rtol=1e-6, atol=0)
    lost = (widened - rows).square().sum() / rows.square().sum()
    by_power = (exact_latents(rows) - rows).square().sum() / rows.square().sum()
    assert lost < 0.85 * by_power


def test_a_key_has_the_scale_that_suits_its_query_best() -> None:
    torch.manual_seed(0)
    rows, query = torch.randn(2, 300, 64)
    unit = (query / query.norm(dim=-1, keepdim=True)).double()

    def errors(widened: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Squared errors of the rows, and with what changes scores counted more."""
        lost = widened - rows
        squared = lost.square().sum(-1)
        return squared, squared + 32 * (lost * unit).sum(-1).square()

    (plain, plain_weighed), (own, own_weighed) = (
        errors(widened_rows(rows, given)) for given in (None, query)
    )
    least = (rows.abs().amax(-1, keepdim=True) / 448).double()
    tried = [errors(rounded(rows.double(), least * i / 8))[1] for i in range(8, 16)]
    torch.testing.assert_close(own_weighed, torch.stack(tried).amin(0), rtol=1e-4, atol=0)
    assert (own >= plain * (1 - 1e-4)).all() and (own_weighed <= plain_weighed * (1 + 1e-4)).all()
    assert own.mean() < 1.2 * plain.mean() and own_weighed.mean() < 0.85 * plain_weighed.mean()
    assert torch.equal(widened_rows(rows, 1000 * query), widened_rows(rows, query))


def test_a_key_without_a_query_has_the_scale_of_the_least_error() -> None:
    torch.manual_seed(0)
    rows = torch.randn(50, 64)
    rows[7] = 0.0
    zero = torch.zeros_like(rows)
    assert torch.equal(widened_rows(rows, zero), widened_rows(rows))
    assert not widened_rows(zero, rows).any()


def test_scores_are_the_same_with_hadamard_matrices() -> None:
    torch.manual_seed(0)
    for dim in (8, 64, 128):
        query, key = torch.randn(2, 50, 3, dim, dtype=torch.float64)
        mixed = hadamard(query), hadamard(key)
        found, expected = (torch.einsum("qhd,khd->hqk", *pair) for pair in (mixed, (query, key)))
        torch.testing.assert_close(found, expected, rtol=0, atol=1e-13)
        torch.testing.assert_close(hadamard(mixed[1]), key, rtol=0, atol=1e-13)
        one = torch.zeros(dim, dtype=torch.float64)
        one[dim - 3] = 1.0
        torch.testing.assert_close(hadamard(one).abs(), torch.full_like(one, dim**-0.5))
        for dtype in (torch.bfloat16, torch.float32):  # a row alone is as among others
            rows = key.to(dtype)
            assert torch.equal(hadamard(rows)[7, 1], hadamard(rows[7, 1]))


def test_scores_of_large_columns_lose_less_with_hadamard_matrices() -> None:
    torch.manual_seed(0)
    query, key = torch.randn(2, 200, 64)
    for rows in (query, key):
        rows[:, [5, 6, 40]] *= 10
    lost = []
    for own, rows in ((query, key), (hadamard(query), hadamard(key))):
        lost.append((own @ (widened_rows(rows).float() - rows).t()).square().mean().sqrt())
    assert lost[1] < 0.8 * lost[0], lost


def test_a_row_is_rounded_to_int8() -> None:
    torch.manual_seed(0)
    rows = torch.randn(200, 64) * torch.exp(4 * torch.randn(200, 1))
    rows[0], rows[1], rows[2] = 0.0, 127.0, 2.5
    stored, scales = quantize(rows, dtype=torch.int8)
    assert stored.dtype == torch.int8 and scales[:2].tolist() == [2.0**-40, 1.0]
    assert (stored[1:3] == 127).all() and torch.equal(scales[3:], rows[3:].abs().amax(-1) / 127)
    widened = stored.double() * scales[:, None].double()
    assert ((widened - rows).abs() <= (0.5 + 1e-5) * scales[:, None]).all()


def test_a_row_depends_on_its_own_token_and_head_alone() -> None:
    torch.manual_seed(0)
    rows, query = torch.randn(5, 4, 16), torch.randn(5, 6, 16)  # 2 kv heads, each with 3 queries
    pages = torch.zeros(2, 4, 7 + 2, 16).to(FP8)  # of 7 rows, and their scales
    store_rows(pages, torch.ones(5).long(), torch.arange(5), rows, None, query)
    kept = widen(pages, torch.float64)[1]
    for row in range(5):
        for head in range(4):
            own = query[row, 3 * head : 3 * head + 3].sum(0) if head < 2 else None
            assert torch.equal(kept[head, row], widened_rows(rows[row, head], own))


@pytest.mark.parametrize(("page_size", "dim"), [(16, 8), (16, 128), (64, 128), (64, 64), (3, 24)])
def test_pages_hold_rows_and_their_scales(page_size: int, dim: int) -> None:
    layout = CacheLayout.of_heads(2, dim).of_type(FP8)
    scales = -(-4 * page_size // dim) * dim
    assert layout.page_bytes(page_size) == 4 * (page_size * dim + scales)
    pool = KVPool(group_layers([None], [layout]), [5], page_size, torch.device("cpu"))
    assert page_rows(pool.part(0)) == page_size
    pool.part(0).fill_(float("nan"))
    rows = torch.randn(2 * page_size, 4, dim)
    places = torch.tensor([4, 2]).repeat_interleave(page_size)
    order = torch.randperm(2 * page_size)
    offsets = torch.arange(page_size).repeat(2)
    pool.write(0, places[order], offsets[order], rows[order])
    kept = widen(pool.part(0)[[4, 2]], torch.float64)  # [2, heads, page_size, dim]
    expected = exact(rows).view(2, page_size, 4, dim)
    torch.testing.assert_close(kept, expected.transpose(1, 2), rtol=1e-6, atol=0)
    keys = pool.read_keys(0, torch.tensor([2]), torch.float64)
    assert torch.equal(keys[0], kept[1, :2].transpose(0, 1))
    assert rows_and_scales(pool.part(0))[1].shape == (6, 4, page_size)
    pool.clear(0, torch.tensor([4]))
    assert not widen(pool.part(0)[4], torch.float32).any()
    assert torch.equal(pool.read_keys(0, torch.tensor([2]), torch.float64), keys)


HF = sorted(p.name for p in GOLDENS.glob("hf_[!dg]*"))
HILS = sorted(p.parent.name for p in GOLDENS.glob("[!h]*/layer_intermediates.safetensors"))
ERROR = 0.16
"""Root mean square error of log-probabilities, relative to their standard deviation. The models are
random and tiny, so they are much more sensitive than trained ones."""


@pytest.mark.parametrize("case", HF)
def test_goldens_with_an_int8_cache(case: str) -> None:
    golden = load_file(GOLDENS / case / "golden.safetensors")
    options: dict[str, Any] = {"dtype": "float32", "device": "cpu", "kv_cache_gib": 0.05}
    with LLM(GOLDENS / case, kv_cache_dtype="int8", page_size=16, **options) as llm:
        poison_free_memory(llm.engine)
        found = llm.logprobs(golden["input_ids_a"].tolist())
    expected = golden["logits_a"][:, : found.shape[1]].log_softmax(-1)
    error = (found - expected).square().mean().sqrt() / expected.std(-1).mean()
    assert 0 < error < 0.1


@pytest.mark.parametrize("case", [*HF, *HILS])
def test_goldens_with_an_fp8_cache(case: str, monkeypatch: pytest.MonkeyPatch) -> None:
    golden = load_file(GOLDENS / case / "golden.safetensors")
    config = json.loads((GOLDENS / case / "config.json").read_text())
    ids = golden["input_ids_a"].tolist()
    options: dict[str, Any] = {"dtype": "float32", "device": "cpu", "kv_cache_gib": 0.05}
    options["page_size"] = config.get("chunk_size", 16)

    mixed: list[frozenset[int]] = []
    dense: list[set[int]] = []

    def logprobs(**more: str) -> torch.Tensor:
        with LLM(GOLDENS / case, **{**options, **more}) as llm:
            poison_free_memory(llm.engine)
            mixed.append(llm.engine.runner.stepper.pool.hadamard)
            sparse = llm.engine.sparse
            layers = set(range(len(llm.engine.spec.layers)))
            dense.append(layers - set(sparse.layers if sparse else ()))
            return llm.logprobs(ids)

    found = logprobs(kv_cache_dtype="fp8")
    expected = golden["logits_a"][:, : found.shape[1]].log_softmax(-1)
    error = (found - expected).square().mean().sqrt() / expected.std(-1).mean()
    assert 0 < error < ERROR
    assert mixed[0] == dense[0]
    # The same as a cache of float64 that holds rounded rows.
    found = logprobs(kv_cache_dtype="fp8", dtype="float64")
    write = KVPool.write

    def write_rounded(
        pool: KVPool,
        layer: int,
        pages: torch.Tensor,
        offsets: torch.Tensor,
        rows: torch.Tensor,
        query: torch.Tensor,
    ) -> None:
        key, value = rows.chunk(2, 1)
        mix = hadamard if layer in mixed[0] else torch.clone  # its own inverse
        query = query.view(len(key), key.shape[1], -1, key.shape[2]).sum(2)
        key = mix(widened_rows(mix(key), mix(query)))
        write(pool, layer, pages, offsets, torch.cat((key, widened_rows(value)), 1))

    monkeypatch.setattr(KVPool, "write", write_rounded)
    torch.testing.assert_close(found, logprobs(dtype="float64"), rtol=0, atol=2e-4)


def test_scales_of_the_checkpoint_are_used(tmp_path: Path) -> None:
    folder = write_model(tmp_path / "model", TINY_LLAMA)
    tensors = load_file(folder / "model.safetensors")
    tensors["model.layers.0.self_attn.k_scale"] = torch.tensor(0.011)
    tensors["model.layers.0.self_attn.v_scale"] = torch.tensor([0.25])
    tensors["model.layers.1.self_attn.k_proj.k_scale"] = torch.tensor(2.0**-12)  # cuts numbers off
    save_file(tensors, folder / "model.safetensors")
    options: dict[str, Any] = {"dtype": "float64", "device": "cpu", "page_size": 16}
    ids = tokens_of(40)
    with LLM(folder, **options) as llm:  # the type of the weights needs no scales
        exactly = llm.logprobs(ids)
    with LLM(folder, kv_cache_dtype="fp8", **options) as llm:
        pool = llm.engine.runner.stepper.pool
        given = float(torch.tensor(0.011))
        assert pool.scales == {0: (given, 0.25), 1: (2.0**-12, 0.0)} and not pool.hadamard
        assert any("the checkpoint has scales of their keys" in note for note in llm.engine.notes)
        found = llm.logprobs(ids)
        assert torch.equal(found, llm.logprobs(ids))
        for layer, (key, value) in pool.scales.items():
            rows, scales = rows_and_scales(pool.part(layer))
            written = scales[:, 0] == key  # [pages, page_size]
            assert written.sum() >= len(ids)
            of_values = scales[:, 2:].transpose(1, 2)[written]
            assert (of_values == value).all() or not value
            most = rows[:, 0][written].float().abs().amax()
            assert most == 448 if layer == 1 else most < 448
    assert 1e-4 < (found - exactly).abs().mean() < 0.5
    tensors["model.layers.0.self_attn.v_scale"] = torch.tensor(-1.0)
    save_file(tensors, folder / "model.safetensors")
    with pytest.raises(LoadError, match=r"v_scale of layer 0 is -1.0"):
        LLM(folder, **options)


SPARSE = {"attention_backend": "hsa", "hsa_policy": "quest", "hsa_window": 16, "hsa_topk": 2}


@pytest.mark.parametrize(
    ("config", "options", "expected", "why"),
    [
        ({}, {}, {0, 1}, None),
        ({}, {"dtype": "float32"}, {0, 1}, None),
        ({"model_type": "llama"}, {"model_impl": "transformers"}, {0, 1}, None),
        ({}, {"kv_cache_dtype": "int8"}, set(), None),
        ({"head_dim": 24}, {}, set(), "keys of 2 layers .* heads have 24 columns"),
        ({}, SPARSE, set(), "keys of 2 layers .* they are sparse"),
        ({}, {**SPARSE, "hsa_layers": "1"}, {0}, "keys of 1 layers .* they are sparse"),
        ({}, {"speculative": "sparse"}, set(), "keys of 2 layers .* they are sparse"),
    ],
)
def test_keys_of_dense_layers_are_mixed(
    config: dict[str, Any],
    options: dict[str, Any],
    expected: set[int],
    why: str | None,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Whoever computes the layer, and whatever the cache, scores are close to those of a wide one,
    and queries come with the keys."""
    folder = write_model(tmp_path / "model", {**TINY_LLAMA, **config})
    options = {"kv_cache_dtype": "fp8", "dtype": "float64", "device": "cpu", **options}
    ids = tokens_of(40)
    quantized: list[torch.Tensor | None] = []

    def quantize_and_note(*given: Any) -> tuple[torch.Tensor, torch.Tensor]:
        quantized.append(given[3])
        return quantize(*given)

    monkeypatch.setattr("cairn.kernels.fp8_rows.quantize", quantize_and_note)
    with LLM(folder, **options) as llm:
        assert llm.engine.runner.stepper.pool.hadamard == expected
        notes = [note for note in llm.engine.notes if "Hadamard" in note]
        found = llm.logprobs(ids)
    assert quantized and None not in quantized
    assert len(notes) == (why is not None) and all(re.search(str(why), note) for note in notes)
    with LLM(folder, **{**options, "kv_cache_dtype": "auto"}) as llm:
        exactly = llm.logprobs(ids)
    assert 0 < (found - exactly).square().mean().sqrt() < 0.05 * exactly.std()


@pytest.mark.parametrize("backend", ["auto", "hsa"])
def test_a_token_does_not_depend_on_how_its_prompt_is_cut(backend: str, tmp_path: Path) -> None:
    """Rows of the same chunk are read as they are stored, rounded, like all others."""
    folder = write_model(tmp_path / "model", TINY_LLAMA)
    options: dict[str, Any] = {"dtype": "float64", "device": "cpu", "page_size": 16}
    options |= {"attention_backend": backend, "kv_cache_dtype": "fp8", "disable_radix_cache": True}
    if backend == "hsa":
        options |= {"hsa_window": 16, "hsa_topk": 2, "hsa_policy": "mean", "hsa_dense_below": 0}
    found = []
    for chunk in (100, 33, 7):
        with LLM(folder, chunked_prefill_size=chunk, **options) as llm:
            found.append(llm.logprobs(tokens_of(100)))
    for other in found[1:]:
        torch.testing.assert_close(other, found[0], rtol=0, atol=1e-9)


def test_memory_has_room_for_widened_pages() -> None:
    groups = group_layers([None], [CacheLayout.of_heads(8, 128).of_type(FP8)])
    size = 16, 8, 128, 0.1, 64, torch.bfloat16, torch.device("cpu"), groups
    row, kinds = 2 * 8 * 128 * 2, [SglKernelBackend, TritonBackend]
    for longest, rows, overflowing in (
        (4096, 512 * 128, 17),
        (100_000, 2 * 782 * 128, 3),
        (2**20, 2**19 - 128, 1),
    ):
        shape = AttentionShape(*size, longest=longest)
        assert widened_bytes(kinds, shape) == (rows + 128) * row
        assert widened_bytes([TorchBackend], shape) == 0
        assert overflowing_seqs(kinds, shape, longest) == overflowing
        assert overflowing_seqs([TorchBackend], shape, longest) == 0
    own = group_layers([None], [CacheLayout.of_heads(8, 128).of_type(torch.bfloat16)])
    assert widened_bytes(kinds, replace(shape, groups=own)) == 0


def test_scales_are_sent_to_the_device_once(monkeypatch: pytest.MonkeyPatch) -> None:
    groups = group_layers([None], [CacheLayout.of_heads(2, 64).of_type(FP8)])
    pool = KVPool(groups, [2], 16, torch.device("cpu"))
    pool.use_scales({0: (0.5, 0.25)})
    place, rows = torch.tensor([1]), torch.ones(1, 4, 64)
    with monkeypatch.context() as patch:
        patch.setattr(torch, "tensor", None)
        for offset in torch.arange(3):
            pool.write(0, place, offset[None], rows)
    _, scales = rows_and_scales(pool.part(0))
    assert scales[1, :, :3].tolist() == [[0.5] * 3] * 2 + [[0.25] * 3] * 2


def test_odd_heads_are_refused(tmp_path: Path) -> None:
    odd = write_model(tmp_path / "odd", {**TINY_LLAMA, "head_dim": 12})
    with pytest.raises(ConfigError, match=r"keep kv of 12 columns; .* multiple of 8"):
        LLM(odd, kv_cache_dtype="fp8", device="cpu")


def test_backends_that_do_not_read_fp8_are_refused(tmp_path: Path) -> None:
    groups = group_layers([None], [CacheLayout.of_heads(2, 64).of_type(FP8)])
    shape = AttentionShape(4, 2, 64, 0.1, 64, torch.bfloat16, torch.device("cpu"), groups)
    assert groups[0].layout.part(KV).dtype == FP8 and refusal("torch", shape) is None
    why = dense_class("flashinfer").unsupported_reason(shape)
    assert why is not None and "8 bits" in why and "reads_8_bits" in why
    assert dense_class("sgl_kernel").unsupported_reason(shape) is None
    folder = write_model(tmp_path / "model", TINY_LLAMA)
    with pytest.raises(ConfigError, match=r"'toy', which does not .* reads_8_bits"):
        LLM(
            folder,
            kv_cache_dtype="fp8",
            device="cpu",
            attention_backend="tests.attention.toy_sparse:ToySparse",
        )
