"""What several ranks cannot serve is refused before any is started, with the way out."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from cairn import LLM
from cairn.config import EngineConfig
from cairn.engine.build import check_tp
from cairn.engine.locate import locate
from cairn.errors import CairnError, ConfigError
from tests.helpers import GOLDENS, TINY_LLAMA, write_model
from tests.parallel.ranks import load


@pytest.mark.parametrize(
    ("config", "options", "message"),
    [
        ({}, {"tp": 4}, r"tp is 4 .* num_key_value_heads 2, .*; use tp=1 or 2$"),
        ({"num_key_value_heads": 4}, {"tp": 3}, r"num_key_value_heads 4, .*; use tp=1 or 2 or 4$"),
        ({"intermediate_size": 47}, {"tp": 2}, r"intermediate_size 47, .*; use tp=1$"),
        ({}, {"tp": 2, "quantization": "int8"}, r"quantization is 'int8'.*tp=1"),
        ({}, {"tp": 2, "model_impl": "transformers"}, r"model_impl is 'transformers'.*tp=1"),
        ({}, {"tp": 0}, r"tp is 0; it must be a whole number from 1"),
        ({}, {"tp": 2.0}, r"tp is 2\.0; it must be a whole number from 1"),
        ({}, {"tp": 2, "context_length": 10**6}, r"context_length is 1000000"),
        ({}, {"tp": 2, "disable_cuda_graph": True}, r"disable_cuda_graph is for CUDA"),
    ],
)
def test_refusals(
    config: dict[str, Any], options: dict[str, Any], message: str, tmp_path: Path
) -> None:
    folder = write_model(tmp_path, {**TINY_LLAMA, **config})
    with pytest.raises(ConfigError, match=message):
        LLM(folder, device="cpu", **options)


def test_one_kv_head_cannot_be_split() -> None:
    with pytest.raises(ConfigError, match="num_key_value_heads 1"):
        LLM(GOLDENS / "qwen_swamix_chunk64", device="cpu", tp=2)


@pytest.mark.parametrize(
    ("device", "message"),
    [
        ("cuda", r"tp is 64 and torch sees \d+ CUDA devices.*CUDA_VISIBLE_DEVICES"),
        ("mps", r"the device mps; .* use tp=1, or device=cpu"),
    ],
)
def test_devices(device: str, message: str, tmp_path: Path) -> None:
    config = EngineConfig(model=str(write_model(tmp_path, TINY_LLAMA)), tp=64)
    with pytest.raises(ConfigError, match=message):
        check_tp(config, locate(config), torch.device(device))


def test_attention_cannot_be_watched_from_one_rank(tmp_path: Path) -> None:
    with (
        load(write_model(tmp_path, TINY_LLAMA), 2) as llm,
        pytest.raises(CairnError, match=r"tp is 2: .*use tp=1"),
    ):
        llm.engine.wrap_attention(lambda backend, pool: backend)
