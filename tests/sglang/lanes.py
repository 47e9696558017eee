"""Attention over recycled pages against attention over a sequence by itself."""

from __future__ import annotations

import random
from typing import Any

import torch

from cairn.attention.batch import Scoring
from cairn.memory.geometry import PageGeometry
from cairn.models.spec import AttentionSpec, ModelSpec, NativeSparsity
from cairn.sglang.options import read_plan
from cairn.sglang.sparse import SparseAttention, make_pool
from tests.sglang.pages import Pages, Running

VOCAB, LANDMARK = 11, 11
DIM, LAYERS = 16, 2


def spec_of(chunk_size: int | None, window: int, kv_heads: int) -> ModelSpec:
    """With landmark rows, if pages are chunks of so many rows; its first layer has a window."""
    native = None
    if chunk_size is not None:
        native = NativeSparsity("hils", (1,), chunk_size, 2, window, True, LANDMARK, True)
    return ModelSpec(
        architecture="Test",
        vocab_size=VOCAB,
        layers=tuple(
            AttentionSpec(2 * kv_heads, kv_heads, DIM, DIM**-0.5, window)
            for window in (None if native is None else 21, None)
        ),
        context_length=4096,
        sparsity=native,
    )


class Lane:
    def __init__(
        self,
        *,
        chunk_size: int | None,
        page_size: int,
        options: dict[str, Any],
        num_pages: int,
        seed: int,
        window: int = 20,
        kv_heads: int = 2,
        dtype: torch.dtype = torch.float64,
        interpreted: bool = False,
    ) -> None:
        self.spec = spec_of(chunk_size, window, kv_heads)
        self._options, self._page_size, self._dtype = options, page_size, dtype
        self.rng = random.Random(seed)
        generator = torch.Generator().manual_seed(seed)
        # By layer, token, position: query, key, value and scoring query side by side.
        width = 2 * self.spec.layers[0].num_heads + 2 * kv_heads
        shape = (LAYERS, VOCAB + 1, 1024, width, DIM)
        self._contents = torch.randn(shape, generator=generator, dtype=dtype)
        self.attention, self.geometry = self._attention(num_pages, interpreted)
        self.pages = Pages(self.attention, self.geometry, num_pages, self.rng)

    def _attention(
        self, num_pages: int, interpreted: bool = False
    ) -> tuple[SparseAttention, PageGeometry]:
        plan, geometry = read_plan(self._options, self.spec, self._page_size, "cpu")
        pool = make_pool(self.spec, geometry, num_pages, self._dtype, torch.device("cpu"))
        attention = SparseAttention(
            self.spec,
            plan,
            geometry,
            pool,
            max_seqs=8,
            max_tokens=64 * geometry.tokens_per_page,
            interpreted=interpreted,
        )
        return attention, geometry

    # -- steps --------------------------------------------------------------------------------

    def compute(self, work: list[tuple[Running, int]]) -> None:
        forward_batch = self.pages.batch(work)
        self.attention.begin(forward_batch, self.pages.req_to_token)
        self._run(self.attention, work)

    def replay(self, work: list[tuple[Running, int]], padded: int) -> None:
        """A decode step as a graph would run it: the host prepared it once and for all, for
        `padded` sequences."""
        batch = self.pages.batch(work)
        spare = padded - len(work)
        ones, zeros = torch.ones(spare, dtype=torch.int64), torch.zeros(spare, dtype=torch.int64)
        batch.seq_lens = torch.cat((batch.seq_lens, ones))
        batch.req_pool_indices = torch.cat((batch.req_pool_indices, zeros))
        batch.out_cache_loc = torch.cat((batch.out_cache_loc, zeros))
        del batch.seq_lens_cpu, batch.extend_seq_lens_cpu  # nothing recorded may read them
        self.attention.begin_recording(padded)
        self.attention.begin_recorded(batch, self.pages.req_to_token)
        self._run(self.attention, work, padded)

    def _run(
        self, attention: SparseAttention, work: list[tuple[Running, int]], padded: int = 0
    ) -> None:
        tokens = [
            request.tokens[t]
            for request, count in work
            for t in range(request.computed, request.computed + count)
        ]
        tokens += [0] * (padded - len(work))
        outputs = self._layers(attention, torch.tensor(tokens))
        begin = 0
        for request, count in work:
            for t in range(count):
                request.outputs[request.computed + t] = outputs[:, begin + t]
            request.computed += count
            begin += count

    def _layers(self, attention: SparseAttention, tokens: torch.Tensor) -> torch.Tensor:
        step = attention.step
        assert step is not None
        ids = step.token_ids(tokens, LANDMARK)
        heads, kv_heads = self.spec.layers[0].num_heads, self.spec.layers[0].num_kv_heads
        native = self.spec.sparsity
        outputs = []
        for layer in range(LAYERS):
            rows = self._contents[layer, ids, step.positions]
            query, key_value, scores_with = torch.split(rows, [heads, 2 * kv_heads, heads], 1)
            scoring = None
            if native is not None and layer in native.layers:
                scoring = Scoring(scores_with, scores_with)
            outputs.append(step.of_tokens(attention.attend(layer, query, key_value, scoring)))
        return torch.stack(outputs)  # [layers, tokens, heads, dim]

    # -- what must come out -------------------------------------------------------------------

    def expected(self, tokens: list[int]) -> torch.Tensor:
        """In torch, in one piece, on pages nobody used before."""
        attention, geometry = self._attention(64)
        fresh = Pages(attention, geometry, 64, random.Random(0))
        request = fresh.admit(tokens, 1)
        attention.begin(fresh.batch([(request, len(tokens))]), fresh.req_to_token)
        return self._layers(attention, torch.tensor(tokens))

    def check(self, request: Running, tolerance: float) -> None:
        expected = self.expected(request.tokens[: request.computed])
        first = request.shared * self.pages.size
        assert sorted(request.outputs) == list(range(first, request.computed))
        for token, found in request.outputs.items():
            torch.testing.assert_close(found, expected[:, token], rtol=0, atol=tolerance)

    # -- a day of a server --------------------------------------------------------------------

    def serve(self, rounds: int, tolerance: float) -> dict[str, int]:
        """Random requests come, share prefixes, grow and go."""
        prefixes = [[self.rng.randrange(VOCAB) for _ in range(90)] for _ in range(3)]
        hits = 0
        for _ in range(rounds):
            free_slots = [s for s in range(1, 9) if s not in {r.slot for r in self.pages.running}]
            if len(self.pages.running) < 3 and self.rng.random() < 0.5:
                prefix = self.rng.choice(prefixes)[: self.rng.randrange(1, 90)]
                own = [self.rng.randrange(VOCAB) for _ in range(self.rng.randrange(1, 40))]
                request = self.pages.admit(prefix + own, self.rng.choice(free_slots))
                hits += request.shared > 0
            running = self.pages.running
            if not running:
                continue
            prefill = [r for r in running if r.computed < len(r.tokens) - 20]
            if prefill:
                work = [
                    (r, self.rng.randrange(1, len(r.tokens) - 19 - r.computed)) for r in prefill
                ]
                rest = [r for r in running if r not in prefill and r.computed < len(r.tokens)]
                self.compute(work + [(r, 1) for r in rest])
            else:
                self.compute([(r, 1) for r in running if r.computed < len(r.tokens)])
            for request in list(running):
                if request.computed == len(request.tokens):
                    self.check(request, tolerance)
                    self.pages.finish(request)
        return {"hits": hits, "recycled": max(self.pages.lives) - 1}
