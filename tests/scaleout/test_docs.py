"""docs/scale-out.md, the examples and the tests say the same."""

from __future__ import annotations

from dataclasses import fields
from pathlib import Path

import pytest

from cairn.ray.options import ReplicaConfig, read_options
from tests.scaleout.test_routers import ROUTER_FLAGS

ROOT = Path(__file__).parents[2]
DOCS = (ROOT / "docs" / "scale-out.md").read_text()


def test_the_routers_options_are_those_that_are_tested() -> None:
    example = (ROOT / "examples" / "replicas.py").read_text()
    for flag in ROUTER_FLAGS:
        assert flag in DOCS and flag in example


def test_every_option_of_the_ray_application_is_described() -> None:
    for option in fields(ReplicaConfig):
        assert f"`{option.name}`" in DOCS


def test_the_example_for_ray_is_understood() -> None:
    yaml = pytest.importorskip("yaml")
    example = yaml.safe_load((ROOT / "examples" / "ray_serve.yaml").read_text())
    (application,) = example["applications"]
    replicas, _, engine = read_options(application["args"])
    assert (replicas.replicas, engine.model) == (2, "smollm2")
    assert application["import_path"] == "cairn.ray.app:build"
