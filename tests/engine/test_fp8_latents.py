"""Latent rows and index keys of 8 bits: what a row loses, what a model loses, and the host tier."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from cairn import LLM, SamplingParams
from cairn.attention.backend import AttentionShape
from cairn.attention.dsa_backend import DSABackend
from cairn.attention.torch_backend import TorchBackend
from cairn.attention.triton_backend import TritonBackend
from cairn.errors import ConfigError
from cairn.kernels.fp8_rows import FP8, pack_rows, packed_width, unpack_rows, widen
from cairn.memory.groups import group_layers
from cairn.memory.kv_pool import KVPool
from cairn.memory.layout import INDEX, LATENT, CacheLayout
from cairn.sparsity.config import SparseConfig
from cairn.sparsity.policy import Policy
from tests.engine.lanes import tier_of
from tests.engine.test_fp8_cache import exact_latents
from tests.engine.tiered import check_clean, load, tiered
from tests.helpers import (
    GOLDENS,
    TINY_DSA,
    TINY_LATENT,
    poison_free_memory,
    tokens_of,
    write_model,
)
from tests.models.test_dsa import CASES as INDEXES
from tests.models.test_dsa import load as load_recording
from tests.models.test_dsa import read_by

INDEXED = {**TINY_DSA, "index_head_dim": 24}


def spans(rows: torch.Tensor) -> list[torch.Tensor]:
    return [rows[..., first : first + 128] for first in range(0, rows.shape[-1], 128)]


@pytest.mark.parametrize("width", [576, 512, 48, 300, 8])
def test_a_latent_row_is_widened_exactly(width: int) -> None:
    torch.manual_seed(0)
    rows = torch.randn(50, 2, width) * torch.exp(4 * torch.randn(50, 2, width))
    rows[0] = 0.0
    packed = pack_rows(rows, FP8)
    assert packed.dtype == FP8 and packed.shape == (50, 2, packed_width(width))
    for dtype in (torch.bfloat16, torch.float32, torch.float64):
        assert torch.equal(unpack_rows(packed, width, dtype).double(), exact_latents(rows))
    numbers = unpack_rows(pack_rows(rows, torch.int8), width, torch.float64)
    for own, given in zip(spans(numbers), spans(rows.double()), strict=True):
        # Scales are rounded up to 8 bits.
        scale = 1.01 * given.abs().amax(-1, keepdim=True).clamp(min=2.0**-40 * 127) / 127
        assert ((own - given).abs() <= 0.5 * scale).all()
    alone = unpack_rows(pack_rows(rows[3, 1], FP8), width, torch.float64)
    assert torch.equal(alone, exact_latents(rows)[3, 1])


def test_bytes_of_latent_rows_and_index_keys() -> None:
    """1.93 times as many rows of DeepSeek-V3.2 fit as with bfloat16."""
    assert packed_width(576) == 592
    wide, narrow = (CacheLayout.of_latents(576, 128).of_type(t) for t in (torch.bfloat16, FP8))
    assert (wide.page_bytes(64), narrow.page_bytes(64)) == (64 * 1408, 64 * (592 + 132))


@pytest.mark.parametrize("dtype", [FP8, torch.int8])
def test_pages_hold_latent_rows_and_index_keys(dtype: torch.dtype) -> None:
    layout = CacheLayout.of_latents(300, 24).of_type(dtype)
    pool = KVPool(group_layers([None], [layout]), [5], 16, torch.device("cpu"))
    for name in (LATENT, INDEX):
        pool.part(0, name).view(torch.uint8).fill_(255)
    places = torch.tensor([4, 2]).repeat_interleave(16)
    offsets, order = torch.arange(16).repeat(2), torch.randperm(32)
    rows, keys = torch.randn(32, 300), torch.randn(32, 24)
    pool.write(0, places[order], offsets[order], rows[order])
    pool.write(0, places[order], offsets[order], keys[order], INDEX)
    kept = unpack_rows(pool.part(0, LATENT)[[4, 2]], 300, torch.float64).flatten(0, 1)
    scored = widen(pool.part(0, INDEX)[[4, 2]], torch.float64).flatten(0, 1)
    if dtype == FP8:
        assert torch.equal(kept, exact_latents(rows)) and torch.equal(scored, exact_latents(keys))
    for own, given in ((kept, rows), (scored, keys)):
        assert 0 < (own - given).norm() / given.norm() < 0.03
    pool.clear(0, torch.tensor([4]))
    assert not unpack_rows(pool.part(0, LATENT)[4], 300, torch.float32).any()
    assert not widen(pool.part(0, INDEX)[4], torch.float32).any()


LATENTS = sorted(p.name for p in GOLDENS.glob("hf_deepseek_v[23]_*"))
ERRORS = {"fp8": 0.12, "int8": 0.05}
"""Root mean square error of a token's log-probabilities, relative to their standard deviation: the
median of all tokens. Models are random and tiny; where another expert is chosen, a token changes
much more."""
SHARES = {"fp8": 0.92, "int8": 0.96}
"""Part of the rows that the index of the first layer selects as with float32. Models are random, so
that their index hardly prefers any row; later layers then read other rows."""


def logprobs_of(case: str, ids: list[int], **options: str) -> torch.Tensor:
    options = {"dtype": "float32", "device": "cpu", **options}
    with LLM(GOLDENS / case, page_size=16, kv_cache_gib=0.05, **options) as llm:
        poison_free_memory(llm.engine)
        return llm.logprobs(ids)


def write_rounded(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the cache hold what rows of FP8 are widened to."""
    write = KVPool.write

    def rounded(pool: KVPool, layer: int, *given: Any, query: None = None) -> None:
        pages, offsets, rows, *part = given
        write(pool, layer, pages, offsets, exact_latents(rows).float(), *part)

    monkeypatch.setattr(KVPool, "write", rounded)


