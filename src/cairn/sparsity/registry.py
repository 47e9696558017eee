"""Policies by name. A new one is one file: name it as `module:Class`, or add a line here."""

from __future__ import annotations

import importlib
from collections.abc import Mapping

from cairn.errors import ConfigError
from cairn.sparsity.policy import Policy

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
