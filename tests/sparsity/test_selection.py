"""Page selection against a loop over rows, heads and pages, with many equal scores."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import get_args

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from cairn.sparsity.policy import Strategy
from cairn.sparsity.selection import Selection, select, top_positions

NONE = float("-inf")
STRATEGIES: tuple[Strategy, ...] = get_args(Strategy)


@dataclass(frozen=True)
class Case:
    scores: torch.Tensor  # [rows, heads, pages], small whole numbers, -inf where forbidden
    limits: torch.Tensor  # [rows]
    window_lse: torch.Tensor  # [rows, heads]
    kv_heads: int
    topk: int
    strategy: Strategy
    sinks: int
    top_p: float | None = None

    def select(self, block: int = 4096) -> tuple[torch.Tensor, torch.Tensor]:
        return select(
            lambda begin, end: self.scores[..., begin:end].clone(),
            self.limits,
            self.scores.shape[-1],
            self.window_lse,
            kv_heads=self.kv_heads,
            topk=self.topk,
            strategy=self.strategy,
            sinks=self.sinks,
            top_p=self.top_p,
            block=block,
        )

    def pages(self, row: int, kv_head: int) -> list[int]:
        """By definition: pages in the order of their rank, then of their place."""
        heads = self.heads_of(kv_head)
        scores: list[list[float]] = self.scores[row, heads].tolist()
        limit = int(self.limits[row])
        allowed = [page for page in range(limit) if scores[0][page] > NONE]

        def rank(page: int) -> float:
            if page < self.sinks:
                return math.inf
            own = [of_head[page] for of_head in scores]
            if self.strategy == "group":
                return sum(own)
            if self.strategy == "head" or len(own) == 1:
                return max(own)
            shares = []
            for head, of_head in zip(range(heads.start, heads.stop), scores, strict=True):
                whole = math.exp(self.window_lse[row, head].item())
                whole += sum(math.exp(of_head[other]) for other in allowed)
                shares.append(math.exp(of_head[page]) / whole)
            return max(shares)

        ranked = sorted(allowed, key=lambda page: (-rank(page), page))[: self.topk]
        if self.top_p is None:
            return sorted(ranked)
        near = [math.exp(lse) for lse in self.window_lse[row, heads].tolist()]
        whole = [
            own + sum(math.exp(of_head[page]) for page in allowed)
            for own, of_head in zip(near, scores, strict=True)
        ]
        taken: list[int] = []
        for page in ranked:
            held = [
                own + sum(math.exp(of_head[other]) for other in taken)
                for own, of_head in zip(near, scores, strict=True)
            ]
            enough = all(a >= self.top_p * b for a, b in zip(held, whole, strict=True))
            if page < self.sinks or not enough:
                taken.append(page)
        return sorted(taken)

    def heads_of(self, kv_head: int) -> slice:
        group = self.scores.shape[1] // self.kv_heads
        return slice(kv_head * group, (kv_head + 1) * group)


@st.composite
def cases(draw: Callable[..., int]) -> Case:
    rows, kv_heads, group = (draw(st.integers(1, 3)) for _ in range(3))
    pages = draw(st.integers(1, 14))
    heads = kv_heads * group
    random = torch.Generator().manual_seed(draw(st.integers(0, 2**31)))
    scores = torch.randint(-2, 3, (rows, heads, pages), generator=random).double()
    forbidden = torch.rand(rows, 1, pages, generator=random) < draw(st.sampled_from([0, 0.3]))
    return Case(
        scores=scores.masked_fill(forbidden, NONE),
        limits=torch.randint(0, pages + 1, (rows,), generator=random),
        # Not whole, so that shares of different heads are equal only by chance.
        window_lse=4 * torch.randn(rows, heads, generator=random, dtype=torch.float64),
        kv_heads=kv_heads,
        topk=draw(st.integers(1, 16)),
        strategy=STRATEGIES[draw(st.integers(0, len(STRATEGIES) - 1))],
        sinks=draw(st.integers(0, 4)),
        # Not round, so that no sum of shares equals it.
        top_p=[None, None, 0.4999999, 0.8999999][draw(st.integers(0, 3))],
    )


def one_head(scores: list[float], topk: int, sinks: int = 0) -> Case:
    return Case(
        scores=torch.tensor([[scores]]),
        limits=torch.tensor([len(scores)]),
        window_lse=torch.zeros(1, 1),
        kv_heads=1,
        topk=topk,
        strategy="head",
        sinks=sinks,
    )


@given(case=cases())
def test_select_equals_the_loop(case: Case) -> None:
    index, scores = case.select()
    rows, heads, _ = case.scores.shape
    assert index.shape == (rows, case.kv_heads, case.topk)
    assert scores.shape == (rows, heads, case.topk)
    for row in range(rows):
        for kv_head in range(case.kv_heads):
            expected = case.pages(row, kv_head)
            padding = case.topk - len(expected)
            assert index[row, kv_head].tolist() == expected + [-1] * padding
            own = case.heads_of(kv_head)
            for of_head, chosen in zip(case.scores[row, own], scores[row, own], strict=True):
                assert chosen.tolist() == of_head[expected].tolist() + [NONE] * padding


@given(case=cases())
def test_what_is_selected_is_ascending_allowed_and_as_much_as_there_is(case: Case) -> None:
    index, _ = case.select()
    for row in range(len(index)):
        allowed = {
            page
            for page in range(int(case.limits[row]))
            if bool((case.scores[row, :, page] > NONE).all())
        }
        for pages in index[row].tolist():
            chosen = [page for page in pages if page >= 0]
            assert pages == chosen + [-1] * (case.topk - len(chosen))
            assert chosen == sorted(set(chosen))
            assert set(chosen) <= allowed
            if case.top_p is None:
                assert len(chosen) == min(case.topk, len(allowed))
            sinks = sorted(page for page in allowed if page < case.sinks)
            assert set(sinks[: case.topk]) <= set(chosen)


@pytest.mark.parametrize("block", [1, 3, 7])
@given(case=cases())
def test_scoring_in_blocks_changes_nothing(block: int, case: Case) -> None:
    index, scores = case.select()
    in_blocks, their_scores = case.select(block)
    assert torch.equal(index, in_blocks)
    assert torch.equal(scores, their_scores)


@pytest.mark.parametrize("block", [1, 2, 100])
@pytest.mark.parametrize(
    ("scores", "topk", "sinks", "pages"),
    [
        ([1.0, 5.0, 3.0, 4.0], 2, 0, [1, 3]),
        ([1.0, 1.0, 1.0, 1.0], 2, 0, [0, 1]),
        ([1.0, 2.0, 1.0, 1.0], 2, 0, [0, 1]),
        ([0.0, 1.0, 1.0, 2.0], 2, 0, [1, 3]),
        ([1.0, 5.0, 3.0, 4.0], 2, 1, [0, 1]),
        ([1.0, 0.0, 3.0, 4.0], 2, 2, [0, 1]),
        ([1.0, 0.0, 3.0, 4.0], 2, 3, [0, 1]),
        ([NONE, 0.0, 3.0, 4.0], 2, 1, [2, 3]),
        ([NONE, 0.0, NONE, 4.0], 3, 1, [1, 3, -1]),
        ([NONE, NONE], 2, 2, [-1, -1]),
        ([7.0], 3, 0, [0, -1, -1]),
    ],
    ids=[
        "best", "all-equal", "equal-and-better", "later-better", "a-sink", "only-sinks",
        "more-sinks-than-room", "forbidden-sink", "fewer-than-k", "none", "one",
    ],
)  # fmt: skip
def test_single_cases(
    scores: list[float], topk: int, sinks: int, pages: list[int], block: int
) -> None:
    index, chosen = one_head(scores, topk, sinks).select(block)
    assert index[0, 0].tolist() == pages
    assert chosen[0, 0].tolist() == [NONE if page < 0 else scores[page] for page in pages]


@pytest.mark.parametrize(
    ("strategy", "page"), [("group", 0), ("head", 1), ("softmax_head", 2)]
)  # fmt: skip
def test_heads_agree_by_sum_by_best_score_or_by_best_share(strategy: Strategy, page: int) -> None:
    """The first head's window takes most of what it reads, the second head's takes nothing."""
    case = Case(
        scores=torch.tensor([[[8.0, 9.0, 0.0], [1.0, -9.0, 1.5]]], dtype=torch.float64),
        limits=torch.tensor([3]),
        window_lse=torch.tensor([[10.0, -9.0]], dtype=torch.float64),
        kv_heads=1,
        topk=1,
        strategy=strategy,
        sinks=0,
    )
    assert case.pages(0, 0) == [page]
    assert case.select()[0].tolist() == [[[page]]]


def by_order(ranks: list[float], k: int) -> list[int]:
    able = [i for i, rank in enumerate(ranks) if rank > NONE]
    best = sorted(sorted(able, key=lambda i: (-ranks[i], i))[:k])
    return best + [-1] * (k - len(best))


@given(
    st.lists(st.sampled_from([NONE, -1.0, 0.0, 1.0, 2.0, math.inf]), max_size=12),
    st.integers(1, 15),
)
def test_top_positions_equal_sorting(ranks: list[float], k: int) -> None:
    assert top_positions(torch.tensor(ranks), k).tolist() == by_order(ranks, k)


@given(st.integers(0, 2**31), st.integers(1, 40), st.integers(1, 40))
def test_top_positions_treat_every_row_by_itself(seed: int, n: int, k: int) -> None:
    random = torch.Generator().manual_seed(seed)
    ranks = torch.randint(-3, 3, (2, 3, n), generator=random).float()
    ranks[ranks == -3] = NONE
    places = top_positions(ranks, k)
    assert places.shape == (2, 3, k)
    for of_row, found in zip(ranks.flatten(0, 1), places.flatten(0, 1), strict=True):
        assert found.tolist() == by_order(of_row.tolist(), k)


def test_a_row_of_a_selection_is_that_row_of_every_part() -> None:
    parts = [torch.arange(24).view(3, 2, 4) + 100 * i for i in range(4)]
    parts += [torch.arange(6).view(3, 2) + 100 * i for i in range(2)]
    row = Selection(*parts).row(1)
    got = (
        row.page_ids, row.page_index, row.scores, row.weights, row.window_lse, row.window_weight
    )  # fmt: skip
    for part, of_row in zip(parts, got, strict=True):
        assert torch.equal(of_row, part[1:2])
