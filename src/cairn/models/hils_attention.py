"""Attention of a HiLS layer: ordinary queries, keys and values, and a query that scores pages."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from cairn.attention.attend import Attend
from cairn.attention.batch import Scoring
from cairn.kernels.interface import ScoringHeads
from cairn.models.decoder import SelfAttention
from cairn.models.layers import Linear, Parameter, RMSNorm
from cairn.models.module import Factory
from cairn.models.rope import CosSin, Rotation, rotate
from cairn.models.spec import DecoderSpec, QKNorm

_NORM_EPS = 1e-6  # of queries, keys and scoring queries, whatever rms_norm_eps says


@dataclass(frozen=True, slots=True)
class ScoringSpec:
    """How a layer makes the query that scores landmarks."""

    calibration: int | None
    """Rank of what is added to the query for scoring; 0 for a full matrix in its place, None to
    score with the query itself."""
    norm: QKNorm
    shared_prior: bool
    """One learned query per head pools all landmarks, instead of each landmark row's own."""


class HiLSAttention(SelfAttention):
    def __init__(
        self, spec: DecoderSpec, layer: int, factory: Factory, scoring: ScoringSpec
    ) -> None:
        own, dim = spec.layers[layer], spec.dims.head_dim
        width, rank = spec.dims.num_heads * dim, scoring.calibration
        parts = {}
        if rank is not None:
            # The scoring query's projection reads the same rows, so it is part of the same product.
            parts["lmk_q_proj.0" if rank else "lmk_q_proj"] = rank or width
        # The narrow projection is whole on every rank.
        whole = ("lmk_q_proj.0",)
        super().__init__(spec, layer, factory, more_parts=parts, whole=whole, norm_eps=_NORM_EPS)
        self._scoring = scoring
        if rank is not None:
            split = scoring.norm == "layer"
            norm_dim = width if split else dim
            self.lmk_q_norm = RMSNorm(norm_dim, _NORM_EPS, factory, round_last=True, split=split)
        self.lmk_q_up: Linear | None = None
        if rank:
            self.lmk_q_up = Linear(rank, {"lmk_q_proj.1": width}, factory, split="out")
        if scoring.shared_prior:
            self.q_c = Parameter((spec.dims.num_heads, dim), factory, split=True)
        per_head = own.qk_norm == "head" and (rank is None or scoring.norm == "head")
        self._fused = factory.fused and per_head and not scoring.shared_prior
        if own.rope is not None:
            self.rotation = Rotation(own.rope, dim)

    def _attend_fused(self, qkv: torch.Tensor, cos_sin: CosSin, attend: Attend) -> torch.Tensor:
        scoring = None
        if self._scoring.calibration is not None:
            rest = qkv[:, sum(self._widths[:3]) :]
            added = rest if self.lmk_q_up is None else self.lmk_q_up(rest)
            scoring = ScoringHeads(added, self.lmk_q_up is not None, self.lmk_q_norm.weight)
        weights = (self.q_norm.weight, self.k_norm.weight, self.q_norm.eps)
        query, scored = attend.write_rotated(
            self._layer, qkv, self._heads, cos_sin, weights, scoring
        )
        return attend.forward(self._layer, query, Scoring(scored, scored))

    def _attend(self, qkv: torch.Tensor, cos_sin: CosSin | None, attend: Attend) -> torch.Tensor:
        rows = len(qkv)
        query, key, value, *rest = torch.split(qkv, self._widths, dim=-1)
        scoring = None
        if rest:
            raw = rest[0] if self.lmk_q_up is None else self.lmk_q_up(rest[0]) + query
            scoring = self._heads_normed(self.lmk_q_norm, raw, self._scoring.norm)
        query = self._heads_normed(self.q_norm, query, self._qk_norm)
        key = self._heads_normed(self.k_norm, key, self._qk_norm)
        prior = self.q_c.weight.expand(rows, -1, -1) if self._scoring.shared_prior else None
        if cos_sin is not None:
            query, key = rotate(query, *cos_sin), rotate(key, *cos_sin)
            scoring = None if scoring is None else rotate(scoring, *cos_sin)
            prior = None if prior is None else rotate(prior, *cos_sin)
        scoring = query if scoring is None else scoring
        key_value = torch.cat((key, value.reshape(rows, -1, self._head_dim)), 1)
        scores_with = Scoring(scoring, scoring if prior is None else prior)
        return attend(self._layer, query, key_value, scores_with)

    def _heads_normed(self, norm: RMSNorm, x: torch.Tensor, kind: QKNorm) -> torch.Tensor:
        """[rows, heads * dim] -> [rows, heads, dim]"""
        heads = (len(x), -1, self._head_dim)
        return norm(x.reshape(heads)) if kind == "head" else norm(x.contiguous()).view(heads)
