"""Routing and experts as functions on tensors, against their definition one row at a time."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import product
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from cairn.kernels.interface import Routing
from cairn.models.experts import experts, route

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
