"""Configs of HiLS models for transformers, which SGLang reads every model's config with."""

from __future__ import annotations

from typing import Any

from transformers import AutoConfig, PretrainedConfig

from cairn.models.config_reader import ConfigReader


class HiLSConfig(PretrainedConfig):
    """Keeps the fields as they stand in config.json, for Cairn's own, strict reader."""

    cairn_fields: dict[str, Any] | None = None

    @classmethod
    def from_dict(cls, config_dict: dict[str, Any], **kwargs: Any) -> Any:
        fields = {name: value for name, value in config_dict.items() if name[0] != "_"}
        made = super().from_dict(config_dict, **kwargs)
        config = made[0] if isinstance(made, tuple) else made
        config.cairn_fields = fields
        return made

    def reader(self) -> ConfigReader:
        assert self.cairn_fields is not None, "the config was not read from a config.json"
        return ConfigReader(self.cairn_fields, f"config.json of {self.name_or_path}")


class QwenHiLSConfig(HiLSConfig):
    model_type = "qwen_hils"


class OlmoHiLSConfig(HiLSConfig):
    model_type = "olmo_hils"


def register_configs() -> None:
    for kind in (QwenHiLSConfig, OlmoHiLSConfig):
        AutoConfig.register(kind.model_type, kind, exist_ok=True)
