"""Pages that are looked up and in part come late, against the same pages read where they are."""

from __future__ import annotations

import torch

from cairn.kernels.sparse_decode import sparse_decode
from cairn.kernels.sparse_scratch import SparseScratch, begin
from cairn.kernels.sparse_shape import SparseShape


def check(device: torch.device, dtype: torch.dtype, *, seqs: int, kv_heads: int, topk: int) -> None:
    size, dim, pages = 64, 128, 2 * topk
    shape = SparseShape(
        heads=2 * kv_heads, kv_heads=kv_heads, head_dim=dim, page_size=size,
        landmark_heads=kv_heads, landmark_width=dim, topk=topk, window=128, scale=dim**-0.5,
        strategy="group", by_lse=True, sinks=1, null_split=False, hide_last=False, dense_below=0,
    )  # fmt: skip
    generator = torch.Generator().manual_seed(0)

    def draw(*lengths: int) -> torch.Tensor:
        return torch.randn(lengths, generator=generator).to(device, dtype)

    table = (1 + torch.randperm(seqs * pages, generator=generator)).view(seqs, pages).int()
    table = table.to(device)
    pool = draw(seqs * pages + 1, 2 * kv_heads, size, dim)
    vectors = draw(seqs * pages + 1, kv_heads, dim)
    query = draw(seqs, shape.heads, dim)
    # The last has fewer candidates than it may read.
    lengths = torch.tensor([pages * size - 7] * (seqs - 1) + [5 * size], dtype=torch.int32)
    lengths, rows = lengths.to(device), torch.arange(seqs, dtype=torch.int32, device=device)
    nobody = torch.zeros(seqs * pages + 1, dtype=torch.int32, device=device)
    scratch = SparseScratch.empty(shape, seqs, pages, device)
    begin(
        scratch, table, torch.zeros_like(table), nobody, lengths, page_size=size, seal=False
    )  # all landmarks are of generation 0

    def locate(selected: torch.Tensor) -> torch.Tensor:
        places = table[:, None].expand(-1, kv_heads, -1).gather(2, selected.clamp(min=0).long())
        late = selected % 3 == 1
        return torch.where(selected < 0, 0, torch.where(late, -places, places)).int().contiguous()

    def attend(**looked_up: object) -> torch.Tensor:
        out = torch.full_like(query, torch.nan)
        sparse_decode(
            shape, scratch, query, query, query, pool, vectors, None, table, lengths, rows, out,
            pooling=None, **looked_up,  # type: ignore[arg-type]
        )  # fmt: skip
        return out.float()

    error = (attend(locate=locate) - attend()).norm() / attend().norm()
    assert error < (1e-5 if dtype == torch.float32 else 5e-3)
