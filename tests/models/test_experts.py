"""Routing and experts as functions on tensors, against their definition one row at a time."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import product
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from cairn.kernels.cpu import CpuKernels
from cairn.kernels.interface import Routing
from cairn.models.experts import ExpertWeights, experts, route
from cairn.models.module import Factory

CPU = torch.float32, torch.device("cpu")
EXPERTS = 12


def chosen_by_definition(
    logits: list[float], bias: list[float], options: Routing
) -> list[tuple[int, float]]:
    """(expert, weight), best first, in Python numbers."""
    row = torch.tensor(logits, dtype=torch.float64)
    sigmoid = options.scoring == "sigmoid"
    scores = (row.sigmoid() if sigmoid else row.softmax(0)).tolist()
    ranks = {e: scores[e] + bias[e] for e in range(len(scores))}
    size = len(scores) // options.groups
    if options.groups > 1:
        runs = [list(range(g * size, (g + 1) * size)) for g in range(options.groups)]
        best = [sum(sorted(ranks[e] for e in run)[-2 if sigmoid else -1 :]) for run in runs]
        order = sorted(range(options.groups), key=lambda g: (-best[g], g))
        ranks = {e: ranks[e] for g in order[: options.kept_groups] for e in runs[g]}
    picked = sorted(ranks, key=lambda e: (-ranks[e], e))[: options.per_token]
    total = sum(scores[e] for e in picked) if options.normalize else 1.0
    return [(e, scores[e] / total * options.scale) for e in picked]


def all_options() -> Iterator[Routing]:
    kinds: tuple[Any, ...] = ("softmax", "sigmoid")
    for scoring, (groups, kept), normalize, per_token in product(
        kinds, ((1, 1), (3, 2), (4, 2), (6, 5)), (False, True), (1, 4)
    ):
        yield Routing(
            EXPERTS, per_token, scoring, groups, kept, normalize, 2.5, scoring == "sigmoid"
        )


@pytest.mark.parametrize("options", [*all_options()], ids=str)
def test_routing_follows_its_definition(options: Routing) -> None:
    logits = torch.randn(20, EXPERTS, dtype=torch.float64) * 2
    # Coarse numbers tie often; biases far below zero must not let dropped groups win.
    logits[10:] = logits[10:].round()
    bias = (torch.randn(EXPERTS, dtype=torch.float64) * 0.3 - 0.8) if options.has_bias else None
    weights, ids = route(logits, bias, options)
    assert ids.dtype == torch.int32
    for row, values, picked in zip(logits.tolist(), weights.tolist(), ids.tolist(), strict=True):
        own = bias.tolist() if bias is not None else [0.0] * EXPERTS
        expected = chosen_by_definition(row, own, options)
        assert picked == [expert for expert, _ in expected]
        assert values == pytest.approx([weight for _, weight in expected], rel=1e-12)


def test_of_equal_experts_and_groups_the_lower_wins() -> None:
    _, ids = route(torch.zeros(2, EXPERTS), None, Routing(EXPERTS, 3, "softmax", 4, 2))
    assert ids.tolist() == [[0, 1, 2]] * 2


@pytest.mark.parametrize("rows", [1, 2, 7, 40])
@pytest.mark.parametrize(("hidden", "inter"), [(10, 6), (48, 24), (30, 48)])
def test_experts_are_the_weighted_sum_and_others_are_not_read(
    rows: int, hidden: int, inter: int
) -> None:
    chosen_from, k = [0, 2, 3, 7, 8], 3
    gate_up = torch.full((EXPERTS, 2 * inter, hidden), float("nan"), dtype=torch.float64)
    down = torch.full((EXPERTS, hidden, inter), float("nan"), dtype=torch.float64)
    gate_up[chosen_from] = torch.randn(5, 2 * inter, hidden, dtype=torch.float64)
    down[chosen_from] = torch.randn(5, hidden, inter, dtype=torch.float64)
    x = torch.randn(rows, hidden, dtype=torch.float64)
    weights = torch.rand(rows, k)
    ids = torch.stack([torch.tensor(chosen_from)[torch.randperm(5)[:k]] for _ in range(rows)])
    ids[0, 0] = -1
    expected = torch.zeros_like(x)
    for row, slot in product(range(rows), range(k)):
        e = int(ids[row, slot])
        if e >= 0:
            gate, up = (gate_up[e] @ x[row]).chunk(2)
            expected[row] += weights[row, slot].double() * (down[e] @ (F.silu(gate) * up))
    found = experts(x, ids.int(), weights, gate_up, down)
    torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_kernel_equals_torch_in_any_batch(dtype: torch.dtype, kernels: CpuKernels) -> None:
    hidden, inter, k, draw = 40, 24, 3, torch.Generator().manual_seed(0)
    gate_up = torch.randn(EXPERTS, 2 * inter, hidden, generator=draw).to(dtype)
    down = torch.randn(EXPERTS, hidden, inter, generator=draw).to(dtype)
    gate_up[1] = down[1] = float("nan")  # nobody chooses it
    x, weights = torch.randn(40, hidden, generator=draw), torch.rand(40, k, generator=draw)
    ids = torch.rand(40, EXPERTS - 2, generator=draw).argsort(1)[:, :k].int() + 2
    ids[0, 1], ids[5] = -1, -1
    expected = experts(x, ids, weights, gate_up.float(), down.float())
    found = {}
    for own in (kernels, None):
        layer = ExpertWeights(hidden, inter, EXPERTS, Factory(*CPU, keep=True, cpu=own))
        for (_, slot, _), whole in zip(layer.joint_slots(""), (gate_up, down), strict=True):
            slot.write(whole)
        found[own] = layer(x, ids, weights)
        torch.testing.assert_close(found[own], expected, rtol=1e-4, atol=1e-4)
        if own is not None:
            assert torch.equal(layer(x[7:9], ids[7:9], weights[7:9]), found[own][7:9])
            assert torch.equal(layer(x[:1], ids[:1], weights[:1]), found[own][:1])
    assert not torch.equal(found[kernels], found[None])
