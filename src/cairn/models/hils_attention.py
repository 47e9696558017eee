"""Attention of a HiLS layer: ordinary queries, keys and values, and a query that scores pages."""

from __future__ import annotations

import torch

from cairn.attention.attend import Attend
from cairn.attention.batch import Scoring
from cairn.kernels.interface import ScoringHeads
from cairn.models.layers import Factory, Linear, Parameter, RMSNorm
from cairn.models.module import Module
from cairn.models.rope import rotate
from cairn.models.spec import DecoderSpec, HiLSSpec, QKNorm

CosSin = tuple[torch.Tensor, torch.Tensor]


class HiLSAttention(Module):
    def __init__(self, spec: DecoderSpec, layer: int, factory: Factory) -> None:
        own = spec.layers[layer]
        assert own.hils is not None
        self._layer = layer
        self._head_dim = dim = spec.dims.head_dim
        self._heads, self._kv_heads = spec.dims.num_heads, spec.dims.num_kv_heads
        self._hils: HiLSSpec = own.hils
        self._qk_norm: QKNorm = own.qk_norm
        width, kv_width = spec.dims.num_heads * dim, spec.dims.num_kv_heads * dim
        parts = {"q_proj": width, "k_proj": kv_width, "v_proj": kv_width}
        rank = own.hils.calibration
        if rank is not None:
            # The scoring query's projection reads the same rows, so it is part of the same product.
            parts["lmk_q_proj.0" if rank else "lmk_q_proj"] = rank or width
        self._splits = list(parts.values())
        # What is few columns wide is on every rank.
        self.qkv_proj = Linear(
            spec.dims.hidden_size, parts, factory, split="out", whole=("lmk_q_proj.0",)
        )
        self.o_proj = Linear(width, {"o_proj": spec.dims.hidden_size}, factory, split="in")
        self.q_norm = _norm(own.qk_norm, dim, width, own.hils.norm_eps, factory)
        self.k_norm = _norm(own.qk_norm, dim, kv_width, own.hils.norm_eps, factory)
        if rank is not None:
            self.lmk_q_norm = _norm(self._hils.norm_scoring, dim, width, own.hils.norm_eps, factory)
        self.lmk_q_up: Linear | None = None
        if rank:
            self.lmk_q_up = Linear(rank, {"lmk_q_proj.1": width}, factory, split="out")
        if self._hils.shared_prior:
            self.q_c = Parameter((spec.dims.num_heads, dim), factory, split=True)
        per_head = own.qk_norm == "head" and (rank is None or own.hils.norm_scoring == "head")
        self._fused = factory.fused and per_head and not self._hils.shared_prior
        self._parallel = factory.parallel

    def __call__(
        self,
        x: torch.Tensor,
        cos_sin: CosSin | None,
        attend: Attend,
        *,
        norm: RMSNorm | None = None,
        add_to: torch.Tensor | None = None,
    ) -> torch.Tensor:
        projected = self.qkv_proj(x, norm=norm)
        if self._fused and cos_sin is not None:
            attended = self._attend_fused(projected, cos_sin, attend)
        else:
            attended = self._attend(projected, cos_sin, attend)
        out = self.o_proj(attended.reshape(x.shape[0], -1), add_to=add_to)
        return self._parallel.sum(out)

    def _attend_fused(
        self, projected: torch.Tensor, cos_sin: CosSin, attend: Attend
    ) -> torch.Tensor:
        """Norms of heads, rotation and the write of keys and values in one kernel."""
        scoring = None
        if self._hils.calibration is not None:
            rest = projected[:, sum(self._splits[:3]) :]
            added = rest if self.lmk_q_up is None else self.lmk_q_up(rest)
            scoring = ScoringHeads(added, self.lmk_q_up is not None, self.lmk_q_norm.weight)
        weights = (self.q_norm.weight, self.k_norm.weight, self.q_norm.eps)
        query, scored = attend.write_rotated(
            self._layer, projected, self._heads, cos_sin, weights, scoring
        )
        return attend.forward(self._layer, query, Scoring(scored, scored))

    def _attend(
        self, projected: torch.Tensor, cos_sin: CosSin | None, attend: Attend
    ) -> torch.Tensor:
        rows, dim = projected.shape[0], self._head_dim
        query, key, value, *rest = torch.split(projected, self._splits, dim=-1)
        scoring = None
        if rest:
            raw = rest[0] if self.lmk_q_up is None else self.lmk_q_up(rest[0]) + query
            scoring = self._heads_normed(self.lmk_q_norm, raw, self._hils.norm_scoring)
        query = self._heads_normed(self.q_norm, query, self._qk_norm)
        key = self._heads_normed(self.k_norm, key, self._qk_norm)
        prior = self.q_c.weight.expand(rows, -1, -1) if self._hils.shared_prior else None
        if cos_sin is not None:
            query, key = rotate(query, *cos_sin), rotate(key, *cos_sin)
            scoring = None if scoring is None else rotate(scoring, *cos_sin)
            prior = None if prior is None else rotate(prior, *cos_sin)
        scoring = query if scoring is None else scoring
        key_value = torch.cat((key, value.reshape(rows, -1, dim)), 1)
        scores_with = Scoring(scoring, scoring if prior is None else prior)
        return attend(self._layer, query, key_value, scores_with)

    def _heads_normed(self, norm: RMSNorm, x: torch.Tensor, kind: QKNorm) -> torch.Tensor:
        """[rows, heads * dim] -> [rows, heads, dim]"""
        heads = (x.shape[0], -1, self._head_dim)
        if kind == "head":
            return norm(x.reshape(heads))
        return norm(x.contiguous()).view(heads)


def _norm(kind: QKNorm, head_dim: int, width: int, eps: float, factory: Factory) -> RMSNorm:
    if kind == "head":
        return RMSNorm(head_dim, eps, factory, round_last=True)
    return RMSNorm(width, eps, factory, round_last=True, split=True)
