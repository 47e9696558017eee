"""Kernels of a layer besides attention, and sampling, in Triton's interpreter. Run by
test_kernels.py."""

from __future__ import annotations

import pytest
import torch

from cairn.kernels import gemv as gemv_module
from cairn.kernels import rope_kv as rope_kv_module
from cairn.kernels.activation import silu_and_mul
from cairn.kernels.fp8_rows import FP8, rows_and_scales
from cairn.kernels.gemv import gemv, narrow_product
from cairn.kernels.interface import ScoringHeads
from cairn.kernels.newest import known_tokens
from cairn.kernels.norm import add_rms_norm, rms_norm
from cairn.kernels.references import (
    gemv_reference,
    rms_norm_reference,
    rope_angles_reference,
    rope_kv_reference,
    sample_reference,
    silu_and_mul_reference,
)
from cairn.kernels.rope_angles import rope_angles
from cairn.kernels.rope_kv import rope_kv
from cairn.kernels.sampling import sample
from tests.kernels.kernel_engines import narrow_pages
from tests.kernels.rope_case import weighed_errors

NAN = float("nan")


def test_norms() -> None:
    torch.manual_seed(0)
    x, stream, weight = torch.randn(5, 40), torch.randn(5, 40), torch.randn(40)
    torch.testing.assert_close(rms_norm(x, weight, 1e-6), rms_norm_reference(x, weight, 1e-6))
    strided = torch.randn(5, 64)[:, :40]
    expected = rms_norm_reference(strided, weight, 1e-6)
    torch.testing.assert_close(rms_norm(strided, weight, 1e-6), expected)
    total = x + stream
    normed = add_rms_norm(x, stream, weight, 1e-2)
    torch.testing.assert_close(normed, rms_norm_reference(total, weight, 1e-2))
    torch.testing.assert_close(stream, total)
    parts, stream = torch.randn(3, 5, 40), torch.randn(5, 40)
    total = parts.sum(0) + stream
    normed = add_rms_norm(parts, stream, weight, 1e-2)
    torch.testing.assert_close(normed, rms_norm_reference(total, weight, 1e-2))
    torch.testing.assert_close(stream, total)


def test_silu_and_mul() -> None:
    gate_up = torch.randn(3, 100)
    torch.testing.assert_close(silu_and_mul(gate_up), silu_and_mul_reference(gate_up))


@pytest.mark.parametrize(("rows", "width"), [(1, 50), (1, 4100), (2, 50), (7, 1030), (8, 50)])
@pytest.mark.parametrize("before", ["nothing", "silu", "norm"])
@pytest.mark.parametrize("adds", [False, True])
def test_gemv(rows: int, width: int, before: str, adds: bool) -> None:
    weight = torch.randn(37, width)
    x = torch.randn(rows, 2 * width if before == "silu" else width)
    norm = (torch.randn(width), 1e-2) if before == "norm" else None
    streams = [torch.ones(rows, 37) if adds else None for _ in range(2)]
    found, expected = (
        product(x, weight, silu=before == "silu", norm=norm, add_to=stream)
        for product, stream in zip((gemv, gemv_reference), streams, strict=True)
    )
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)
    assert not adds or found is streams[0]


