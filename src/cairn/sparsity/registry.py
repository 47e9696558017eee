"""Finds policies by name. A new policy is one file: name it as `module:Class`, or add it here."""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from typing import TypeVar, get_args

import torch

from cairn.errors import ConfigError
from cairn.sparsity.policy import Fusion, Landmark, Policy, PolicyShape, Strategy

T = TypeVar("T")

_POLICIES: Mapping[str, str] = {
    "hils": "cairn.sparsity.hils:HiLSPolicy",
    "landmark-key": "cairn.sparsity.landmark_key:LandmarkKeyPolicy",
    "quest": "cairn.sparsity.quest:QuestPolicy",
    "mean": "cairn.sparsity.mean:MeanPolicy",
    "spread": "cairn.sparsity.spread:SpreadPolicy",
    "snapkv": "cairn.sparsity.snapkv:SnapKVPolicy",
    "streaming": "cairn.sparsity.streaming:StreamingPolicy",
}


def policy_names() -> tuple[str, ...]:
    return tuple(_POLICIES)


def policy_class(name: str) -> type[Policy]:
    """The class of a policy that comes with Cairn, or of a user's policy `module:Class`."""
    return import_class("hsa_policy", name, _POLICIES, Policy)


def policy_name(kind: type[Policy]) -> str:
    """What `policy_class` finds the class by."""
    place = f"{kind.__module__}:{kind.__qualname__}"
    return next((name for name, own in _POLICIES.items() if own == place), place)


def import_class(
    option: str, name: str, known: Mapping[str, str], base: type[T], also: str = ""
) -> type[T]:
    """The subclass of `base` that an option names: one of `known`, or any `module:Class`.

    `also` lists choices that are not classes, for the error message.
    """
    module, _, attribute = known.get(name, name).partition(":")
    if not attribute:
        raise ConfigError(
            f"{option} is {name!r}; choose one of {also}{', '.join(known)}, "
            "or name your own as module:Class"
        )
    try:
        found = getattr(importlib.import_module(module), attribute)
    except (ImportError, AttributeError, ValueError, TypeError) as error:
        raise ConfigError(f"{option} {name!r} cannot be imported: {error}") from error
    if not (isinstance(found, type) and issubclass(found, base)):
        raise ConfigError(
            f"{option} {name!r} is not a subclass of {base.__module__}.{base.__qualname__}"
        )
    return found


def make_policy(name: str, shape: PolicyShape) -> Policy:
    """Make the named policy and try it on two pages of zeros, so that errors show early."""
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
