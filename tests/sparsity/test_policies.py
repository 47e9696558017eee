"""Each policy against its definition, worked out one page, row and head at a time."""

from __future__ import annotations

import itertools
import math
from pathlib import Path

import pytest
import torch

from cairn import LLM
from cairn.errors import ConfigError
from cairn.sparsity.hils import HiLSPolicy
from cairn.sparsity.landmark_key import LandmarkKeyPolicy
from cairn.sparsity.mean import MeanPolicy
from cairn.sparsity.policy import Landmark, Policy, PolicyShape
from cairn.sparsity.quest import QuestPolicy
from cairn.sparsity.registry import policy_class, policy_names
from cairn.sparsity.snapkv import SnapKVPolicy
from cairn.sparsity.spread import SpreadPolicy
from cairn.sparsity.streaming import StreamingPolicy
from tests.helpers import TINY_LLAMA, tokens_of, write_model

HEADS, KV_HEADS, DIM, SIZE, PAGES, ROWS = 6, 2, 4, 5, 3, 2
GROUP = HEADS // KV_HEADS
SHAPE = PolicyShape(num_heads=HEADS, num_kv_heads=KV_HEADS, head_dim=DIM, scale=0.37)
EVERY = list(itertools.product(range(ROWS), range(HEADS), range(PAGES)))


@pytest.fixture
def keys() -> torch.Tensor:
    return random(PAGES, SIZE, KV_HEADS, DIM)


@pytest.fixture
def query() -> torch.Tensor:
    return random(ROWS, HEADS, DIM, seed=1)


@pytest.fixture
def prior() -> torch.Tensor:
    return random(PAGES, HEADS, DIM, seed=2)