@pytest.mark.parametrize("described", [False, True])
@pytest.mark.parametrize("before", ["nothing", "silu", "norm"])
def test_gemv_of_tiles(before: str, described: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """The kernel for large matrices, with a last tile that is not whole."""
    monkeypatch.setattr(gemv_module, "streams", lambda *_: True)
    monkeypatch.setattr(gemv_module, "_WIDE", 0)
    monkeypatch.setattr(gemv_module, "can_describe", lambda *_: described)
    for rows, adds in ((1, False), (8, True), (11, False)):
        weight = torch.randn(100, 256).half()
        x = torch.randn(rows, 512 if before == "silu" else 256).half()
        norm = (torch.randn(256).half(), 1e-2) if before == "norm" else None
        streams = [torch.ones(rows, 100).half() if adds else None for _ in range(2)]
        found, expected = (
            product(x, weight, silu=before == "silu", norm=norm, add_to=stream)
            for product, stream in zip((gemv, gemv_reference), streams, strict=True)
        )
        torch.testing.assert_close(found, expected, rtol=1e-2, atol=1e-1)


@pytest.mark.parametrize(("rows", "width"), [(1, 50), (4, 8192), (11, 8200)])
def test_products_with_few_outputs(rows: int, width: int) -> None:
    x, weight = torch.randn(rows, width).half(), torch.randn(5, width)
    expected = (x.double() @ weight.double().t() * 0.5).float()
    torch.testing.assert_close(narrow_product(x, weight, 0.5), expected, rtol=1e-4, atol=1e-3)


def test_rope_angles() -> None:
    positions = torch.tensor([0, 1, 17, 5000], dtype=torch.int32)
    frequencies = torch.tensor([1.0, 0.1, 0.0])
    found = rope_angles(positions, frequencies, 1.5, torch.float32)
    expected = rope_angles_reference(positions, frequencies, 1.5, torch.float32)
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("norm", [False, True])
@pytest.mark.parametrize("dim", [16, 24])
@pytest.mark.parametrize("scores", ["", "added", "own"])
@pytest.mark.parametrize(
    ("many", "cache"),
    [(5, None), (1024, None), (5, FP8), (1024, FP8), (5, torch.int8)],
)
def test_rope_and_kv_write(
    norm: bool,
    dim: int,
    scores: str,
    many: int,
    cache: torch.dtype | None,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    if scores and not norm:
        pytest.skip("scoring heads come with norms")
    monkeypatch.setattr(rope_kv_module, "_SOME_ROWS", many)
    monkeypatch.setattr(rope_kv_module, "_MANY_ROWS", many)
    heads, kv_heads = 6, 2
    qkv = torch.randn(5, (heads + 2 * kv_heads) * dim + heads * dim)
    scoring = None
    if scores:
        scoring = ScoringHeads(qkv[:, -heads * dim :], scores == "added", torch.randn(dim))
    cos, sin = torch.randn(5, dim), torch.randn(5, dim)
    q_weight, k_weight = (torch.randn(dim), torch.randn(dim)) if norm else (None, None)
    pages, offsets = torch.tensor([1, 2, 2, 3, 1]), torch.tensor([0, 1, 2, 3, 7])
    pools = [torch.zeros(4, 2 * kv_heads, 8, dim) for _ in range(2)]
    if cache is not None:
        pools = [narrow_pages(pool, cache) for pool in pools]
        qkv[1] *= 1e-4
        qkv[2] = 0.0
    given = (2.0**-9, 0.0) if cache == FP8 and scores == "own" else (0.0, 0.0)
    places = pages, offsets
    hadamard = cache == FP8 and dim == 16 and not scores
    found, expected = (
        kernel(
            *(qkv, cos, sin, q_weight, k_weight, 1e-6, pool, *places, heads, scoring, given),
            hadamard=hadamard,
        )
        for kernel, pool in zip((rope_kv, rope_kv_reference), pools, strict=True)
    )
    torch.testing.assert_close(found, expected)
    assert (found[0] is found[1]) == (scoring is None)
    if cache is None:
        torch.testing.assert_close(pools[0], pools[1])
        return
    if cache == FP8:  # where two scales are about as good, either is chosen
        exact = torch.zeros(4, 2 * kv_heads, 8, dim)
        arguments = qkv, cos, sin, q_weight, k_weight, 1e-6, exact, *places, heads
        query, _ = rope_kv_reference(*arguments, hadamard=hadamard)
        own, best = (weighed_errors(pool, exact, places, query) for pool in pools)
        torch.testing.assert_close(own, best, rtol=1e-3, atol=1e-30)
        return
    (rows, scales), (expected_rows, expected_scales) = map(rows_and_scales, pools)
    torch.testing.assert_close(scales, expected_scales, rtol=1e-6, atol=0)
    wrong = (rows.float() != expected_rows.float()).float().mean()
    assert wrong < 0.001


def test_sampling_takes_what_the_reference_takes() -> None:
    logits = torch.randn(40, 9000)
    logits[4, [7, 8000]] = 50.0  # a tie: the lower id
    logits[5:10, :8500] = float("-inf")  # two blocks without a token
    logits[10:20, 1:] = float("-inf")
    temperatures = torch.tensor([0.0, 1.0, 0.5, 2.0, 0.0]).repeat(8)
    seeds = torch.arange(40) * 0x1234567890ABCDEF % 2**62
    tokens = sample(logits, temperatures, seeds)
    assert tokens.tolist() == sample_reference(logits, temperatures, seeds).tolist()
    assert tokens[0] == logits[0].argmax() and tokens[4] == 7
    assert (tokens[5:10] >= 8500).all() and (tokens[10:20] == 0).all()
    assert len(set(tokens[20:].tolist())) > 10
    newest, places = torch.full((50,), -7), torch.arange(40, dtype=torch.int32).flip(0) + 3
    assert sample(logits, temperatures, seeds, newest, places).tolist() == tokens.tolist()
    assert newest.tolist() == [-7] * 3 + tokens.flip(0).tolist() + [-7] * 7


def test_known_tokens() -> None:
    given, newest = torch.arange(300, dtype=torch.int32), torch.arange(9) + 1000
    sources = torch.where(given % 7 == 0, given % 9, -1).int()
    expected = torch.where(given % 7 == 0, newest[given % 9], given)
    assert known_tokens(given, sources, newest).tolist() == expected.tolist()
