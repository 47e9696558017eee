"""Architectures by the name config.json gives them. A new one is one file and one line here."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping

from cairn.errors import ConfigError
from cairn.models.config_reader import ConfigReader
from cairn.models.spec import DecoderSpec

_ARCHITECTURES: Mapping[str, str] = {
    "LlamaForCausalLM": "cairn.models.llama",
    "Qwen2ForCausalLM": "cairn.models.qwen2",
    "Qwen3ForCausalLM": "cairn.models.qwen3",
    "Olmo3ForCausalLM": "cairn.models.olmo3",
    "HiLSForCausalLM": "cairn.models.hils",
}
"""architecture -> module with `read_spec(config) -> DecoderSpec`."""


def read_spec(config: ConfigReader) -> DecoderSpec:
    name = config.architecture
    if name not in _ARCHITECTURES:
        raise ConfigError(
            f"{config.source}: architecture {name} is not supported; "
            f"supported: {', '.join(_ARCHITECTURES)}"
        )
    reader: Callable[[ConfigReader], DecoderSpec] = importlib.import_module(
        _ARCHITECTURES[name]
    ).read_spec
    spec = reader(config)
    config.finish()
    return spec
