"""FlashAttention-3 over an FP8 cache: who gets it, and what it computes, its kernel in torch."""

from __future__ import annotations

import math
import sys
from dataclasses import replace
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from cairn.attention.backend import AttentionShape, dense_class, resolve_backends
from cairn.attention.sgl_kernel_fp8_backend import SglKernelFp8Backend, round_query
from cairn.attention.widened import dense_backend, widened_bytes
from cairn.engine.inputs import StepInputs
from cairn.errors import ConfigError
from cairn.kernels.fp8_rows import FP8, widen
from cairn.kernels.references import gather_pages_reference, paged_attention
from cairn.memory.groups import group_layers
from cairn.memory.kv_pool import KVPool
from cairn.memory.layout import CacheLayout

CPU = torch.device("cpu")
SCALES = (0.013, 0.0091)


def flash_attn_with_kvcache(
    query: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    *,
    cache_seqlens: torch.Tensor,
    page_table: torch.Tensor,
    cu_seqlens_q: torch.Tensor,
    max_seqlen_q: int,
    softmax_scale: float,
    causal: bool,
    window_size: tuple[int, int],
    k_descale: torch.Tensor,
    v_descale: torch.Tensor,
) -> torch.Tensor:
    """SGLang's function in torch, for FP8. It refuses what the kernels do not take."""
    assert query.dtype == keys.dtype == values.dtype == FP8 and causal
    seqs, kv_heads = len(cache_seqlens), keys.shape[2]
    assert page_table.shape[0] == seqs and page_table.dtype == torch.int32
    for pages in (keys, values):  # 16 bytes at once
        assert pages.shape[2:] == (kv_heads, query.shape[2]) and pages.stride(3) == 1
        assert all(stride % 16 == 0 for stride in pages.stride()[:3])
        assert pages.storage_offset() % 16 == 0
    for scales in (k_descale, v_descale):
        assert scales.shape == (seqs, kv_heads) and scales.dtype == torch.float32
    lens = cu_seqlens_q.diff().tolist()
    assert max_seqlen_q >= max(lens)
    key = keys.float() * k_descale[0, :, None]
    value = values.float() * v_descale[0, :, None]
    out, _ = paged_attention(
        query.float(),
        torch.cat((key, value), 2).transpose(1, 2),
        page_table,
        cache_seqlens.tolist(),
        lens,
        scale=softmax_scale,
        window=None if window_size == (-1, -1) else window_size[0] + 1,
        fp8=True,
    )
    return out.bfloat16()


@pytest.fixture(autouse=True)
def package(monkeypatch: pytest.MonkeyPatch) -> None:
    module: Any = ModuleType("sgl_kernel.flash_attn")
    module.flash_attn_with_kvcache = flash_attn_with_kvcache
    monkeypatch.setitem(sys.modules, "sgl_kernel", ModuleType("sgl_kernel"))
    monkeypatch.setitem(sys.modules, "sgl_kernel.flash_attn", module)


def shape_of(
    heads: tuple[int, int, int] = (4, 2, 64), page_size: int = 64, cache: torch.dtype = FP8
) -> AttentionShape:
    groups = group_layers([None, 100], [CacheLayout.of_heads(*heads[1:], cache)] * 2)
    return AttentionShape(*heads, heads[2] ** -0.5, page_size, torch.bfloat16, CPU, groups)


