"""Attention over latent rows against its reference, on any device."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import torch

from cairn.attention.backend import AttentionShape, DenseBackend
from cairn.attention.latent import LatentHeads
from cairn.attention.torch_backend import TorchBackend
from cairn.attention.triton_backend import TritonBackend
from cairn.engine.inputs import StepInputs
from cairn.kernels.fp8_rows import pack_rows, unpack_rows
from cairn.kernels.latent import (
    LatentShares,
    latent_decode,
    latent_extend,
    rows_per_block,
    share_pages,
)
from cairn.kernels.latent_decode import LatentDecode
from cairn.kernels.paged_extend import ExtendBlocks
from cairn.kernels.references import latent_attention
from cairn.memory.groups import group_layers
from cairn.memory.kv_pool import KVPool
from cairn.memory.layout import CacheLayout


class Sizes(NamedTuple):
    heads: int
    latent: int
    rope: int
    page_size: int


def paged(
    lengths: list[int], sizes: Sizes, device: torch.device, dtype: torch.dtype
) -> tuple[torch.Tensor, torch.Tensor]:
    """A pool with scattered pages and NaN in all that is not the sequences'; their page tables."""
    counts = [-(-length // sizes.page_size) for length in lengths]
    pages = sum(counts) + 3
    width = sizes.latent + sizes.rope
    pool = torch.full((pages + 1, sizes.page_size, width), float("nan"), device=device, dtype=dtype)
    free = (1 + torch.randperm(pages)).tolist()
    table = torch.zeros(len(lengths), max(counts) + 1, dtype=torch.int32)
    for s, (length, count) in enumerate(zip(lengths, counts, strict=True)):
        for index in range(count):
            page = table[s, index] = free.pop()
            rows = min(sizes.page_size, length - index * sizes.page_size)
            pool[page, :rows] = torch.randn(rows, width, device=device).to(dtype)
    return pool, table.to(device)


def narrowed(pool: torch.Tensor, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    """A pool as it is kept in a type of 8 bits, with anything where it has NaN, and what is read
    from it otherwise."""
    rows = torch.nan_to_num(pool.float())
    packed = pack_rows(rows, dtype)
    packed.view(torch.uint8)[pool.isnan().all(-1)] = 255
    return packed, unpack_rows(pack_rows(rows, dtype), pool.shape[-1], torch.float64)


def check(
    lengths: list[int],
    new: list[int],
    sizes: Sizes,
    device: torch.device,
    dtype: torch.dtype,
    *,
    tolerance: float,
    max_seqs: int = 8,
    cuda: bool = False,
    narrow: torch.dtype | None = None,
) -> None:
    """Sequences with one new row by the kernels for decode, in Triton or in CUDA C++, the others by
    those for chunks. `narrow` is the cache's type, if it has 8 bits."""
    torch.manual_seed(0)
    heads, latent, rope, page_size = sizes
    pool, table = paged(lengths, sizes, device, dtype)
    query = torch.randn(sum(new), heads, latent + rope, device=device).to(dtype)
    scale = 0.7 * (latent + rope) ** -0.5
    clean = torch.nan_to_num(pool).double()
    if narrow is not None:
        pool, clean = narrowed(pool, narrow)
    expected = latent_attention(
        query.double(), clean, table, lengths, new, latent=latent, scale=scale
    )
    out = torch.full((sum(new), heads, latent), float("nan"), device=device, dtype=dtype)
    cu_query = torch.tensor([0, *np.cumsum(new)], dtype=torch.int32, device=device)
    kv_lens = torch.tensor(lengths, dtype=torch.int32, device=device)
    single = torch.tensor(new, device=device) == 1
    shares = LatentShares.empty(max_seqs, heads, latent, dtype, device)
    alone = torch.where(single, kv_lens, 0)
    share_pages(shares, alone, page_size)
    rows = cu_query[:-1].contiguous()
    if device.type == "cuda":
        torch.cuda.synchronize()  # in a step, another kernel runs between plan and attention
    decode = LatentDecode(heads, page_size, max_seqs, dtype, device) if cuda else latent_decode
    decode(query, pool, table, alone, rows, shares, out, scale=scale)
    chunks = np.flatnonzero(np.array(new) > 1)
    if len(chunks):
        per_block = rows_per_block(heads, dtype)
        blocks = ExtendBlocks.of(np.array(new), chunks, device, per_block)
        latent_extend(query, pool, table, kv_lens, cu_query, blocks, out, scale=scale)
    error = (out.double() - expected).norm() / expected.norm()
    assert error < tolerance, f"error ratio {error:.1e}"


def check_forms(
    device: torch.device,
    dtype: torch.dtype,
    *,
    tolerance: float,
    narrow: torch.dtype | None = None,
) -> None:
    """A decode row, short chunks in absorbed form and long ones expanded, against torch. `narrow`
    is the cache's type, if it has 8 bits."""
    torch.manual_seed(0)
    heads, nope, rope, value, latent, page_size = 3, 16, 16, 16, 32, 16
    new, total = np.array([1, 33, 5, 40]), np.array([20, 50, 9, 40])
    layout = CacheLayout.of_latents(latent + rope)
    scale = (nope + rope) ** -0.5
    weights = [torch.randn(heads, nope, latent), torch.randn(heads, latent, value)]
    rows = torch.randn(int(new.sum()), heads, nope + rope)
    kept = torch.randn(int((-(-total // page_size)).sum()) + 1, page_size, latent + rope)
    pages = iter(1 + np.random.default_rng(0).permutation(len(kept) - 1))
    table = np.zeros((len(new), 5), dtype=np.int32)
    for s, length in enumerate(total):
        count = -(-length // page_size)
        table[s, :count] = [next(pages) for _ in range(count)]
        kept[table[s, count - 1], (length - 1) % page_size + 1 :] = float("nan")
    answers = []
    for backend, on, own in (
        (TorchBackend, torch.device("cpu"), torch.float64),
        (TritonBackend, device, dtype),
    ):
        groups = group_layers([None], [layout.of_type(narrow or own)])
        size = (heads, 1, latent + rope, scale, page_size, own, on, groups, len(new))
        shape = AttentionShape(*size, value_dim=latent)
        pool = KVPool(groups, [len(kept) - 1], page_size, on)
        step = StepInputs.made_up(page_size, new, total, [table]).send(on, True).batch
        attention: DenseBackend = backend(shape, pool)
        metadata = attention.prepare(step)
        attention.begin(metadata)
        # Torch has cleared pages that are not full.
        given = torch.nan_to_num(kept) if narrow or own == torch.float64 else kept
        pool.part(0, "latent").copy_(given if narrow is None else pack_rows(given, narrow))
        layer = LatentHeads(*(x.to(on, own) for x in weights))
        assert not layer.expanding_pays(rows[:32]) and layer.expanding_pays(rows[:33])
        out = attention.forward_latent(0, rows.to(on, own), layer, metadata)
        answers.append(out.double().cpu())
    error = (answers[1] - answers[0]).norm() / answers[0].norm()
    assert error < tolerance, f"error ratio {error:.1e}"
