"""Finds the model that `--model` names, and its default sampling parameters. Needs no torch."""

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
    """Find the model; download it if necessary and possible."""
    ignored = (name.strip() for name in config.ignore_config_fields.split(","))
    return find_model(
        config.model,
        ignored_fields=tuple(name for name in ignored if name),
        confirm=confirm,
        progress=progress,
    )


def sampling_defaults(source: ModelSource) -> dict[str, Any]:
    """Default SamplingParams fields from the model's generation_config.json."""
    defaults = source.sampling_fields()
    try:
        SamplingParams.from_kwargs(defaults)
    except RequestError as error:
        raise ConfigError(f"{source.folder}/generation_config.json: {error}") from error
    return defaults