@pytest.mark.parametrize("gathers", [False, True])
@pytest.mark.parametrize("page_size", [16, 64])
@pytest.mark.parametrize("heads", [(4, 2, 64), (4, 1, 128)])
def test_it_attends_to_the_stored_rows(
    heads: tuple[int, int, int], page_size: int, gathers: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    torch.manual_seed(0)
    shape = shape_of(heads, page_size)
    new, total = np.array([1, 70, 5, 1]), np.array([300, 70, 90, 1])
    counts = -(-total // page_size)
    pages = int(counts.sum())
    pool = KVPool(shape.groups, [pages] * 2, page_size, CPU)
    table = np.zeros((4, int(counts.max())), dtype=np.int32)
    order = np.split(1 + np.random.default_rng(0).permutation(pages), np.cumsum(counts)[:-1])
    for row, own in zip(table, order, strict=True):
        row[: len(own)] = own
    pool.use_scales({0: SCALES, 1: SCALES[::-1]})
    places = torch.arange(pages + 1).repeat_interleave(page_size)
    offsets = torch.arange(page_size).repeat(pages + 1)
    for layer in range(2):
        pool.write(layer, places, offsets, torch.randn(len(places), 2 * heads[1], heads[2]))
    step = StepInputs.made_up(page_size, new, total, [table] * 2).send(CPU, True).batch
    query = 3 * torch.randn(int(new.sum()), heads[0], heads[2]).bfloat16()
    backend = dense_backend([SglKernelFp8Backend], shape, pool)
    assert isinstance(backend, SglKernelFp8Backend)
    tiles = []

    def gather(pages: torch.Tensor, which: torch.Tensor, ratio: int, out: torch.Tensor) -> None:
        tiles.append(out.shape[2])
        out.copy_(gather_pages_reference(pages, which, ratio))

    kernels = SimpleNamespace(gather_pages=gather)
    monkeypatch.setitem(sys.modules, "cairn.kernels.gather_pages", kernels)
    monkeypatch.setattr(SglKernelFp8Backend, "_pays_to_gather", lambda *_: gathers)
    metadata = backend.prepare(step)
    backend.begin(metadata)
    for layer, window in enumerate((None, 100)):
        stored = widen(pool.part(layer), torch.float32)
        given = stored, torch.from_numpy(table), total.tolist(), new.tolist()
        how: dict[str, Any] = {"scale": shape.scale, "window": window}
        rounded, _ = paged_attention(query, *given, **how, fp8=True)
        out = backend.forward(layer, query, metadata)
        assert out.dtype == torch.bfloat16
        torch.testing.assert_close(out.float(), rounded, rtol=1e-2, atol=1e-2)
        # What rounding queries and softmax weights costs; the queries here are large.
        exact, _ = paged_attention(query, *given, **how)
        assert 1e-2 < (rounded - exact).norm() / exact.norm() < 0.1
        rows = torch.tensor([70, 3, 0])
        some = backend.forward_rows(layer, query, rows, metadata)
        assert some is not None
        torch.testing.assert_close(some.float(), rounded[rows], rtol=1e-2, atol=1e-2)
    # Pages of a window are not gathered; the others become whole tiles.
    assert tiles == ([math.lcm({64: 160, 128: 224}[heads[2]], page_size)] if gathers else [])


def test_a_rounded_query_is_finite_and_does_not_depend_on_other_rows() -> None:
    query = torch.tensor([[0.02, -3.3, 447.0], [1e4, -torch.inf, 0.0]]).bfloat16()
    rounded = round_query(query)
    assert rounded.float().tolist()[1] == [448.0, -448.0, 0.0]
    assert torch.equal(round_query(query[:1]).float(), rounded[:1].float())
    error = (rounded[0].float() - query[0].float()) / query[0].float()
    assert error.abs().max() <= 2**-4


@pytest.mark.parametrize("missing", [{}, {0: SCALES}, {0: SCALES, 1: (0.5, 0.0)}])
def test_a_layer_without_scales_is_refused(missing: dict[int, tuple[float, float]]) -> None:
    shape = shape_of()
    pool = KVPool(shape.groups, [1, 1], 64, CPU)
    pool.use_scales(missing)
    layer = 1 if missing else 0
    with pytest.raises(ConfigError, match=rf"not both for layer {layer}; use sgl_kernel"):
        SglKernelFp8Backend(shape, pool)


def test_what_it_does_not_serve(monkeypatch: pytest.MonkeyPatch) -> None:
    refused = SglKernelFp8Backend.unsupported_reason
    assert refused(shape_of()) is None
    for cache in (torch.bfloat16, torch.int8):
        assert "cache of FP8" in (refused(shape_of(cache=cache)) or "")
    assert "size 96" in (refused(shape_of((4, 2, 96))) or "")
    assert "float16" in (refused(replace(shape_of(), dtype=torch.float16)) or "")
    cuda = torch.device("cuda")
    for capability, reason in ((8, 9), "9.0"), ((9, 0), None), ((10, 0), "9.0"):
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _, own=capability: own)
        told = SglKernelFp8Backend.unavailable_reason(cuda)
        assert told is None if reason is None else reason in (told or "")


def test_auto_does_not_take_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """It rounds more than the cache does."""
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: (9, 0))
    shape = replace(shape_of(), device=torch.device("cuda"))
    kinds, _ = resolve_backends(["auto"], shape)
    assert SglKernelFp8Backend not in kinds and dense_class("sgl_kernel") in kinds
    kinds, _ = resolve_backends(["sgl_kernel_fp8", "triton"], shape)
    assert kinds == [SglKernelFp8Backend, dense_class("triton")]
    assert widened_bytes([SglKernelFp8Backend], shape) == 0
