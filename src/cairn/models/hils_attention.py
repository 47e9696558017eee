"""Attention of a HiLS layer: ordinary queries, keys and values, and a query that scores pages."""

from __future__ import annotations

import torch

from cairn.attention.batch import Scoring
from cairn.models.interface import Attend
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
        self.qkv_proj = Linear(spec.dims.hidden_size, parts, factory)
        self.o_proj = Linear(width, {"o_proj": spec.dims.hidden_size}, factory)
        self.q_norm = _norm(own.qk_norm, dim, width, own.hils.norm_eps, factory)
        self.k_norm = _norm(own.qk_norm, dim, kv_width, own.hils.norm_eps, factory)
        rank = self._hils.calibration
        self.lmk_q_proj: Linear | list[Linear] | None = None
        if rank is not None:
            self.lmk_q_norm = _norm(self._hils.norm_scoring, dim, width, own.hils.norm_eps, factory)
            if rank == 0:
                self.lmk_q_proj = Linear(spec.dims.hidden_size, {"lmk_q_proj": width}, factory)
            else:
                self.lmk_q_proj = [
                    Linear(spec.dims.hidden_size, {"down": rank}, factory),
                    Linear(rank, {"up": width}, factory),
                ]
        if self._hils.shared_prior:
            self.q_c = Parameter((spec.dims.num_heads, dim), factory)

    def __call__(self, x: torch.Tensor, cos_sin: CosSin | None, attend: Attend) -> torch.Tensor:
        rows, dim = x.shape[0], self._head_dim
        qkv = self.qkv_proj(x)
        width, kv_width = self._heads * dim, self._kv_heads * dim
        query, key, value = torch.split(qkv, [width, kv_width, kv_width], dim=-1)
        scoring = None
        if self.lmk_q_proj is not None:
            scoring = self._heads_normed(
                self.lmk_q_norm, self._calibrated(x, query), self._hils.norm_scoring
            )
        query = self._heads_normed(self.q_norm, query, self._qk_norm)
        key = self._heads_normed(self.k_norm, key, self._qk_norm)
        prior = self.q_c.weight.expand(rows, -1, -1) if self._hils.shared_prior else None
        if cos_sin is not None:
            query, key = rotate(query, *cos_sin), rotate(key, *cos_sin)
            scoring = None if scoring is None else rotate(scoring, *cos_sin)
            prior = None if prior is None else rotate(prior, *cos_sin)
        scoring = query if scoring is None else scoring
        key_value = torch.cat((key, value.view(rows, -1, dim)), 1)
        scores_with = Scoring(scoring, scoring if prior is None else prior)
        attended = attend(self._layer, query, key_value, scores_with)
        return self.o_proj(attended.reshape(rows, -1))

    def _calibrated(self, x: torch.Tensor, query: torch.Tensor) -> torch.Tensor:
        """The scoring query before its norm."""
        if isinstance(self.lmk_q_proj, list):
            down, up = self.lmk_q_proj
            return up(down(x)) + query
        assert self.lmk_q_proj is not None
        return self.lmk_q_proj(x)

    def _heads_normed(self, norm: RMSNorm, x: torch.Tensor, kind: QKNorm) -> torch.Tensor:
        """[rows, heads * dim] -> [rows, heads, dim]"""
        heads = (x.shape[0], -1, self._head_dim)
        if kind == "head":
            return norm(x.reshape(heads))
        return norm(x.contiguous()).view(heads)


def _norm(kind: QKNorm, head_dim: int, width: int, eps: float, factory: Factory) -> RMSNorm:
    return RMSNorm(head_dim if kind == "head" else width, eps, factory, round_last=True)
