"""From `--model` to a model: where it is, and its weights, or a rank's part of them."""

from __future__ import annotations

from typing import Any

import torch

from cairn.config import EngineConfig
from cairn.engine.sampling_params import SamplingParams
from cairn.errors import ConfigError, RequestError
from cairn.models.checkpoint import Checkpoint
from cairn.models.interface import LanguageModel
from cairn.models.loader import Progress, build_model, fill, fill_dummy, quantize
from cairn.models.parallel import Parallel
from cairn.models.registry import read_spec
from cairn.models.source import Confirm, ModelSource, find_model


def locate(
    config: EngineConfig, confirm: Confirm | None = None, progress: Progress | None = None
) -> ModelSource:
    """Find the model, fetching it where that is possible."""
    ignored = (name.strip() for name in config.ignore_config_fields.split(","))
    return find_model(
        config.model,
        ignored_fields=tuple(name for name in ignored if name),
        confirm=confirm,
        progress=progress,
    )


def sampling_defaults(source: ModelSource) -> dict[str, Any]:
    """What requests leave out, where the model's makers have said it: fields of SamplingParams."""
    defaults = source.sampling_fields()
    try:
        SamplingParams.from_kwargs(defaults)
    except RequestError as error:
        raise ConfigError(f"{source.folder}/generation_config.json: {error}") from error
    return defaults


def load_model(
    config: EngineConfig,
    source: ModelSource,
    dtype: torch.dtype,
    device: torch.device,
    progress: Progress | None,
    parallel: Parallel,
) -> tuple[LanguageModel, tuple[str, ...]]:
    """The model, or a rank's part, and what its user should know about how it was loaded."""
    if config.model_impl == "transformers":
        if source.folder is None or config.load_format == "dummy":
            raise ConfigError(
                "model_impl=transformers needs a model folder or a hub id, with weights"
            )
        from cairn.models.hf_model import load_transformers_model

        return load_transformers_model(source.folder, dtype, device), ()
    decoder = read_spec(source.config)
    model = build_model(decoder, dtype, device, parallel)
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