def random(*shape: int, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return 2 * torch.randn(shape, generator=generator, dtype=torch.float64)


def scored(
    policy: Policy, query: torch.Tensor, keys: torch.Tensor, prior: torch.Tensor | None = None
) -> torch.Tensor:
    """As attention does it: sum pages up, map the query, score."""
    landmark = policy.landmark(keys, prior)
    assert landmark.vectors.shape == (len(keys), policy.landmark_heads, policy.landmark_width)
    assert (landmark.bias is not None) == policy.has_bias
    mapped = policy.map_query(query)
    assert mapped.shape == (*query.shape[:-1], policy.landmark_width)
    return policy.score(mapped, landmark)


def dot(left: torch.Tensor, right: torch.Tensor) -> float:
    products = (a * b for a, b in zip(left.tolist(), right.tolist(), strict=True))
    return SHAPE.scale * float(sum(products))


def own_keys(keys: torch.Tensor, page: int, head: int) -> torch.Tensor:
    """[rows, dim] of the kv head that a query head reads."""
    return keys[page, :, head // GROUP]


def close(value: torch.Tensor) -> object:
    return pytest.approx(value.item(), rel=1e-12, abs=1e-12)


def test_quest_scores_the_best_corner_of_the_box(query: torch.Tensor, keys: torch.Tensor) -> None:
    scores = scored(QuestPolicy(SHAPE), query, keys)
    assert scores.shape == (ROWS, HEADS, PAGES)
    for row, head, page in EVERY:
        sides = [(min(side), max(side)) for side in own_keys(keys, page, head).T.tolist()]
        corners = torch.tensor(list(itertools.product(*sides)), dtype=torch.float64)
        best = max(dot(query[row, head], corner) for corner in corners)
        assert best == close(scores[row, head, page])


def test_quest_never_scores_below_a_key_of_the_page(
    query: torch.Tensor, keys: torch.Tensor
) -> None:
    scores = scored(QuestPolicy(SHAPE), query, keys)
    for row, head, page in EVERY:
        best = max(dot(query[row, head], key) for key in own_keys(keys, page, head))
        assert best <= scores[row, head, page].item() + 1e-12


def test_mean_scores_the_mean_key(query: torch.Tensor, keys: torch.Tensor) -> None:
    scores = scored(MeanPolicy(SHAPE), query, keys)
    for row, head, page in EVERY:
        each = [dot(query[row, head], key) for key in own_keys(keys, page, head)]
        assert sum(each) / SIZE == close(scores[row, head, page])


def test_spread_scores_the_mean_key_and_the_deviations(
    query: torch.Tensor, keys: torch.Tensor
) -> None:
    policy = SpreadPolicy(SHAPE)
    scores = scored(policy, query, keys)
    for row, head, page in EVERY:
        own = own_keys(keys, page, head)
        mean = own.mean(0)
        deviation = ((own - mean) ** 2).mean(0).sqrt()
        off = SHAPE.scale * (query[row, head] * deviation).norm().item()
        assert dot(query[row, head], mean) + policy.reach * off == close(scores[row, head, page])


def test_landmark_key_scores_the_key_of_the_last_row(
    query: torch.Tensor, keys: torch.Tensor
) -> None:
    scores = scored(LandmarkKeyPolicy(SHAPE), query, keys)
    for row, head, page in EVERY:
        last = own_keys(keys, page, head)[SIZE - 1]
        assert dot(query[row, head], last) == close(scores[row, head, page])


def test_hils_scores_the_pooled_key_and_adds_the_entropy_of_the_pooling(
    query: torch.Tensor, keys: torch.Tensor, prior: torch.Tensor
) -> None:
    scores = scored(HiLSPolicy(SHAPE), query, keys, prior)
    for row, head, page in EVERY:
        real = own_keys(keys, page, head)[: SIZE - 1]
        exps = [math.exp(dot(prior[page, head], key)) for key in real]
        shares = [each / sum(exps) for each in exps]
        pooled = sum(share * key for share, key in zip(shares, real, strict=True))
        assert isinstance(pooled, torch.Tensor)
        entropy = -sum(share * math.log(share) for share in shares)
        assert dot(query[row, head], pooled) + entropy == close(scores[row, head, page])


def test_hils_is_exact_for_the_prior_query_and_never_above_the_log_sum_exp(
    query: torch.Tensor, keys: torch.Tensor, prior: torch.Tensor
) -> None:
    """What makes it the first-order expansion of a convex function."""
    policy = HiLSPolicy(SHAPE)
    at_prior, elsewhere = scored(policy, prior, keys, prior), scored(policy, query, keys, prior)
    for row, head, page in EVERY:
        real = own_keys(keys, page, head)[: SIZE - 1]
        exact = math.log(sum(math.exp(dot(prior[page, head], key)) for key in real))
        assert exact == close(at_prior[page, head, page])
        above = math.log(sum(math.exp(dot(query[row, head], key)) for key in real))
        assert elsewhere[row, head, page].item() < above


@pytest.mark.parametrize("kind", [HiLSPolicy, LandmarkKeyPolicy])
def test_keys_of_landmark_rows_count_where_the_policy_says(
    kind: type[Policy], query: torch.Tensor, keys: torch.Tensor, prior: torch.Tensor
) -> None:
    changed = keys.clone()
    changed[:, -1] += 1.0
    before = scored(kind(SHAPE), query, keys, prior)
    after = scored(kind(SHAPE), query, changed, prior)
    assert kind.needs_landmark_rows
    assert torch.equal(before, after) == (kind is HiLSPolicy)


@pytest.mark.parametrize("name", policy_names())
def test_sequences_are_scored_each_with_its_own_pages(
    name: str, query: torch.Tensor, keys: torch.Tensor, prior: torch.Tensor
) -> None:
    policy = policy_class(name)(SHAPE)
    landmarks = [policy.landmark(keys, prior), policy.landmark(keys.flip(0), prior.flip(0))]
    bias = None
    if policy.has_bias:
        bias = torch.stack([each.bias for each in landmarks if each.bias is not None])
    both = Landmark(torch.stack([each.vectors for each in landmarks]), bias)
    mapped = policy.map_query(query)
    together = policy.score(torch.stack((mapped, mapped)), both)
    assert together.shape == (2, ROWS, HEADS, PAGES)
    for sequence, landmark in enumerate(landmarks):
        torch.testing.assert_close(together[sequence], policy.score(mapped, landmark))


@pytest.mark.parametrize("name", policy_names())
def test_landmarks_keep_the_type_of_the_keys_and_biases_a_wide_one(
    name: str, keys: torch.Tensor, prior: torch.Tensor
) -> None:
    policy = policy_class(name)(SHAPE)
    exact = policy.landmark(keys.bfloat16().double(), prior.bfloat16().double())
    rounded = policy.landmark(keys.bfloat16(), prior.bfloat16())
    assert rounded.vectors.dtype == torch.bfloat16
    torch.testing.assert_close(rounded.vectors.double(), exact.vectors, rtol=2**-8, atol=1e-6)
    if policy.has_bias:
        assert exact.bias is not None and rounded.bias is not None
        assert rounded.bias.dtype == torch.float32
        torch.testing.assert_close(rounded.bias.double(), exact.bias, rtol=1e-5, atol=1e-5)


# -- a policy of one's own --------------------------------------------------------------------


class ToyPolicy(Policy):
    """The shortest keys win, whatever the query: other heads, another width, a bias."""

    has_bias = True

    @property
    def landmark_heads(self) -> int:
        return self.shape.num_heads

    @property
    def landmark_width(self) -> int:
        return 1

    def landmark(self, keys: torch.Tensor, prior: torch.Tensor | None) -> Landmark:
        group = self.shape.num_heads // self.shape.num_kv_heads
        longest = keys.norm(dim=-1).amax(1).repeat_interleave(group, 1)  # [pages, heads]
        return Landmark(torch.zeros_like(longest)[..., None], -longest)

    def map_query(self, query: torch.Tensor) -> torch.Tensor:
        return query[..., :1]


NOT_A_POLICY = 3


def test_a_policy_of_ones_own_needs_nothing_but_its_name(tmp_path: Path) -> None:
    folder = write_model(tmp_path, TINY_LLAMA)
    outputs = {}
    for name in ("tests.sparsity.test_policies:ToyPolicy", "quest"):
        with LLM(
            folder,
            device="cpu",
            dtype="float64",
            page_size=16,
            attention_backend="hsa",
            hsa_policy=name,
            hsa_topk=2,
            hsa_window=16,
            hsa_prefill="sparse",
        ) as llm:
            outputs[name] = llm.logprobs(tokens_of(200))
            assert name in llm.engine.notes[-1]
    toy, quest = outputs.values()
    assert torch.isfinite(toy).all()
    # Until more than two pages lie outside the window, there is nothing to choose.
    torch.testing.assert_close(toy[:63], quest[:63], rtol=0, atol=1e-6)
    assert (toy[63:] - quest[63:]).abs().max() > 0.01


def test_policies_are_found_by_name_and_by_place() -> None:
    kinds = [policy_class(name) for name in policy_names()]
    trained = [HiLSPolicy, LandmarkKeyPolicy]
    free = [QuestPolicy, MeanPolicy, SpreadPolicy, SnapKVPolicy, StreamingPolicy]
    assert kinds == [*trained, *free]
    assert policy_class(f"{__name__}:ToyPolicy") is ToyPolicy


@pytest.mark.parametrize("name", ["qest", "", "module.without.class", "json:"])
def test_an_unknown_name_is_told_the_known_ones(name: str) -> None:
    known = f"{', '.join(policy_names())}, or name your own as module:Class"
    with pytest.raises(ConfigError, match=rf"hsa_policy is '{name}'; choose one of {known}"):
        policy_class(name)


@pytest.mark.parametrize(
    ("name", "why"),
    [
        ("no_such_module:Policy", "No module named 'no_such_module'"),
        ("cairn.sparsity.no_such_module:Policy", "No module named"),
        ("json:NoSuchPolicy", "no attribute 'NoSuchPolicy'"),
        (":ToyPolicy", ""),
        (".local:ToyPolicy", ""),
    ],
)
def test_what_cannot_be_imported_is_refused_with_the_reason(name: str, why: str) -> None:
    with pytest.raises(ConfigError, match=rf"hsa_policy '{name}' cannot be imported: .*{why}"):
        policy_class(name)


@pytest.mark.parametrize(
    "place", ["json:JSONDecoder", "json:loads", f"{__name__}:NOT_A_POLICY", f"{__name__}:SHAPE"]
)
def test_what_is_no_policy_is_refused(place: str) -> None:
    with pytest.raises(ConfigError, match=rf"hsa_policy '{place}' is not a subclass"):
        policy_class(place)
