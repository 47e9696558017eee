"""Finds the function that builds a model: by architecture, or where the user says it is."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping

import torch

from cairn.errors import ConfigError
from cairn.models.config_reader import ConfigReader
from cairn.models.interface import LanguageModel
from cairn.models.module import Factory
from cairn.models.packed_int4 import read_quantization
from cairn.models.parallel import Alone
from cairn.models.spec import ModelSpec

Build = Callable[[ConfigReader, Factory], LanguageModel]
"""Takes the fields of config.json that it honours, and makes the model without its weights."""

_ARCHITECTURES: Mapping[str, str] = {
    "LlamaForCausalLM": "cairn.models.llama:build",
    "Qwen2ForCausalLM": "cairn.models.qwen2:build",
    "Qwen3ForCausalLM": "cairn.models.qwen3:build",
    "Qwen3MoeForCausalLM": "cairn.models.qwen3_moe:build",
    "DeepseekV2ForCausalLM": "cairn.models.deepseek:build_v2",
    "DeepseekV3ForCausalLM": "cairn.models.deepseek:build_v3",
    "DeepseekV32ForCausalLM": "cairn.models.deepseek:build_v32",
    "GlmMoeDsaForCausalLM": "cairn.models.deepseek:build_glm",
    "Olmo3ForCausalLM": "cairn.models.olmo3:build",
    "HiLSForCausalLM": "cairn.models.hils:build",
}
"""architecture -> "module:function"."""


def build(config: ConfigReader, factory: Factory, impl: str = "cairn") -> LanguageModel:
    """The model that config.json describes, on the factory's device.

    `impl` is the option model_impl: "cairn" for a model of this package, or "module:function".
    """
    read_quantization(config)
    model = _find(config, impl)(config, factory)
    if not isinstance(model, LanguageModel):
        raise ConfigError(
            f"model_impl {impl!r} returns {type(model).__name__}, which is no "
            "cairn.models.interface.LanguageModel"
        )
    config.finish()
    model.cpu = factory.cpu
    return model


def read_spec(config: ConfigReader, impl: str = "cairn", *, tp: int = 1) -> ModelSpec:
    """What the engine must know of the model, or of the first of `tp` ranks. Allocates nothing."""
    factory = Factory(torch.float32, torch.device("meta"), parallel=Alone(0, tp))
    return build(config, factory, impl).spec


def _find(config: ConfigReader, impl: str) -> Build:
    place = impl
    if impl == "cairn":
        name = config.architecture
        if name not in _ARCHITECTURES:
            raise ConfigError(
                f"{config.source}: architecture {name} is not supported; "
                f"supported: {', '.join(_ARCHITECTURES)}"
            )
        place = _ARCHITECTURES[name]
    module, _, attribute = place.partition(":")
    try:
        found: Build = getattr(importlib.import_module(module), attribute)
    except (ImportError, AttributeError, ValueError) as error:
        raise ConfigError(f"model_impl {place!r} cannot be imported: {error}") from error
    return found
