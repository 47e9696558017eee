"""Kernels of an index and of attention over single rows against their references."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch

from cairn.attention.backend import AttentionShape
from cairn.attention.flash_mla_rows import FlashRows
from cairn.kernels import attend_rows, choose_rows, latent_decode
from cairn.kernels.index_scan import index_scan, plan_scan
from cairn.kernels.references import index_scan_reference
from cairn.kernels.top_rows import top_rows
from cairn.memory.groups import group_layers
from cairn.memory.layout import CacheLayout
from tests.kernels import latent_case, rope_latent_case, row_case
from tests.kernels.row_case import Sizes

pytestmark = pytest.mark.gpu
CUDA = torch.device("cuda")
TOLERANCE = {torch.bfloat16: 1e-2, torch.float16: 1e-2, torch.float32: 1e-5}

INDEXES = [
    (Sizes(64, 128, 64), torch.bfloat16),
    (Sizes(32, 128, 16), torch.bfloat16),
    (Sizes(5, 40, 128), torch.float16),
    (Sizes(64, 128, 64), torch.float32),
]
BATCHES = {
    "decode": [(1, n) for n in (1, 63, 64, 65, 2000, 70_000)],
    "chunks": [(5, 64), (130, 2000), (65, 66), (1, 5000)],
}


@pytest.mark.parametrize(("sizes", "dtype"), INDEXES, ids=str)
@pytest.mark.parametrize("batch", BATCHES)
def test_index_scan(batch: str, sizes: Sizes, dtype: torch.dtype) -> None:
    new, lengths = map(list, zip(*BATCHES[batch], strict=True))
    row_case.check_scan(lengths, new, sizes, CUDA, dtype, tolerance=1e-5)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("keys", [False, True])
@pytest.mark.parametrize("sizes", [(16, 128, 128, 64, 512), (7, 64, 64, 64, 128), (3, 5, 6, 8, 24)])
def test_rotated_and_stored_rows(
    sizes: tuple[int, int, int, int, int], keys: bool, dtype: torch.dtype
) -> None:
    rope_latent_case.check(*sizes, CUDA, dtype, keys=keys)


@pytest.mark.parametrize("by", ["cuda", "triton"])
@pytest.mark.parametrize("kind", row_case.KINDS)
def test_top_rows(kind: str, by: str) -> None:
    """Rows are shared by 8 blocks, by 4, by 2, and one block has a row."""
    choose = None
    if by == "cuda":
        if (reason := choose_rows.refusal(CUDA)) is not None:
            pytest.skip(reason)
        choose = choose_rows.ChooseRows(CUDA)
    check = partial(row_case.check_top, kind, device=CUDA, choose=choose)
    check([1, 2048, 2049, 5000, 70_000, 131_072, 300_001], 2048)
    check([20_000] * 40, 500)
    check([10_000] * 100, 4096)
    check([10_000] * 150, 100)
    check([1_000_000], 2048)


LATENT = [
    (latent_case.Sizes(128, 512, 64, 64), torch.bfloat16),
    (latent_case.Sizes(20, 512, 64, 16), torch.bfloat16),
    (latent_case.Sizes(5, 40, 24, 16), torch.float16),
    (latent_case.Sizes(5, 40, 24, 16), torch.float32),
]


@pytest.mark.parametrize(("sizes", "dtype"), LATENT, ids=str)
@pytest.mark.parametrize("counts", [[2048], [1, 2048, 700, 0, 1999], [2048] * 150], ids=len)
def test_row_attention(counts: list[int], sizes: latent_case.Sizes, dtype: torch.dtype) -> None:
    row_case.check_attention(counts, 2048, sizes, CUDA, dtype, tolerance=TOLERANCE[dtype])


COUNTS = [[2048], [1, 2048, 700, 0, 1999], [2048] * 8, [2000] * 10, [1999] * 12, [2048] * 16]
COUNTS += [[2000] * 20, [2048] * 33, [2048, 0] * 75]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("heads", [64, 128])
@pytest.mark.parametrize("counts", COUNTS, ids=len)
def test_row_attention_in_cuda(counts: list[int], heads: int, dtype: torch.dtype) -> None:
    """Lists in all numbers of parts, of tiles that are full and not, odd and even."""
    sizes = latent_case.Sizes(heads, 512, 64, 64)
    if (reason := latent_decode.tiles_refusal(heads, 512, 64, dtype, CUDA)) is not None:
        pytest.skip(reason)
    own = attend_rows.AttendRows(heads, dtype, CUDA)

    def attend(
        query: torch.Tensor, pool: torch.Tensor, slots: torch.Tensor, scale: float
    ) -> torch.Tensor:
        out = torch.full_like(query[..., :512], float("nan"))
        own(query, pool, slots, out, scale=scale)
        return out

    for k in (2048, 2000):
        limited = [min(count, k) for count in counts]
        row_case.check_attention(limited, k, sizes, CUDA, dtype, tolerance=1e-2, attend=attend)
    row_case.check_attention([150, 0, 3], 150, sizes, CUDA, dtype, tolerance=1e-2, attend=attend)


@pytest.mark.parametrize("heads", [64, 128])
@pytest.mark.parametrize("counts", [[1, 2048, 700, 3, 1999], [2048] * 150], ids=len)
def test_flash_mla(counts: list[int], heads: int) -> None:
    sizes = latent_case.Sizes(heads, 512, 64, 64)
    groups = group_layers([None], [CacheLayout.of_latents(576).of_type(torch.bfloat16)])
    dims = (heads, 1, 576, 0.1, 64, torch.bfloat16, CUDA, groups)
    if (reason := FlashRows.refusal(AttentionShape(*dims, value_dim=512), 2048)) is not None:
        pytest.skip(reason)
    flash = FlashRows(heads, CUDA)

    def attend(query: torch.Tensor, pool: torch.Tensor, *given: Any) -> torch.Tensor:
        """It multiplies rows that are not listed, by zero."""
        return flash.attend(query, pool.nan_to_num(), *given)

    row_case.check_attention(
        counts, 2048, sizes, CUDA, torch.bfloat16, tolerance=1e-2, attend=attend
    )


def test_what_is_chosen_in_half_precision_is_as_good_as_the_best() -> None:
    """By the true scores of rounded queries and keys: no chosen row is worse than the true k-th by
    more than rounding, and no better row is left out."""
    torch.manual_seed(0)
    lengths, k = [70_000, 9000, 2500], 2048
    pool, table = latent_case.paged(lengths, latent_case.Sizes(1, 128, 0, 64), CUDA, torch.bfloat16)
    query = torch.randn(6, 64, 128, device=CUDA).bfloat16()
    weights = torch.randn(6, 64, device=CUDA)
    listed = row_case.make_list(lengths, [1, 1, 1], 1, CUDA)
    scores = torch.empty(3, 70_016, device=CUDA)
    plan_scan(listed, torch.bfloat16)
    torch.cuda.synchronize()  # in a step, another kernel runs between plan and scan
    index_scan(query, weights, pool, table, listed, scores)
    positions = torch.empty(3, k, dtype=torch.int32, device=CUDA)
    slots, scratch = torch.empty_like(positions), torch.empty_like(scores, dtype=torch.int32)
    given = scores, listed.limits, listed.seqs, table, positions, slots
    if choose_rows.refusal(CUDA) is None:
        choose_rows.ChooseRows(CUDA)(*given, page_size=64)
    else:
        top_rows(*given, scratch, page_size=64)
    for seq, length in enumerate(lengths):
        row = int(listed.rows[seq])
        keys = pool[table[seq].long()].flatten(0, 1)[:length].double()
        true = index_scan_reference(query[row].double(), weights[row].double(), keys)
        chosen = true[positions[seq].long()]
        rest = true.index_fill(0, positions[seq].long(), float("-inf"))
        assert chosen.min() >= rest.max() - 1e-5 * true.abs().max()
