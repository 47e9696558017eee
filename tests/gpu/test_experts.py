"""Kernels of routers, experts and latent attention against their references."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from cairn.kernels.experts import experts
from tests.kernels import expert_case, latent_case
from tests.kernels.expert_case import Sizes

pytestmark = pytest.mark.gpu
CUDA = torch.device("cuda")
TOLERANCE = {torch.bfloat16: 1e-2, torch.float32: 1e-5}


@pytest.mark.parametrize("rows", [1, 300])
@pytest.mark.parametrize("name", expert_case.ROUTERS)
def test_routers(name: str, rows: int) -> None:
    expert_case.check_router(name, CUDA, torch.float32, rows)


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize("rows", [1, 4, 5, 200, 1500])
def test_experts_that_fit_no_tile(rows: int, dtype: torch.dtype) -> None:
    """With norm and sum, on a rank that has some of them."""
    sizes = Sizes(experts=9, per_token=3, hidden=200, inter=72)
    expert_case.check_experts(sizes, rows, CUDA, dtype, fused=True, tolerance=TOLERANCE[dtype])


REAL = Sizes(experts=64, per_token=8, hidden=2048, inter=768)


@pytest.mark.parametrize("rows", [1, 8, 300, 3000])
def test_experts_of_a_real_size(rows: int) -> None:
    skewed = rows > 8
    expert_case.check_experts(REAL, rows, CUDA, torch.bfloat16, skewed=skewed, tolerance=1e-2)


def test_experts_give_the_same_bits_again() -> None:
    """And every output is written: memory that is reused holds NaN."""
    torch.manual_seed(0)
    count, per_token, hidden, inter = REAL
    like: dict[str, Any] = {"device": CUDA, "dtype": torch.bfloat16}
    gate_up = torch.randn(count, 2 * inter, hidden, **like)
    down = torch.randn(count, hidden, inter, **like)
    for rows in (1, 3, 7, 64, 600, 2000):
        x = torch.randn(rows, hidden, **like)
        ids = torch.rand(rows, count, device=CUDA).topk(per_token, -1).indices.int()
        weights = torch.rand(rows, per_token, device=CUDA)
        found = []
        for _ in range(3):
            size = (per_token * rows, hidden)
            spoilt = [torch.full(size, float("nan"), **like) for _ in range(3)]
            del spoilt
            found.append(experts(x, ids, weights, gate_up, down))
        assert found[0].isfinite().all()
        assert all(torch.equal(found[0], again) for again in found[1:])


LATENT = [
    (latent_case.Sizes(128, 512, 64, 64), torch.bfloat16),
    (latent_case.Sizes(16, 512, 64, 16), torch.bfloat16),
    (latent_case.Sizes(40, 256, 32, 512), torch.float16),
    (latent_case.Sizes(5, 40, 24, 16), torch.bfloat16),
    (latent_case.Sizes(5, 40, 24, 16), torch.float32),
]
BATCHES = {
    "decode": [(1, n) for n in (1, 63, 64, 65, 2000, 5000)],
    "one": [(1, 9000)],
    "extend": [(5, 64), (64, 2000), (65, 66), (200, 200)],
    "mixed": [(1, 1), (63, 63), (1, 2000), (65, 500), (1, 64), (2, 130)],
}


@pytest.mark.parametrize(("sizes", "dtype"), LATENT, ids=str)
@pytest.mark.parametrize("batch", BATCHES)
def test_latent_attention(batch: str, sizes: latent_case.Sizes, dtype: torch.dtype) -> None:
    new, lengths = map(list, zip(*BATCHES[batch], strict=True))
    latent_case.check(lengths, new, sizes, CUDA, dtype, tolerance=TOLERANCE.get(dtype, 1e-2))


MANY = [(1, n) for n in (7, 64, 129, 4000, 1, 640, 700)]


@pytest.mark.parametrize("lengths", [*BATCHES.values(), MANY], ids=[*BATCHES, "many"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize(("heads", "page_size"), [(128, 64), (64, 128)])
def test_latent_decode_in_cuda(
    heads: int, page_size: int, dtype: torch.dtype, lengths: list[tuple[int, int]]
) -> None:
    new, total = map(list, zip(*lengths, strict=True))
    sizes = latent_case.Sizes(heads, 512, 64, page_size)
    latent_case.check(total, new, sizes, CUDA, dtype, tolerance=1e-2, cuda=True)


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
def test_both_forms_of_latent_attention(dtype: torch.dtype) -> None:
    latent_case.check_forms(CUDA, dtype, tolerance=TOLERANCE[dtype] if dtype.itemsize > 2 else 2e-2)