@pytest.mark.parametrize("case", LATENTS)
def test_goldens(case: str, monkeypatch: pytest.MonkeyPatch) -> None:
    golden = load_file(GOLDENS / case / "golden.safetensors")
    ids = golden["input_ids_a"].tolist()
    expected = golden["logits_a"].log_softmax(-1)
    for name, most in ERRORS.items():
        found = logprobs_of(case, ids, kv_cache_dtype=name)
        errors = (found - expected).square().mean(-1).sqrt() / expected.std(-1).mean()
        assert 0 < errors.median() < most, (name, errors.median())
    found = logprobs_of(case, ids, kv_cache_dtype="fp8")
    write_rounded(monkeypatch)
    torch.testing.assert_close(found, logprobs_of(case, ids), rtol=0, atol=2e-4)


@pytest.mark.parametrize("case", INDEXES)
def test_goldens_with_an_index(case: str, monkeypatch: pytest.MonkeyPatch) -> None:
    golden = load_file(GOLDENS / case / "golden.safetensors")
    selected = load_file(GOLDENS / case / "layer_intermediates.safetensors")["sel_idx_0"]
    ids, k = golden["input_ids_a"].tolist(), selected.shape[1]
    for name, least in SHARES.items():
        with load_recording(GOLDENS / case, kv_cache_dtype=name) as llm:
            llm.logprobs(ids)
            same = [
                len(set(read_by(llm)[0, position]) & set(selected[position].tolist())) / k
                for position in range(k, len(ids))
            ]
        assert least < sum(same) / len(same) < 1, (name, sum(same) / len(same))
    found = logprobs_of(case, ids, kv_cache_dtype="fp8")
    write_rounded(monkeypatch)
    torch.testing.assert_close(found, logprobs_of(case, ids), rtol=0, atol=2e-4)


@pytest.mark.parametrize("config", [TINY_LATENT, INDEXED], ids=["latents", "index"])
def test_a_token_does_not_depend_on_how_its_prompt_is_cut(
    config: dict[str, Any], tmp_path: Path
) -> None:
    folder = write_model(tmp_path / "model", config)
    options: dict[str, Any] = {"dtype": "float64", "device": "cpu", "page_size": 16}
    options |= {"kv_cache_dtype": "fp8", "disable_radix_cache": True}
    found = []
    for chunk in (100, 33, 7):
        with LLM(folder, chunked_prefill_size=chunk, **options) as llm:
            found.append(llm.logprobs(tokens_of(100)))
    for other in found[1:]:
        torch.testing.assert_close(other, found[0], rtol=0, atol=1e-9)


@pytest.mark.parametrize("name", ["fp8", "int8"])
def test_rows_that_left_the_device_come_back_with_their_scales(name: str, tmp_path: Path) -> None:
    folder = write_model(tmp_path / "model", INDEXED)
    prompts = [tokens_of(200), tokens_of(130, seed=9)]
    params = SamplingParams(max_tokens=30, ignore_eos=True)
    with load(folder, kv_cache_dtype=name) as llm:
        off = llm.generate(prompts, params)
    with tiered(folder, frames=14, hot=4, kv_cache_dtype=name) as llm:
        on = llm.generate(prompts, params)
        stats = tier_of(llm.engine).stats
        assert stats.misses > 0 and stats.bytes_in % packed_width(48) == 0
        check_clean(llm.engine)
    assert [own.token_ids for own in on] == [own.token_ids for own in off]


def test_odd_index_keys_are_refused(tmp_path: Path) -> None:
    folder = write_model(tmp_path / "model", TINY_DSA)
    with pytest.raises(ConfigError, match=r"keep index of 20 columns; .* multiple of 8: use auto"):
        LLM(folder, kv_cache_dtype="fp8", device="cpu")


def test_kernels_refuse_scales_that_latents_and_rotated_parts_share() -> None:
    groups = group_layers([None], [CacheLayout.of_latents(160, 24).of_type(FP8)])
    size = 4, 1, 160, 1.0, 16, torch.float32, torch.device("cuda"), groups
    shape = AttentionShape(*size, value_dim=96)
    config = SparseConfig(None, (0,), 24, 1, Policy.strategy, Policy.fusion, by_row=True)
    for why in (TritonBackend.unsupported_reason(shape), DSABackend.kernel_refusal(config, shape)):
        assert why is not None and "have 96 and 64 columns; it has multiples of 128" in why
    assert TorchBackend.unsupported_reason(shape) is None
