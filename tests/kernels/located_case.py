"""Pages that are looked up and in part come late, against the same pages read where they are."""

from __future__ import annotations

from collections.abc import Callable

import torch

from cairn.kernels.interface import Located
from cairn.kernels.sparse_decode import sparse_decode
from cairn.kernels.sparse_scratch import SparseScratch, begin
from cairn.kernels.sparse_shape import SparseShape

_PIECES = 3
_DELAY = 40_000_000  # clock ticks of the device, some 20 ms


class Case:
    """Rows of random sequences, whose every third selected page comes late."""

    def __init__(
        self,
        device: torch.device,
        dtype: torch.dtype,
        *,
        seqs: int,
        kv_heads: int,
        topk: int,
        by_lse: bool,
        page_size: int = 64,
    ) -> None:
        size, dim, pages = page_size, 128, 2 * topk + 128 // page_size
        self._shape = SparseShape(
            heads=2 * kv_heads, kv_heads=kv_heads, head_dim=dim, page_size=size,
            landmark_heads=kv_heads, landmark_width=dim, topk=topk, window=128, scale=dim**-0.5,
            strategy="group", by_lse=by_lse, sinks=1, null_split=False, hide_last=False,
        )  # fmt: skip
        generator = torch.Generator().manual_seed(0)

        def draw(*lengths: int) -> torch.Tensor:
            return torch.randn(lengths, generator=generator).to(device, dtype)

        table = (1 + torch.randperm(seqs * pages, generator=generator)).view(seqs, pages).int()
        self._table = table.to(device)
        self.pool = draw(seqs * pages + 1, 2 * kv_heads, size, dim)
        self._vectors = draw(seqs * pages + 1, kv_heads, dim)
        self._query = draw(seqs, self._shape.heads, dim)
        # The last has fewer candidates than it may read, where there are several.
        lengths = torch.tensor([pages * size - 7] * seqs, dtype=torch.int32)
        lengths[1:][-1:] = 128 + 3 * size
        self._lengths = lengths.to(device)
        self._rows = torch.arange(seqs, dtype=torch.int32, device=device)
        nobody = torch.zeros(seqs * pages + 1, dtype=torch.int32, device=device)
        self._scratch = SparseScratch.empty(self._shape, seqs, pages, device)
        begin(
            self._scratch, self._table, torch.zeros_like(self._table), nobody, self._lengths,
            page_size=size, seal=False,
        )  # fmt: skip
        # All landmarks are of generation 0, and slots are pages.
        self.arrived = torch.full_like(nobody[1:].expand(kv_heads, -1), _PIECES)

    def locate(self, selected: torch.Tensor) -> Located:
        """All that is late has arrived, as far as `arrived` says."""
        tables = self._table[:, None].expand(-1, self._shape.kv_heads, -1)
        places = tables.gather(2, selected.clamp(min=0).long())
        late = selected % 3 == 1
        found = torch.where(selected < 0, 0, torch.where(late, -places, places)).int().contiguous()
        return Located(found, self.arrived, pieces=_PIECES, first_slot=1)

    def attend(self, locate: Callable[[torch.Tensor], Located] | None = None) -> torch.Tensor:
        query = self._query
        out = torch.full_like(query, torch.nan)
        sparse_decode(
            self._shape, self._scratch, query, query, query, self.pool, self._vectors, None,
            self._table, self._lengths, self._rows, out, pooling=None, locate=locate,
        )  # fmt: skip
        return out.float()


def _error(found: torch.Tensor, expected: torch.Tensor) -> float:
    return float((found - expected).norm() / expected.norm())


def check(
    device: torch.device,
    dtype: torch.dtype,
    *,
    seqs: int,
    kv_heads: int,
    topk: int,
    by_lse: bool = True,
    page_size: int = 64,
) -> None:
    case = Case(
        device, dtype, seqs=seqs, kv_heads=kv_heads, topk=topk, by_lse=by_lse, page_size=page_size
    )
    limit = 1e-5 if dtype == torch.float32 else 5e-3
    assert _error(case.attend(case.locate), case.attend()) < limit


def check_waiting(dtype: torch.dtype) -> None:
    """Late pages are poison until long after attention has begun; the last piece is told then."""
    case = Case(torch.device("cuda"), dtype, seqs=2, kv_heads=2, topk=16, by_lse=True)
    expected = case.attend()
    seen: list[torch.Tensor] = []

    def locate(selected: torch.Tensor) -> Located:
        located = case.locate(selected)
        seen.append(located.pages)
        return located

    case.attend(locate)
    whole = case.pool.clone()
    full = case.arrived.clone()
    beside = torch.cuda.Stream()
    for delay in (0, _DELAY):  # at first whatever must be loaded, while nothing waits
        for head in range(len(full)):
            pages = seen[0][:, head]
            late = -pages[pages < 0].long()
            assert len(late) > 0
            if delay:
                case.pool[late, head] = torch.nan
                case.pool[late, head + len(full)] = torch.nan
                case.arrived[head, late - 1] = _PIECES - 1
        torch.cuda.synchronize()
        with torch.cuda.stream(beside):
            torch.cuda._sleep(delay)
            case.pool.copy_(whole)
            case.arrived.copy_(full)
        found = case.attend(case.locate)
        torch.cuda.synchronize()
        assert _error(found, expected) < (1e-5 if dtype == torch.float32 else 5e-3)
