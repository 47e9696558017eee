"""What kernels of DeepSeek sparse attention refuse, say and keep, before any of them runs."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from cairn import LLM
from cairn.attention import dsa_kernels
from cairn.attention.backend import AttentionShape, SparseParts
from cairn.attention.dsa_backend import DSABackend
from cairn.attention.dsa_kernels import RowKernels
from cairn.attention.torch_backend import TorchBackend
from cairn.config import EngineConfig
from cairn.engine.memory_budget import kv_budget
from cairn.engine.memory_plan import size_pools
from cairn.engine.resolve import resolve
from cairn.errors import ConfigError
from cairn.kernels import choose_rows
from cairn.memory.groups import group_layers
from cairn.memory.kv_pool import KVPool
from cairn.memory.layout import CacheLayout
from cairn.models.config_reader import ConfigReader
from cairn.models.registry import read_spec
from cairn.sparsity.config import SparseConfig
from cairn.sparsity.policy import Policy
from tests.helpers import GOLDENS, TINY_DSA

CPU, CUDA = torch.device("cpu"), torch.device("cuda")
CONFIG = SparseConfig(None, (0,), 24, 1, Policy.strategy, Policy.fusion, by_row=True)


def shape_of(device: torch.device, longest: int) -> AttentionShape:
    groups = group_layers([None], [CacheLayout.of_latents(48, 20).of_type(torch.float32)])
    size = (4, 1, 48, 1.0, 16, torch.float32, device, groups)
    return AttentionShape(*size, value_dim=32, longest=longest)


@pytest.mark.parametrize("longest", [16, 512, 1040, 40_000])
def test_buffers_take_what_the_plan_was_told(longest: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dsa_kernels, "_SCORES", 2**18)
    shape = shape_of(CPU, longest)
    pool = KVPool(shape.groups, [2], 16, CPU)
    dense = TorchBackend(shape, pool)
    for pages in {1, longest // 16}:  # fewer where the cache holds no request of that length
        kernels = RowKernels(
            SparseParts(shape=shape, pool=pool, config=CONFIG, max_pages=pages, dense=dense)
        )
        taken = sum(own.nbytes for own in vars(kernels).values() if isinstance(own, torch.Tensor))
        taken -= kernels._count.nbytes
        told = DSABackend.buffer_bytes(shape)
        assert taken == told if pages * 16 == longest else taken <= told


def test_buffers_come_out_of_the_share_of_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    spec = read_spec(ConfigReader(TINY_DSA, "test"))
    free, total = 70 * 2**20, 100 * 2**20
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda _: (free, total))
    choices = resolve(EngineConfig(device="cpu"), spec, torch.float32, CPU)
    assert choices.buffer_bytes == 0 and choices.kernel_refusal is not None
    choices = replace(choices, shape=replace(choices.shape, device=CUDA))
    assert kv_budget(choices) == 55 * 2**20  # 85% of the device, less 30 MiB that are taken
    choices = replace(choices, kernel_refusal=None)
    monkeypatch.setattr(choose_rows, "refusal", lambda _: "an old GPU")
    assert choices.buffer_bytes == 4 * 2**20  # 1,024 rows of 512 scores
    assert kv_budget(choices) == 51 * 2**20
    explicit = EngineConfig(kv_cache_gib=68 / 1024)
    with pytest.raises(
        ConfigError, match=r"and buffers of kernels take 0\.004 GiB beside the KV c"
    ):
        kv_budget(replace(choices, config=explicit))
    free = 18 * 2**20
    with pytest.raises(
        ConfigError, match=r"holds no page; .*, and buffers of kernels take 0\.004 GiB"
    ):
        size_pools(replace(choices, config=EngineConfig()))


def test_contexts_that_are_too_long_are_named() -> None:
    assert RowKernels.refusal(CONFIG, shape_of(CUDA, 2**21 - 128)) is None
    for longest in (2**21 - 112, 2**21):
        refused = RowKernels.refusal(CONFIG, shape_of(CUDA, longest))
        assert refused is not None
        assert f"up to {longest} rows; they score up to 2097024: lower context_length" in refused


def test_the_engine_knows_how_long_requests_get() -> None:
    spec = read_spec(ConfigReader(TINY_DSA, "test"))
    choices = resolve(EngineConfig(context_length=100), spec, torch.float32, CPU)
    assert choices.shape.longest == 128  # two pages of 64


def test_why_flash_mla_does_not_serve_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(RowKernels, "refusal", staticmethod(lambda *_: None))
    folder = GOLDENS / "hf_glm_moe_dsa_shared_index"
    with LLM(folder, dtype="float32", device="cpu", kv_cache_gib=0.01) as llm:
        (note,) = (own for own in llm.engine.notes if "FlashMLA cannot" in own)
        assert note.startswith("dsa reads selected rows by its own kernel, FlashMLA cannot: ")
