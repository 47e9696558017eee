from __future__ import annotations

import math
from collections import Counter

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from cairn.engine.sampler import Draw, sample, uniform_number
from cairn.engine.sampling_params import SamplingParams
from cairn.errors import RequestError


def test_greedy_takes_the_lowest_id_on_ties() -> None:
    logits = torch.tensor([[0.0, 3.0, 3.0, 1.0], [2.0, 2.0, 2.0, 2.0]])
    draws = [Draw(SamplingParams(), 0, 0)] * 2
    assert sample(logits, draws).tolist() == [1, 0]


def test_frequencies_follow_the_softmax() -> None:
    logits = torch.tensor([0.0, 1.0, 2.0, -1.0])
    params = SamplingParams(temperature=0.7)
    draws = [Draw(params, seed=5, index=i) for i in range(20_000)]
    counts = Counter(sample(logits.expand(len(draws), -1), draws).tolist())
    expected = (logits / 0.7).softmax(-1)
    for token, probability in enumerate(expected.tolist()):
        spread = 5 * math.sqrt(probability * (1 - probability) / len(draws))
        assert abs(counts[token] / len(draws) - probability) < spread


@given(
    st.lists(st.integers(-50, 50).map(lambda n: n / 10), min_size=2, max_size=12),
    st.integers(1, 12),
    st.floats(0.01, 1),
    st.floats(0.05, 5),
    st.integers(0, 2**63 - 1),
)
def test_only_tokens_inside_top_k_and_top_p_are_drawn(
    values: list[float], top_k: int, top_p: float, temperature: float, seed: int
) -> None:
    logits = torch.tensor(values, dtype=torch.float64)
    params = SamplingParams(temperature=temperature, top_k=top_k, top_p=top_p)
    drawn = set(sample(logits.expand(50, -1), [Draw(params, seed, i) for i in range(50)]).tolist())
    order = sorted(range(len(values)), key=lambda t: (-values[t], t))[:top_k]
    kept = (logits[order] / temperature).softmax(-1)
    allowed, mass = set(), 0.0
    for token, probability in zip(order, kept.tolist(), strict=True):
        allowed.add(token)
        mass += probability
        if mass >= top_p + 1e-9:
            break
    assert drawn <= allowed


def test_a_request_draws_the_same_alone_and_in_any_batch() -> None:
    torch.manual_seed(0)
    logits = torch.randn(6, 50)
    draws = [
        Draw(SamplingParams(temperature=1.0), 1, 0),
        Draw(SamplingParams(temperature=0.5, top_k=5), 2, 7),
        Draw(SamplingParams(), 3, 1),
        Draw(SamplingParams(temperature=2.0, top_p=0.6), 4, 2),
        Draw(SamplingParams(temperature=1e-6), 5, 3),
        Draw(SamplingParams(temperature=1.0, top_k=3, top_p=0.5), 6, 9),
    ]
    together = sample(logits, draws).tolist()
    alone = [sample(logits[i : i + 1], [draw])[0].item() for i, draw in enumerate(draws)]
    assert together == alone
    assert together[4] == logits[4].argmax().item()  # almost no temperature is greedy


def test_extreme_logits_still_give_a_token_with_weight() -> None:
    logits = torch.tensor([[-1e30, 0.0, -1e30, float("-inf")]])
    for index in range(50):
        draw = Draw(SamplingParams(temperature=1.0), 9, index)
        assert sample(logits, [draw]).item() == 1


def test_uniform_numbers_are_spread_and_reproducible() -> None:
    numbers = [uniform_number(seed, index) for seed in range(40) for index in range(50)]
    assert all(0 <= number < 1 for number in numbers)
    assert len(set(numbers)) > 1990
    assert sum(numbers) / len(numbers) == pytest.approx(0.5, abs=0.03)
    assert numbers[:3] == [uniform_number(0, index) for index in range(3)]


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("temperature", -0.1),
        ("temperature", float("nan")),
        ("temperature", "hot"),
        ("temperature", True),
        ("top_p", 0.0),
        ("top_p", 1.5),
        ("top_k", 0),
        ("top_k", -2),
        ("top_k", 1.5),
        ("max_tokens", 0),
        ("max_tokens", 2.0),
        ("seed", -1),
        ("seed", 2**63),
        ("stop", ""),
        ("stop", [1]),
        ("stop_token_ids", [-1]),
        ("ignore_eos", 1),
        ("temprature", 1.0),
    ],
)
def test_bad_sampling_values_are_refused_by_name(field: str, value: object) -> None:
    with pytest.raises(RequestError, match=field):
        SamplingParams.from_kwargs({field: value})
