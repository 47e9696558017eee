from __future__ import annotations

import math
from array import array
from collections import Counter
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from cairn.engine.logprobs import token_logprobs
from cairn.engine.plan import Admission, Advance
from cairn.engine.sampler import Sampler, derived_seed, uniform_numbers
from cairn.engine.sampling_params import SamplingParams
from cairn.errors import RequestError


def make(*params: SamplingParams, vocab: int, seeds: tuple[int, ...] | None = None) -> Sampler:
    """A sampler with one request in each slot."""
    sampler = Sampler(len(params), vocab, torch.device("cpu"))
    for slot, each in enumerate(params):
        seed = seeds[slot] if seeds else slot
        sampler.admit(Admission(slot, each, seed, frozenset(), (), ()))
    return sampler


def row(slot: int, position: int, num_output: int = 0) -> Advance:
    """A request that samples the token at a position, after so many output tokens."""
    return Advance("", slot, position - 1, position, array("q", [0]), position - num_output, True)


def draw(sampler: Sampler, logits: torch.Tensor, slot: int = 0, position: int = 0) -> int:
    return int(sampler.sample(logits[None], [row(slot, position)]).item())


def test_greedy_takes_the_lowest_id_on_ties() -> None:
    logits = torch.tensor([[0.0, 3.0, 3.0, 1.0], [2.0, 2.0, 2.0, 2.0]])
    sampler = make(SamplingParams(), SamplingParams(), vocab=4)
    assert sampler.sample(logits, [row(0, 0), row(1, 0)]).tolist() == [1, 0]


def test_frequencies_follow_the_softmax() -> None:
    logits = torch.tensor([0.0, 1.0, 2.0, -1.0])
    sampler = make(SamplingParams(temperature=0.7), vocab=4)
    draws = [row(0, i) for i in range(20_000)]
    counts = Counter(sampler.sample(logits.expand(len(draws), -1), draws).tolist())
    expected = (logits / 0.7).softmax(-1)
    for token, probability in enumerate(expected.tolist()):
        spread = 5 * math.sqrt(probability * (1 - probability) / len(draws))
        assert abs(counts[token] / len(draws) - probability) < spread


@given(
    st.lists(st.integers(-50, 50).map(lambda n: n / 10), min_size=2, max_size=12),
    st.integers(1, 12),
    st.floats(0.01, 1),
    st.floats(0, 1),
    st.floats(0.05, 5),
    st.integers(0, 2**63 - 1),
)
def test_only_tokens_inside_top_k_top_p_and_min_p_are_drawn(
    values: list[float], top_k: int, top_p: float, min_p: float, temperature: float, seed: int
) -> None:
    logits = torch.tensor(values, dtype=torch.float64)
    params = SamplingParams(temperature=temperature, top_k=top_k, top_p=top_p, min_p=min_p)
    sampler = make(params, vocab=len(values), seeds=(seed,))
    draws = [row(0, i) for i in range(50)]
    drawn = set(sampler.sample(logits.expand(50, -1), draws).tolist())
    order = sorted(range(len(values)), key=lambda t: (-values[t], t))[:top_k]
    kept = (logits[order] / temperature).softmax(-1).tolist()
    allowed, mass = set(), 0.0
    for token, probability in zip(order, kept, strict=True):
        if probability >= min_p * kept[0] * (1 - 1e-5):
            allowed.add(token)
        mass += probability
        if mass >= top_p + 1e-6:
            break
    assert drawn <= allowed


def test_a_request_draws_the_same_alone_and_in_any_batch() -> None:
    torch.manual_seed(0)
    logits = torch.randn(7, 50)
    params = [
        SamplingParams(temperature=1.0),
        SamplingParams(temperature=0.5, top_k=5),
        SamplingParams(),
        SamplingParams(temperature=2.0, top_p=0.6),
        SamplingParams(temperature=1e-6),
        SamplingParams(temperature=1.0, top_k=3, top_p=0.5),
        SamplingParams(temperature=1.0, presence_penalty=1.0, logit_bias={3: 2.0}),
    ]
    sampler = make(*params, vocab=50)
    together = sampler.sample(logits, [row(i, i) for i in range(7)]).tolist()
    alone = [
        draw(make(each, vocab=50, seeds=(i,)), logits[i], position=i)
        for i, each in enumerate(params)
    ]
    assert together == alone
    assert together[4] == logits[4].argmax().item()  # almost no temperature is greedy


@pytest.mark.parametrize("temperature", [1e-300, 1e-50, 1e-6])
def test_hardly_any_temperature_is_greedy(temperature: float) -> None:
    sampler = make(SamplingParams(temperature=temperature), vocab=3)
    assert draw(sampler, torch.tensor([0.0, 0.1, 0.0])) == 1


def test_filters_do_not_keep_greedy_rows_from_recorded_draws() -> None:
    filters: dict[str, Any] = {"top_k": 20, "top_p": 0.9, "min_p": 0.1}
    greedy, drawn = SamplingParams(**filters), SamplingParams(temperature=1.0, **filters)
    sampler = make(greedy, drawn, vocab=50)
    assert sampler.plain_draws([row(0, 7)]) is not None
    assert sampler.plain_draws([row(1, 7)]) is None
    assert sampler.plain_draws([row(0, 7)._replace(allowed=(b"\xff",))]) is None
    scored = make(SamplingParams(logprobs=0), vocab=50)
    assert scored.plain_draws([row(0, 7)]) is None


def test_extreme_logits_still_give_a_token_with_weight() -> None:
    logits = torch.tensor([-1e30, 0.0, -1e30, float("-inf")])
    sampler = make(SamplingParams(temperature=1.0), vocab=4)
    assert all(draw(sampler, logits, position=i) == 1 for i in range(50))


