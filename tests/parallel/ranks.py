"""Engines on one rank and on two, and policies that go wrong on one of them."""

from __future__ import annotations

import multiprocessing
from pathlib import Path
from typing import Any

import torch

from cairn import LLM
from cairn.engine.engine import Engine
from cairn.engine.parallel.lead_runner import LeadRunner
from cairn.sparsity.mean import MeanPolicy
from cairn.sparsity.policy import Landmark
from tests.engine.tiered import PAGE

SPARSE = {"attention_backend": "hsa", "hsa_topk": 2, "hsa_window": 20, "hsa_sinks": 1}
SPARSE |= {"hsa_prefill": "sparse"}


def load(folder: Path, tp: int, **options: Any) -> LLM:
    return LLM(folder, device="cpu", tp=tp, **{"kv_cache_gib": 0.05, "page_size": PAGE, **options})


def lead(engine: Engine) -> LeadRunner:
    assert isinstance(engine.runner, LeadRunner)
    return engine.runner


def in_step(engine: Engine) -> None:
    """The books balance, and every rank has the tables, generations and tokens of rank 0."""
    engine.scheduler.check()
    engine.runner.check()


class FailsOnRankOne(MeanPolicy):
    """A user's policy that cannot do the third page, and only on one rank."""

    def landmark(self, keys: torch.Tensor, prior: torch.Tensor | None) -> Landmark:
        # Beyond the two pages of zeros it is tried on.
        if multiprocessing.current_process().name == "cairn-rank-1" and keys.abs().sum() > 0:
            raise ArithmeticError("this page is too much for me")
        return super().landmark(keys, prior)


class FailsOnRankZero(MeanPolicy):
    def landmark(self, keys: torch.Tensor, prior: torch.Tensor | None) -> Landmark:
        if multiprocessing.current_process().name != "cairn-rank-1" and keys.abs().sum() > 0:
            raise ArithmeticError("rank 0 cannot do it")
        return super().landmark(keys, prior)


class FailsWhileLoading(MeanPolicy):
    def __init__(self, shape: Any) -> None:
        super().__init__(shape)
        if multiprocessing.current_process().name == "cairn-rank-1":
            raise ArithmeticError("not on this rank")
