"""From `--model` to where the model is, and what its makers say of sampling. Needs no torch."""

from __future__ import annotations

from typing import Any

from cairn.config import EngineConfig
from cairn.engine.sampling_params import SamplingParams
from cairn.errors import ConfigError, RequestError
from cairn.models.pull import Progress
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
