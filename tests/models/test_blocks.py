"""Quantised matrices: their types in GGUF files, and products from their quantised form."""

from __future__ import annotations

from pathlib import Path

import gguf
import numpy as np
import pytest
import torch

from cairn.kernels.cpu import CpuKernels, CpuKernelsUnavailableError
from cairn.models.blocks import BlockMatrix, Codes, Stack
from cairn.models.gguf_blocks import BLOCK_TYPES, read_blocks
from cairn.models.quantize import to_int8

COLUMNS = 512


def random_blocks(kind: str, outputs: int, columns: int = COLUMNS, seed: int = 0) -> np.ndarray:
    """Any bits are weights of this type; scales are made finite and of a sensible size."""
    block, size = gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType[kind]]
    draw = np.random.default_rng(seed)
    data = draw.integers(0, 256, (outputs, columns // block, size), dtype=np.uint8)
    places = {"Q2_K": (80, 82), "Q3_K": (108,), "Q6_K": (208,)}.get(kind, (0,))
    if kind in ("Q4_1", "Q5_1", "Q4_K", "Q5_K"):
        places = (0, 2)
    for place in places:
        scale = draw.normal(0, 0.01, data.shape[:2]).astype(np.float16)
        data[..., place : place + 2] = scale[..., None].view(np.uint8)
    return data.reshape(outputs, -1)


def random_codes(kind: str, outputs: int = 40, columns: int = COLUMNS, seed: int = 0) -> Codes:
    size = gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType[kind]][1]
    data = random_blocks(kind, outputs, columns, seed)
    return read_blocks(kind, torch.from_numpy(data), size)


@pytest.mark.parametrize("kind", BLOCK_TYPES)
def test_every_type_has_the_values_that_its_definition_gives(kind: str) -> None:
    data = random_blocks(kind, 40)
    expected = gguf.dequantize(data, gguf.GGMLQuantizationType[kind])
    codes = random_codes(kind)
    assert torch.equal(codes.dense(), torch.from_numpy(expected))
    matrix = BlockMatrix(codes, None)
    assert torch.equal(matrix.dense(), codes.dense())
    ids = torch.tensor([39, 0, 17, 17])
    assert torch.equal(matrix.rows(ids), codes.dense()[ids])


@pytest.mark.parametrize("kind", BLOCK_TYPES)
def test_kernel_and_reference_give_the_same_bits_however_many_rows_there_are(
    kind: str, kernels: CpuKernels
) -> None:
    x = torch.randn(15, COLUMNS, generator=torch.Generator().manual_seed(1))
    x[3] = 0
    codes = random_codes(kind)
    expected = BlockMatrix(codes, None).product(x)
    matrix = BlockMatrix(codes, kernels)
    for rows in (1, 2, 3, 4, 8, 15):
        assert torch.equal(matrix.product(x[:rows]), expected[:rows])
    exact = x.double() @ codes.dense().double().t()
    assert (expected - exact).abs().max() < 2e-4 * exact.abs().max()


def test_norm_activation_and_addition_are_part_of_a_product(kernels: CpuKernels) -> None:
    draw = torch.Generator().manual_seed(2)
    x, both = torch.randn(5, COLUMNS, generator=draw), torch.randn(5, 2 * COLUMNS, generator=draw)
    both[0, :4] = torch.tensor([-1000.0, 1000.0, 0.0, -20.0])
    weight, stream = torch.rand(COLUMNS, generator=draw), torch.randn(5, 40, generator=draw)
    reference, matrix = (BlockMatrix(random_codes("Q4_K"), k) for k in (None, kernels))
    expected = stream + reference.product(x, norm=(weight, 1e-5))
    out = stream.clone()
    assert matrix.product(x, out, norm=(weight, 1e-5), add=True) is out
    torch.testing.assert_close(out, expected, rtol=1e-4, atol=1e-3)
    expected = reference.product(both, silu=True)
    torch.testing.assert_close(matrix.product(both, silu=True), expected, rtol=1e-4, atol=2e-2)
    one_by_one = torch.cat([matrix.product(row[None], silu=True) for row in both])
    assert torch.equal(matrix.product(both, silu=True), one_by_one)


def test_a_result_does_not_depend_on_threads(kernels: CpuKernels) -> None:
    x = torch.randn(200, COLUMNS, generator=torch.Generator().manual_seed(3))
    matrix, before = BlockMatrix(random_codes("Q4_1", 200), kernels), torch.get_num_threads()
    results = []
    for threads in (1, 2, 3):
        torch.set_num_threads(threads)
        results.append(matrix.product(x))
    torch.set_num_threads(before)
    assert torch.equal(results[0], results[1]) and torch.equal(results[0], results[2])


@pytest.mark.parametrize("wrong", [float("nan"), float("inf"), -float("inf")])
def test_what_is_not_finite_stays_visible(wrong: float, kernels: CpuKernels) -> None:
    x = torch.ones(2, COLUMNS)
    x[1, 37] = wrong
    for own in (kernels, None):
        result = BlockMatrix(random_codes("Q8_0"), own).product(x)
        assert result[0].isfinite().all() and result[1].isnan().all()


def test_matrices_of_several_forms_make_one_product(kernels: CpuKernels) -> None:
    parts = [random_codes(kind, 24, seed=i) for i, kind in enumerate(("Q4_K", "Q4_K", "Q6_K"))]
    x = torch.randn(3, COLUMNS, generator=torch.Generator().manual_seed(4))
    expected = torch.cat([BlockMatrix(part, None).product(x) for part in parts], 1)
    stack = Stack(parts, kernels)
    assert torch.equal(stack.product(x), expected)
    assert torch.equal(stack.dense(), torch.cat([part.dense() for part in parts]))


def test_without_a_compiler_the_reason_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CXX", "no-such-compiler")
    with pytest.raises(CpuKernelsUnavailableError, match=r"no C\+\+ compiler \(no-such-compiler\)"):
        CpuKernels.load()


def test_a_compiler_that_fails_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    compiler = tmp_path / "cxx"
    compiler.write_text('#!/bin/sh\ncase "$*" in *-dM*) ;; *) echo "no room" >&2; exit 1;; esac\n')
    compiler.chmod(0o755)
    monkeypatch.setenv("CXX", str(compiler))
    monkeypatch.setenv("CAIRN_CACHE", str(tmp_path / "cache"))
    with pytest.raises(CpuKernelsUnavailableError, match=r"cxx failed: no room"):
        CpuKernels.load()
    assert "compiling kernels for this CPU" in caplog.text
    assert not list((tmp_path / "cache" / "kernels").iterdir())


def test_int8_of_float_weights() -> None:
    dense = torch.randn(16, 64, generator=torch.Generator().manual_seed(5))
    dense[3, :32] = 0
    codes = to_int8(dense)
    assert (codes.dense() - dense).abs().max() < 0.51 * dense.abs().max() / 127
    assert torch.equal(codes.dense()[3, :32], torch.zeros(32))
