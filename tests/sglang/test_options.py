"""Options and refusals of the plug-in, without SGLang."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from cairn.errors import ConfigError
from cairn.models.spec import AttentionSpec
from cairn.sglang.layers import describe
from cairn.sglang.options import option_names, read_plan, refuse_features, refuse_overrides
from tests.sglang.lanes import spec_of

PLAIN, HILS = spec_of(None, 20, 2), spec_of(8, 20, 2)


def test_options_reach_the_plan() -> None:
    given = {"policy": "mean", "topk": 5, "window": 99, "sinks": 2, "dense_below": 7, "layers": "1"}
    plan, geometry = read_plan(given, PLAIN, 16, "cpu")
    assert plan.sparse is not None
    found = plan.sparse
    assert (found.topk, found.window, found.sinks, found.dense_below) == (5, 99, 2, 7)
    assert found.layers == (1,) and type(found.policy).__name__ == "MeanPolicy"
    assert (geometry.page_size, geometry.tokens_per_page) == (16, 16)
    assert set(given) <= set(option_names())


def test_pages_of_models_with_landmark_rows() -> None:
    plan, geometry = read_plan(None, HILS, 7, "cpu")
    assert plan.sparse is not None and plan.sparse.landmark_rows
    assert (geometry.page_size, geometry.tokens_per_page) == (8, 7)


@pytest.mark.parametrize(
    ("given", "spec", "page_size", "message"),
    [
        ({"top_k": 3}, PLAIN, 16, r"cairn_hsa has top_k; known: policy, unit_size"),
        ({"topk": 0}, PLAIN, 16, r"hsa_topk is 0; it must be a whole number"),
        ("quest", PLAIN, 16, r"cairn_hsa is 'quest'; it must be an object"),
        ({}, PLAIN, 1, r"page_size is 1.*--page-size 64"),
        ({}, HILS, 8, r"page_size is 8; Test has chunks of 8 rows.*--page-size 7"),
        ({"window": 3}, HILS, 7, r"hsa_window is 3, but Test was trained with its own"),
    ],
)
def test_wrong_options_are_refused(given: Any, spec: Any, page_size: int, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        read_plan(given, spec, page_size, "cpu")


def server_args(**changed: Any) -> SimpleNamespace:
    given = {
        "attention_backend": "hsa",
        "prefill_attention_backend": None,
        "decode_attention_backend": None,
        "device": "cuda",
        "tp_size": 1,
        "speculative_algorithm": None,
        "disaggregation_mode": "null",
        "cuda_graph_config": SimpleNamespace(prefill=SimpleNamespace(backend="disabled")),
    }
    return SimpleNamespace(**{**given, **changed})


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"decode_attention_backend": "triton"}, "prefill is computed by hsa and decode by triton"),
        ({"tp_size": 2}, "tp_size is 2; hsa runs on one device"),
        ({"speculative_algorithm": "EAGLE"}, "leave --speculative-algorithm out"),
        ({"enable_hierarchical_cache": True}, "leave --enable-hierarchical-cache out"),
        ({"disaggregation_mode": "decode"}, "pages that come from elsewhere"),
        (
            {"cuda_graph_config": SimpleNamespace(prefill=SimpleNamespace(backend="full"))},
            "hsa records decode steps only",
        ),
    ],
)
def test_what_was_not_tried_is_refused(changed: dict[str, Any], message: str) -> None:
    refuse_features(server_args())
    with pytest.raises(ConfigError, match=message):
        refuse_features(server_args(**changed))


def test_fields_of_the_model_cannot_be_overridden() -> None:
    refuse_overrides('{"cairn_hsa": {"topk": 3}}')
    with pytest.raises(ConfigError, match="has rope_theta; of HiLS models only cairn_hsa"):
        refuse_overrides('{"rope_theta": 1, "cairn_hsa": {}}')


def layer(layer_id: int, **changed: Any) -> SimpleNamespace:
    given = {
        "layer_id": layer_id,
        "tp_q_head_num": 4,
        "tp_k_head_num": 2,
        "head_dim": 16,
        "v_head_dim": 16,
        "scaling": 0.25,
        "logit_cap": 0.0,
        "sliding_window_size": -1,
        "is_cross_attention": False,
        "attn_type": SimpleNamespace(value="decoder"),
        "xai_temperature_len": -1,
    }
    return SimpleNamespace(**{**given, **changed})


def test_a_model_is_described_by_its_attention_layers() -> None:
    spec = describe([layer(1), layer(0)], "Llama", 61, 512)
    assert spec.layers == (AttentionSpec(4, 2, 16, 0.25),) * 2
    assert spec.windows == (None, None) and spec.sparsity is None


@pytest.mark.parametrize(
    ("layers", "message"),
    [
        ([layer(0), layer(2)], r"attention layers \[0, 2\]"),
        ([layer(0, logit_cap=30.0)], "a cap on its scores"),
        ([layer(0, sliding_window_size=511)], "a sliding window"),
        ([layer(0, v_head_dim=8)], "values of another size"),
        ([layer(0), layer(1, scaling=1.0)], "differ in heads or scale"),
    ],
)
def test_layers_that_hsa_has_not(layers: list[Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        describe(layers, "Other", 61, 512)
