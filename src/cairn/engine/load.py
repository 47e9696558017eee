"""Builds a model and loads its weights, or one rank's part of them."""

from __future__ import annotations

import torch

from cairn.config import EngineConfig
from cairn.errors import ConfigError
from cairn.models.checkpoint import Checkpoint
from cairn.models.interface import LanguageModel
from cairn.models.loader import Progress, build_model, fill, fill_dummy, quantize
from cairn.models.parallel import Parallel
from cairn.models.source import ModelSource


def load_model(
    config: EngineConfig,
    source: ModelSource,
    dtype: torch.dtype,
    device: torch.device,
    progress: Progress | None,
    parallel: Parallel,
) -> tuple[LanguageModel, tuple[str, ...]]:
    """The model, or one rank's part of it, and notes for the user about how it was loaded."""
    if config.model_impl == "transformers":
        if source.folder is None or config.load_format == "dummy":
            raise ConfigError(
                "model_impl=transformers needs a model folder or a hub id, with weights"
            )
        from cairn.models.hf_model import load_transformers_model

        return load_transformers_model(source.folder, dtype, device), ()
    model = build_model(source.config, dtype, device, parallel, config.model_impl)
    if config.load_format == "dummy":
        fill_dummy(model, config.seed)
    elif source.gguf is not None:
        fill(model, source.gguf, source.gguf.path, progress)
    elif source.folder is not None:
        fill(model, Checkpoint.open(source.folder), source.folder, progress)
    else:
        raise ConfigError(
            f"model {config.model!r} is a preset, a shape without weights; use load_format=dummy"
        )
    return model, (str(quantize(model)),) if config.quantization == "int8" else ()
