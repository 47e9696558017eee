"""SGLang's bookkeeping, much reduced: pages that are handed out, shared, evicted and recycled.

Requests get pages in no order, prefixes are shared page by page, and whatever nobody owns is NaN.
"""

from __future__ import annotations

import random
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import torch

from cairn.memory.geometry import PageGeometry
from cairn.sglang.sparse import SparseAttention

NAN = float("nan")


@dataclass
class Running:
    slot: int
    tokens: list[int]
    pages: list[int]
    computed: int
    """Tokens whose rows are in the cache."""
    shared: int
    """Pages that came from the cache."""
    outputs: dict[int, torch.Tensor] = field(default_factory=dict)  # by token


class Pages:
    def __init__(
        self, attention: SparseAttention, geometry: PageGeometry, num_pages: int, rng: random.Random
    ) -> None:
        self.attention = attention
        self.size = geometry.tokens_per_page
        self.rng = rng
        self.free = list(range(1, num_pages + 1))
        self.cached: dict[tuple[int, ...], int] = {}  # a prefix of whole pages -> its last page
        self.running: list[Running] = []
        self.req_to_token = torch.zeros(9, 64 * self.size, dtype=torch.int32)
        self.lives = [0] * (num_pages + 1)
        for page in self.free:
            self._poison(page)

    def admit(self, tokens: list[int], slot: int) -> Running:
        pages: list[int] = []
        # At least one token is left to compute, as in SGLang.
        while (key := tuple(tokens[: (len(pages) + 1) * self.size])) in self.cached:
            if len(key) >= len(tokens):
                break
            pages.append(self.cached[key])
        request = Running(slot, tokens, pages, len(pages) * self.size, len(pages))
        self.running.append(request)
        self.req_to_token[slot] = self.rng.randrange(10**6)  # what an earlier request left there
        for place, page in enumerate(pages):
            self._put(request, place, page)
        return request

    def batch(self, work: list[tuple[Running, int]]) -> Any:
        """A batch that computes so many more tokens of each request."""
        slots = []
        for request, count in work:
            for token in range(request.computed, request.computed + count):
                if token % self.size == 0:
                    request.pages.append(self._allocate())
                    self._put(request, token // self.size, request.pages[-1])
                slots.append(int(self.req_to_token[request.slot, token]))
        lens = torch.tensor([request.computed + count for request, count in work])
        decode = all(count == 1 for _, count in work)
        return SimpleNamespace(
            forward_mode=SimpleNamespace(is_decode=lambda: decode, is_mixed=lambda: False),
            batch_size=len(work),
            req_pool_indices=torch.tensor([request.slot for request, _ in work]),
            seq_lens=lens,
            seq_lens_cpu=lens,
            extend_seq_lens_cpu=[count for _, count in work],
            out_cache_loc=torch.tensor(slots),
        )

    def finish(self, request: Running) -> None:
        """Complete pages stay cached, unless somebody else's are; the others are free."""
        self.running.remove(request)
        for place, page in enumerate(request.pages):
            if place < request.shared:
                continue
            key = tuple(request.tokens[: (place + 1) * self.size])
            if len(key) == (place + 1) * self.size <= request.computed and key not in self.cached:
                self.cached[key] = page
            else:
                self._release(page)

    def _allocate(self) -> int:
        if not self.free:
            used = {page for request in self.running for page in request.pages}
            leaves = [
                key
                for key, page in self.cached.items()
                if page not in used
                and not any(len(k) > len(key) and k[: len(key)] == key for k in self.cached)
            ]
            self._release(self.cached.pop(self.rng.choice(leaves)))
        page = self.free.pop(self.rng.randrange(len(self.free)))
        self.lives[page] += 1
        return page

    def _release(self, page: int) -> None:
        self.free.append(page)
        self._poison(page)

    def _poison(self, page: int) -> None:
        """But not what says which life a landmark belongs to: that is what is tested."""
        landmarks = self.attention.landmarks
        for layer in landmarks.vectors:
            for part in (self.attention.pool.keys(layer), self.attention.pool.values(layer)):
                part[page] = NAN
        # A stale landmark would be selected before all others.
        for tensor in (*landmarks.vectors.values(), *landmarks.biases.values()):
            torch.unflatten(tensor, 0, (-1, landmarks.shape.units))[page] = 1e4

    def _put(self, request: Running, place: int, page: int) -> None:
        begin = place * self.size
        slots = page * self.size + torch.arange(self.size)
        self.req_to_token[request.slot, begin : begin + self.size] = slots.to(torch.int32)
