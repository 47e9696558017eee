"""Policies by name. A new one is one file: name it as `module:Class`, or add a line here."""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from typing import get_args

import torch

from cairn.errors import ConfigError
from cairn.sparsity.policy import Fusion, Landmark, Policy, PolicyShape, Strategy

_POLICIES: Mapping[str, str] = {
    "hils": "cairn.sparsity.hils:HiLSPolicy",
    "landmark-key": "cairn.sparsity.landmark_key:LandmarkKeyPolicy",
    "quest": "cairn.sparsity.quest:QuestPolicy",
    "mean": "cairn.sparsity.mean:MeanPolicy",
}


def policy_names() -> tuple[str, ...]:
    return tuple(_POLICIES)


def policy_class(name: str) -> type[Policy]:
    """A policy that comes with Cairn, or one of the user's as `module:Class`."""
    place = _POLICIES.get(name, name)
    module, _, attribute = place.partition(":")
    if not attribute:
        raise ConfigError(
            f"hsa_policy is {name!r}; choose one of {', '.join(_POLICIES)}, "
            "or name your own as module:Class"
        )
    try:
        found = getattr(importlib.import_module(module), attribute)
    except (ImportError, AttributeError, ValueError, TypeError) as error:
        raise ConfigError(f"hsa_policy {name!r} cannot be imported: {error}") from error
    if not (isinstance(found, type) and issubclass(found, Policy)):
        raise ConfigError(f"hsa_policy {name!r} is not a subclass of cairn.sparsity.policy.Policy")
    return found


def make_policy(name: str, shape: PolicyShape) -> Policy:
    """The named policy, tried on two pages of zeros so that a wrong one fails here."""
    kind = policy_class(name)
    if kind.strategy not in get_args(Strategy) or kind.fusion not in get_args(Fusion):
        raise ConfigError(
            f"hsa_policy {name!r} has strategy {kind.strategy!r} and fusion {kind.fusion!r}; "
            f"choose among {', '.join(get_args(Strategy))} and {', '.join(get_args(Fusion))}"
        )
    try:
        policy = kind(shape)
        problem = _problem(policy, shape)
    except Exception as error:  # a user's code may raise anything
        raise ConfigError(f"hsa_policy {name!r} fails on two pages of zeros: {error!r}") from error
    if problem is not None:
        raise ConfigError(f"hsa_policy {name!r}: {problem}")
    return policy


def _problem(policy: Policy, shape: PolicyShape) -> str | None:
    heads, width = policy.landmark_heads, policy.landmark_width
    if heads not in (shape.num_heads, shape.num_kv_heads):
        return (
            f"landmark_heads is {heads}; it must be the number of kv heads, {shape.num_kv_heads}, "
            f"or of query heads, {shape.num_heads}"
        )
    keys = torch.zeros(2, 4, shape.num_kv_heads, shape.head_dim)
    query = torch.zeros(3, shape.num_heads, shape.head_dim)
    vectors, bias = policy.landmark(keys, query[:2] if policy.needs_landmark_rows else None)
    if tuple(vectors.shape) != (2, heads, width):
        return f"landmark() gives {list(vectors.shape)} for two pages, not {[2, heads, width]}"
    if (bias is not None) != policy.has_bias:
        given = "no bias" if bias is None else "a bias"
        return f"has_bias is {policy.has_bias}, but landmark() gives {given}"
    mapped = policy.map_query(query)
    if tuple(mapped.shape) != (3, shape.num_heads, width):
        expected = [3, shape.num_heads, width]
        return f"map_query() gives {list(mapped.shape)} for three rows, not {expected}"
    scores = policy.score(mapped, Landmark(vectors, bias))
    if tuple(scores.shape) != (3, shape.num_heads, 2):
        return f"score() gives {list(scores.shape)} for three rows and two pages"
    return None