def test_a_huge_top_k_keeps_everything() -> None:
    sampler = make(SamplingParams(temperature=1.0, top_k=2**63), vocab=3)
    assert 0 <= draw(sampler, torch.zeros(3)) < 3


def by_hand(
    logits: list[float], params: SamplingParams, prompt: list[int], output: list[int]
) -> list[float]:
    """Bias and penalties, one token at a time."""
    result = list(logits)
    for token, bias in params.bias:
        result[token] += bias
    for token in set(prompt) | set(output):
        value = result[token]
        penalty = params.repetition_penalty
        result[token] = value / penalty if value > 0 else value * penalty
    for token, count in Counter(output).items():
        result[token] -= params.presence_penalty + count * params.frequency_penalty
    return result


tokens8 = st.integers(0, 7)


@given(
    st.lists(st.integers(-30, 30).map(lambda n: n / 10), min_size=8, max_size=8),
    st.sampled_from([1.0, 1.3, 0.7]),
    st.sampled_from([0.0, 0.5, -1.0]),
    st.sampled_from([0.0, 0.25, -0.5]),
    st.dictionaries(tokens8, st.sampled_from([-100.0, -1.0, 2.0]), max_size=3),
    st.lists(tokens8, max_size=6),
    st.lists(tokens8, max_size=6),
)
def test_penalties_and_bias_follow_their_definition_step_by_step(
    logits: list[float],
    repetition: float,
    presence: float,
    frequency: float,
    bias: dict[int, float],
    prompt: list[int],
    output: list[int],
) -> None:
    params = SamplingParams(
        repetition_penalty=repetition,
        presence_penalty=presence,
        frequency_penalty=frequency,
        logit_bias=bias,
    )
    sampler = Sampler(2, 8, torch.device("cpu"))
    # A slot that somebody else has used before must start clean.
    other = SamplingParams(presence_penalty=2.0, logit_bias={1: 50.0})
    sampler.admit(Admission(1, other, 0, frozenset(), (1, 2), (3, 3)))
    sampler.admit(Admission(1, params, 0, frozenset(), tuple(prompt), tuple(output)))
    generated = list(output)
    for step in range(4):
        expected = torch.tensor(by_hand(logits, params, prompt, generated))
        token = draw(sampler, torch.tensor(logits), slot=1, position=step)
        assert expected[token] >= expected.max() - 1e-5
        generated.append(token)


def test_end_tokens_wait_for_min_tokens() -> None:
    params = SamplingParams(min_tokens=2)
    sampler = Sampler(1, 4, torch.device("cpu"))
    sampler.admit(Admission(0, params, 0, frozenset({3}), (), ()))
    logits = torch.tensor([[0.0, 1.0, 0.5, 9.0]])
    drawn = [sampler.sample(logits, [row(0, 5, count)]).item() for count in range(4)]
    assert drawn == [1, 1, 3, 3]


def test_top_logprobs_are_sorted_and_ties_go_to_the_lower_id() -> None:
    logits = torch.tensor([[1.0, 3.0, 3.0, 0.0, 3.0], [5.0, 4.0, 3.0, 2.0, 1.0]])
    first, second = token_logprobs(logits, torch.tensor([3, 1]), [2, 3])
    assert [token for token, _ in first.top] == [1, 2]
    assert [token for token, _ in second.top] == [0, 1, 2]
    expected = logits.log_softmax(-1)
    assert first.logprob == pytest.approx(expected[0, 3].item())
    assert second.top[2][1] == pytest.approx(expected[1, 2].item())


def test_choices_have_seeds_of_their_own_and_the_first_keeps_its() -> None:
    seeds = [derived_seed(7, choice) for choice in range(100)]
    assert seeds[0] == 7
    assert len(set(seeds)) == 100
    assert all(0 <= seed < 2**63 for seed in seeds)
    neighbours = {derived_seed(seed, choice) for seed in range(30) for choice in range(30)}
    assert len(neighbours) == 900


def test_uniform_numbers_are_spread_and_reproducible() -> None:
    seeds, indices = np.arange(40, dtype=np.uint64).repeat(50), np.tile(np.arange(50), 40)
    numbers = uniform_numbers(seeds, indices).tolist()
    assert all(0 <= number < 1 for number in numbers)
    assert len(set(numbers)) > 1990
    assert sum(numbers) / len(numbers) == pytest.approx(0.5, abs=0.03)
    # Seeds mean the same in every version.
    largest = np.array([2**63 - 1], dtype=np.uint64)
    known = [*numbers[:3], *uniform_numbers(largest, np.array([10**6])).tolist()]
    assert known == [
        0.6524484753608704,
        0.7012121081352234,
        0.38712412118911743,
        0.3985477089881897,
    ]


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
        ("temperature", 10**400),
        ("min_p", 1.5),
        ("min_p", -0.1),
        ("repetition_penalty", 0.0),
        ("repetition_penalty", float("inf")),
        ("presence_penalty", 2.5),
        ("frequency_penalty", -3),
        ("logit_bias", {1: 200.0}),
        ("logit_bias", {-1: 1.0}),
        ("logit_bias", {"a": 1.0}),
        ("logit_bias", [1, 2]),
        ("logit_bias", 7),
        ("min_tokens", -1),
        ("min_tokens", 999),
        ("n", 0),
        ("n", 1000),
        ("logprobs", 21),
        ("logprobs", -1),
        ("prompt_logprobs", 1.5),
        ("stop", None),
        ("stop", 5),
        ("stop_token_ids", None),
    ],
)
def test_bad_sampling_values_are_refused_by_name(field: str, value: object) -> None:
    with pytest.raises(RequestError, match=field):
        SamplingParams.from_kwargs({field: value})
