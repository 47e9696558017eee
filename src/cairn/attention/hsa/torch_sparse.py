"""Sparse attention in plain torch: exact, on any device, the reference for every kernel.

Every part is a split (output, log-sum-exp) of the past. The window is one split, each selected
page is another, and softmax1 adds an empty one; a softmax over their log-sum-exps, or over the
landmark scores that stand for them, merges the outputs.
"""

from __future__ import annotations

import torch

from cairn.attention.hsa.metadata import Tile
from cairn.memory.kv_pool import KVPool
from cairn.memory.landmarks import LandmarkPool
from cairn.sparsity.config import SparseConfig
from cairn.sparsity.policy import Landmark
from cairn.sparsity.selection import Selection, select

_GATHER_ELEMENTS = 2**23  # of K or V copied at once for selected pages


class TorchSparse:
    """Attention of one tile of one layer."""

    def __init__(
        self, config: SparseConfig, pool: KVPool, landmarks: LandmarkPool, scale: float
    ) -> None:
        self._config = config
        self._pool = pool
        self._landmarks = landmarks
        self._scale = scale

    def forward(
        self, layer: int, tile: Tile, query: torch.Tensor, scoring: torch.Tensor
    ) -> tuple[torch.Tensor, Selection | None]:
        """query, scoring [rows, heads, dim] of the tile, in float32 or wider.

        The selection comes back for the rows that are traced.
        """
        out, lse = self._window(layer, tile, query)
        rows, heads = lse.shape
        if tile.page_table.shape[1] == 0:
            weight = lse.sigmoid() if self._config.null_split else torch.ones_like(lse)
            out = out * weight[..., None]
            if tile.traced is None:
                return out, None
            kv_heads, k = self._pool.kv_heads, self._config.topk
            none = tile.rows.new_full((len(tile.traced), kv_heads, k), -1)
            scores = lse.new_full((len(tile.traced), heads, k), float("-inf"))
            picked = (lse[tile.traced], weight[tile.traced])
            return out, Selection(none, none, scores, scores.exp(), *picked)
        index, scores = self._select(layer, tile, scoring, lse)
        per_seq = rows // tile.seqs
        owner = torch.arange(rows, device=index.device) // per_seq
        page_ids = tile.page_table[owner[:, None, None], index.clamp(min=0)]
        # Empty places read the row's own page, with weight zero: nothing unowned is touched.
        readable = torch.where(index < 0, tile.own_pages[:, None, None], page_ids)
        merged, weights, window_weight = [], [], []
        page_elements = self._pool.kv_heads * index.shape[2] * self._pool.page_size
        step = max(1, _GATHER_ELEMENTS // (page_elements * query.shape[2]))
        for begin in range(0, rows, step):
            part = slice(begin, begin + step)
            mixed = self._merge(
                layer, query[part], readable[part], scores[part], out[part], lse[part]
            )
            for collected, value in zip((merged, weights, window_weight), mixed, strict=True):
                collected.append(value)
        out = torch.cat(merged)
        if tile.traced is None:
            return out, None
        traced = tile.traced
        return out, Selection(
            page_ids=torch.where(index < 0, -1, page_ids)[traced],
            page_index=index[traced],
            scores=scores[traced],
            weights=torch.cat(weights)[traced],
            window_lse=lse[traced],
            window_weight=torch.cat(window_weight)[traced],
        )

    def _window(
        self, layer: int, tile: Tile, query: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """-> output [rows, heads, dim] and log-sum-exp [rows, heads] over the window."""
        rows, heads, dim = query.shape
        kv_heads, blocks = self._pool.kv_heads, tile.blocks
        count, group = rows // blocks, heads // kv_heads
        both = self._pool.layers[layer][tile.window_pages]  # [blocks, pages, 2 * kv_heads, size, d]
        both = both.to(query.dtype).transpose(1, 2).flatten(2, 3)  # [blocks, 2 * kv_heads, keys, d]
        key, value = both[:, :kv_heads], both[:, kv_heads:]
        # [blocks, kv_heads, group * count, dim]
        own = query.view(blocks, count, kv_heads, group, dim).permute(0, 2, 3, 1, 4)
        scores = own.flatten(2, 3) @ key.transpose(2, 3)
        scores = scores.unflatten(2, (group, count)) * self._scale
        scores = scores.masked_fill(tile.hidden[:, None, None], float("-inf"))
        lse = scores.logsumexp(-1, keepdim=True)  # [blocks, kv_heads, group, count, 1]
        out = (scores - lse).exp().flatten(2, 3) @ value
        out = out.unflatten(2, (group, count)).permute(0, 3, 1, 2, 4)
        return out.reshape(rows, heads, dim), lse[..., 0].permute(0, 3, 1, 2).reshape(rows, heads)

    def _select(
        self, layer: int, tile: Tile, scoring: torch.Tensor, lse: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Places of the selected pages [rows, kv_heads, k], and their scores [rows, heads, k]."""
        config = self._config
        mapped = config.policy.map_query(scoring).unflatten(0, (tile.seqs, -1))

        def score(begin: int, end: int) -> torch.Tensor:
            pages = tile.page_table[:, begin:end]
            vectors, bias, valid = self._landmarks.get(layer, pages, tile.generations[:, begin:end])
            landmark = Landmark(vectors.to(scoring.dtype), bias)
            scores = config.policy.score(mapped, landmark)  # [seqs, rows, heads, pages]
            return scores.masked_fill(~valid[:, None, None], float("-inf")).flatten(0, 1)

        return select(
            score,
            tile.limits,
            tile.page_table.shape[1],
            lse,
            kv_heads=self._pool.kv_heads,
            topk=config.topk,
            strategy=config.strategy,
            sinks=config.sinks,
        )

    def _merge(
        self,
        layer: int,
        query: torch.Tensor,  # [rows, heads, dim]
        pages: torch.Tensor,  # [rows, kv_heads, k]
        scores: torch.Tensor,  # [rows, heads, k]
        window_out: torch.Tensor,  # [rows, heads, dim]
        window_lse: torch.Tensor,  # [rows, heads]
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Attend inside the selected pages and merge: output, weights of pages and of the window."""
        rows, heads, dim = query.shape
        kv_heads, k = pages.shape[1:]
        pool, size = self._pool.layers[layer], self._pool.page_size
        real = size - self._config.landmark_rows
        flat = pool.view(-1, size, dim)  # (page, head) slices
        slices = pages * (2 * kv_heads) + torch.arange(kv_heads, device=pages.device)[:, None]
        key = flat[slices.flatten()].view(rows, kv_heads, k, size, dim)[..., :real, :]
        value = flat[(slices + kv_heads).flatten()].view(rows, kv_heads, k, size, dim)
        own = query.view(rows, kv_heads, -1, dim)
        inside = own @ key.to(query.dtype).flatten(2, 3).transpose(2, 3) * self._scale
        inside = inside.unflatten(-1, (k, real)).view(rows, heads, k, real)
        page_lse = inside.logsumexp(-1)  # [rows, heads, k]
        mass = scores
        if self._config.fusion == "lse":
            mass = page_lse.masked_fill(scores == float("-inf"), float("-inf"))
        splits = [mass, window_lse[..., None]]
        if self._config.null_split:
            splits.append(torch.zeros_like(window_lse)[..., None])
        weights = torch.cat(splits, -1).softmax(-1)
        page_weights, window_weight = weights[..., :k], weights[..., k]
        inside = (inside - page_lse[..., None]).exp() * page_weights[..., None]
        inside = inside.flatten(2).view(rows, kv_heads, -1, k * real)
        out = inside @ value[..., :real, :].to(query.dtype).flatten(2, 3)
        out = out.view(rows, heads, dim) + window_weight[..., None] * window_out
        return out, page_weights, window_weight
