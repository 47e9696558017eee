"""Sparse attention in plain torch: exact, on any device, the reference for every kernel.

The past is divided into splits, each with an output and a log-sum-exp. The window is one split,
each selected page is another, and softmax1 adds an empty one. A softmax over the log-sum-exps, or
over the landmark scores in their place, merges the outputs.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

import torch
import torch.nn.functional as F

from cairn.attention.hsa.metadata import Prompts, Tile
from cairn.memory.hisparse import HiSparseCoordinator
from cairn.memory.kv_pool import KVPool
from cairn.memory.landmarks import LandmarkPool
from cairn.memory.layout import QUERY
from cairn.sparsity.config import SparseConfig
from cairn.sparsity.policy import Landmark
from cairn.sparsity.selection import Selection, select

_ELEMENTS = 2**23  # most scores inside selected pages to compute at once
_MANY_ROWS = 16  # rows of a sequence from which on `_pages_by_page` is used
_PIECES = (4, 8, 16, 32)  # rows that share a copy of a page; chosen by the average


class TorchSparse:
    """Computes attention one tile and one layer at a time."""

    def __init__(
        self,
        config: SparseConfig,
        pool: KVPool,
        landmarks: LandmarkPool,
        scale: float,
        tier: HiSparseCoordinator | None = None,
    ) -> None:
        assert config.policy is not None
        self._config = config
        self._policy = config.policy
        self._pool = pool
        self._size = pool.page_size // config.units
        self._landmarks = landmarks
        self._scale = scale
        self._tier = tier

    def forward(
        self,
        layer: int,
        tile: Tile,
        query: torch.Tensor,
        scoring: torch.Tensor,
        index: torch.Tensor | None = None,
    ) -> tuple[torch.Tensor, Selection | None]:
        """The output of a tile, and the selection of its traced rows.

        query and scoring are [rows, heads, dim] in float32 or wider. `index` [rows, kv_heads, k],
        if given, replaces the selection: places in the sequence, padded with -1.
        """
        out, lse = self._window(layer, tile, query)
        rows, heads = lse.shape
        if tile.page_table.shape[1] == 0:
            weight = lse.sigmoid() if self._config.null_split else torch.ones_like(lse)
            out = out * weight[..., None]
            if tile.traced is None:
                return out, None
            none = tile.rows.new_empty(len(tile.traced), self._pool.kv_heads(layer), 0)
            scores = lse.new_empty(len(tile.traced), heads, 0)
            picked = (lse[tile.traced], weight[tile.traced])
            return out, Selection(none, none, scores, scores, *picked)
        if index is None:
            index, scores = self._select(layer, tile, scoring, lse)
        else:
            group = heads // self._pool.kv_heads(layer)
            every = self._scores(layer, tile, scoring, 0, tile.page_table.shape[1])
            places = index.repeat_interleave(group, 1)
            scores = every.gather(-1, places.clamp(min=0))
            scores = scores.masked_fill(places < 0, float("-inf"))
        per_seq = rows // tile.seqs
        owner = torch.arange(rows, device=index.device) // per_seq
        page_ids = tile.page_table[owner[:, None, None], index.clamp(min=0)]
        page_ids = torch.where(index < 0, -1, page_ids)
        lives = tile.generations[owner[:, None, None], index.clamp(min=0)]
        attend = self._pages_by_page if rows // tile.seqs >= _MANY_ROWS else self._pages_by_row
        merged: list[torch.Tensor] = []
        weights: list[torch.Tensor] = []
        window_weight: list[torch.Tensor] = []
        step = max(1, _ELEMENTS // (heads * index.shape[2] * self._size))
        for part in self._parts(layer, page_ids, lives, step):
            # Padding reads the row's own page with weight zero, so that no foreign page is read.
            found = self._locate(layer, page_ids[part], lives[part])
            readable = torch.where(index[part] < 0, tile.own_pages[part, None, None], found)
            page_out, page_lse, totals = attend(layer, query[part] * self._scale, readable)
            mixed = self._merge(page_out, page_lse, totals, scores[part], out[part], lse[part])
            for collected, value in zip((merged, weights, window_weight), mixed, strict=True):
                collected.append(value)
        out = torch.cat(merged)
        if tile.traced is None:
            return out, None
        traced = tile.traced
        return out, Selection(
            page_ids=page_ids[traced],
            page_index=index[traced],
            scores=scores[traced],
            weights=torch.cat(weights)[traced],
            window_lse=lse[traced],
            window_weight=torch.cat(window_weight)[traced],
        )

    def _parts(
        self, layer: int, page_ids: torch.Tensor, lives: torch.Tensor, most: int
    ) -> Iterator[slice]:
        """Slices of rows to attend to at once."""
        if self._tier is not None:
            return self._tier.parts(layer, page_ids, lives, most)
        return (slice(begin, begin + most) for begin in range(0, len(page_ids), most))

    def _locate(self, layer: int, page_ids: torch.Tensor, lives: torch.Tensor) -> torch.Tensor:
        """Pages of the pool that hold the selected pages, [rows, kv_heads, k]."""
        if self._tier is None:
            return page_ids
        return self._tier.swap_in(layer, page_ids, lives).places

    def _window(
        self, layer: int, tile: Tile, query: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Output [rows, heads, dim] and log-sum-exp [rows, heads] over the window."""
        rows, heads, dim = query.shape
        kv_heads, blocks = self._pool.kv_heads(layer), tile.blocks
        count, group = rows // blocks, heads // kv_heads
        every, units = torch.arange(2 * kv_heads, device=query.device), self._config.units
        slices = self._pool.slices(layer, tile.window_pages[:, None], every[:, None], units)
        # [blocks, 2 * kv_heads, pages, size, dim] -> [blocks, 2 * kv_heads, keys, dim]
        both = self._pool.read_slices(layer, slices, query.dtype, units).flatten(2, 3)
        key, value = both[:, :kv_heads], both[:, kv_heads:]
        # [blocks, kv_heads, group * count, dim]
        own = query.view(blocks, count, kv_heads, group, dim).permute(0, 2, 3, 1, 4)
        scores = (own * self._scale).flatten(2, 3) @ key.transpose(2, 3)
        split = (blocks, kv_heads, group, count)
        scores = scores.view(*split, -1)
        scores.masked_fill_(tile.hidden[:, None, None], float("-inf"))
        out, lse, total = _softmax(scores.flatten(2, 3), value)
        out = (out / total[..., None]).view(*split, dim).permute(0, 3, 1, 2, 4)
        lse = lse.view(split).permute(0, 3, 1, 2)
        return out.reshape(rows, heads, dim), lse.reshape(rows, heads)

    def _select(
        self, layer: int, tile: Tile, scoring: torch.Tensor, lse: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Places of the selected pages [rows, kv_heads, k], and their scores [rows, heads, k]."""
        config = self._config
        return select(
            partial(self._scores, layer, tile, scoring),
            tile.limits,
            tile.page_table.shape[1],
            lse,
            kv_heads=self._pool.kv_heads(layer),
            topk=min(config.topk_of(layer), tile.page_table.shape[1]),
            strategy=config.strategy,
            sinks=config.sinks,
            top_p=config.top_p,
        )

    def _scores(
        self, layer: int, tile: Tile, scoring: torch.Tensor, begin: int, end: int
    ) -> torch.Tensor:
        """Scores [rows, heads, pages] of the candidates begin..end; -inf for pages that must not be
        read."""
        policy = self._policy
        if tile.prompts is not None:
            return self._votes(layer, tile, tile.prompts, scoring)[..., begin:end]
        mapped = torch.unflatten(policy.map_query(scoring), 0, (tile.seqs, -1))
        pages = tile.page_table[:, begin:end]
        vectors, bias, valid = self._landmarks.get(layer, pages, tile.generations[:, begin:end])
        landmark = Landmark(vectors.to(scoring.dtype), bias)
        scores = policy.score(mapped, landmark)  # [seqs, rows, heads, pages]
        return scores.masked_fill(~valid[:, None, None], float("-inf")).flatten(0, 1)

    def _votes(
        self, layer: int, tile: Tile, prompts: Prompts, scoring: torch.Tensor
    ) -> torch.Tensor:
        """Scores [rows, heads, pages] of all candidates, by the last rows of the prompts."""
        policy, size, device = self._policy, self._size, prompts.pages.device
        count, width = prompts.pages.shape
        keys_each = width * size
        step = max(1, _ELEMENTS // (policy.shape.num_heads * policy.observed * keys_each))
        votes = []
        for begin in range(0, count, step):
            pages, lengths = (own[begin : begin + step] for own in prompts)
            places = lengths[:, None] - torch.arange(policy.observed, 0, -1, device=device)
            known = places.clamp(min=0)
            own, units = pages.gather(1, known // size), self._config.units
            offsets = own % units * size + known % size
            query = self._pool.part(layer, QUERY)[own // units, :, offsets]
            keys = self._pool.read_keys(layer, pages.flatten(), scoring.dtype, units)
            hidden = torch.arange(keys_each, device=device) > places[..., None]
            votes.append(
                policy.vote(
                    query.to(scoring.dtype),
                    torch.unflatten(keys, 0, pages.shape),
                    torch.unflatten(hidden, -1, (width, size)),
                )
            )
        of_pages = torch.cat(votes)  # [seqs, kv_heads, prompt pages]
        candidates = tile.page_table.shape[1]
        beyond = max(0, candidates - width)  # pages of the answer
        of_pages = F.pad(of_pages, (0, beyond), value=float("-inf"))[..., :candidates]
        group = policy.shape.num_heads // of_pages.shape[1]
        return of_pages.repeat_interleave(group, 1).repeat_interleave(len(scoring) // tile.seqs, 0)

    def _pages_by_row(
        self, layer: int, query: torch.Tensor, pages: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Attention inside each selected page. Every row copies the pages it reads.

        query [rows, heads, dim] is scaled; pages [rows, kv_heads, k]. Returns the output before
        division by the sum of weights [rows, heads, k, dim], the log-sum-exp [rows, heads, k] and
        the sum of weights [rows, heads, k].
        """
        rows, _, dim = query.shape
        kv_heads, k = pages.shape[1:]
        key, value = self._slices(layer, self._slice_ids(layer, pages).flatten(), query.dtype)
        own = query.view(rows * kv_heads, 1, -1, dim).expand(-1, k, -1, -1).flatten(0, 1)
        out, *sums = _softmax(own @ key.transpose(1, 2), value)  # [rows * kv_heads * k, group, ...]
        return _by_head((rows, kv_heads, k), out, *sums)

    def _pages_by_page(
        self, layer: int, query: torch.Tensor, pages: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Like `_pages_by_row`, but several rows that read a page share one copy of it.

        (row, page) pairs are sorted by page and split into pieces of equal length. The rows of a
        piece are multiplied together.
        """
        rows, _, dim = query.shape
        kv_heads, k = pages.shape[1:]
        device = pages.device
        order = self._slice_ids(layer, pages).flatten().argsort(stable=True)  # pairs by page
        slices, counts = torch.unique_consecutive(
            self._slice_ids(layer, pages).flatten()[order], return_counts=True
        )
        mean = len(order) / len(slices)
        piece = next((size for size in _PIECES if size >= mean), _PIECES[-1])
        pieces = (counts + piece - 1) // piece
        run = torch.repeat_interleave(torch.arange(len(slices), device=device), counts)
        rank = torch.arange(len(order), device=device) - (counts.cumsum(0) - counts)[run]
        # Pair -> place among pieces; unused places repeat the first pair.
        place = (pieces.cumsum(0) - pieces)[run] * piece + rank
        of_place = torch.zeros(int(pieces.sum()) * piece, dtype=torch.int64, device=device)
        of_place[place] = order
        own = query.view(rows * kv_heads, -1, dim)[of_place // k]  # [places, group, dim]
        group = own.shape[1]
        key, value = self._slices(layer, slices.repeat_interleave(pieces), query.dtype)
        own = own.view(-1, piece * group, dim)
        out, *sums = _softmax(own @ key.transpose(1, 2), value)
        where = torch.empty_like(place)
        where[order] = place
        found = (each.view(-1, group)[where] for each in sums)
        return _by_head((rows, kv_heads, k), out.view(-1, group, dim)[where], *found)

    def _slice_ids(self, layer: int, pages: torch.Tensor) -> torch.Tensor:
        """Indices in the pool of the key slices (page, kv head) of pages [rows, kv_heads, k]."""
        heads = torch.arange(pages.shape[1], device=pages.device)
        return self._pool.slices(layer, pages, heads[:, None], self._config.units)

    def _slices(
        self, layer: int, slices: torch.Tensor, dtype: torch.dtype
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Keys and values of (page, kv head) slices, each [slices, rows, dim] without landmark
        rows."""
        units, real = self._config.units, self._size - self._config.landmark_rows
        both = slices, slices + self._pool.kv_heads(layer) * units
        key, value = (self._pool.read_slices(layer, own, dtype, units)[:, :real] for own in both)
        return key, value

    def _merge(
        self,
        page_out: torch.Tensor,  # [rows, heads, k, dim], not yet divided by totals
        page_lse: torch.Tensor,  # [rows, heads, k]
        totals: torch.Tensor,  # [rows, heads, k]
        scores: torch.Tensor,  # [rows, heads, k], -inf where there is no page
        window_out: torch.Tensor,  # [rows, heads, dim]
        window_lse: torch.Tensor,  # [rows, heads]
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """The merged output, the weights of the pages, and the weight of the window."""
        mass = scores
        if self._config.fusion == "lse":
            mass = page_lse.masked_fill(scores == float("-inf"), float("-inf"))
        splits = [mass, window_lse[..., None]]
        if self._config.null_split:
            splits.append(torch.zeros_like(window_lse)[..., None])
        weights = torch.cat(splits, -1).softmax(-1)
        k = scores.shape[-1]
        page_weights, window_weight = weights[..., :k], weights[..., k]
        out = ((page_weights / totals)[..., None, :] @ page_out).squeeze(-2)
        return out + window_weight[..., None] * window_out, page_weights, window_weight


def _softmax(
    scores: torch.Tensor, value: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """The output before division by the sum of weights, the log-sum-exp, and the sum of weights.

    scores [..., rows, keys] are overwritten; value [..., keys, dim]. Every row must see some key.
    """
    most = scores.amax(-1)
    shares = scores.sub_(most[..., None]).exp_()
    total = shares.sum(-1)
    return shares @ value, most + total.log(), total


def _by_head(
    size: tuple[int, int, int], *parts: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Reshape output and both sums from [rows * kv_heads * k, group, ...] to [rows, heads, k, ...].

    `size` is (rows, kv_heads, k).
    """
    out, lse, totals = (
        part.view(*size, *part.shape[1:]).transpose(2, 3).flatten(1, 2) for part in parts
    )
    return out, lse, totals
