"""Options of the Ray application, next to those of the server and the engine."""

from __future__ import annotations

import argparse
import math
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import Any, NoReturn

from cairn.cli_flags import add_flags, collect
from cairn.config import EngineConfig
from cairn.errors import ConfigError
from cairn.server.options import ServeConfig

_RAYS = ("host", "port")  # Ray's proxy listens on these


def _option(default: Any, text: str) -> Any:
    return field(default=default, metadata={"help": text})


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplicaConfig:
    replicas: int = _option(2, "Copies of the model.")
    cpus: float = _option(1.0, "CPUs that Ray reserves for each.")
    gpus: float = _option(
        0.0, "GPUs that Ray reserves for each. With 0 all share what the machine shows."
    )
    replicas_per_node: int | None = _option(None, "Most replicas on one machine.")
    imbalance: int = _option(
        32, "Open requests a replica may have more than another before a prefix goes there instead."
    )
    health_period: float = _option(5.0, "Seconds between two checks of a replica's health.")
    health_timeout: float = _option(30.0, "Seconds a replica may take to answer such a check.")

    def __post_init__(self) -> None:
        for name, low in (("replicas", 1), ("imbalance", 0), ("replicas_per_node", 1)):
            value = getattr(self, name)
            if name == "replicas_per_node" and value is None:
                continue
            if not isinstance(value, int) or isinstance(value, bool) or value < low:
                raise ConfigError(f"{name} is {value!r}; it must be a whole number from {low}")
        for name in ("cpus", "gpus"):
            value = getattr(self, name)
            if not isinstance(value, int | float) or not 0 <= value < math.inf:
                raise ConfigError(f"{name} is {value!r}; it must be a number from 0")
        for name in ("health_period", "health_timeout"):
            value = getattr(self, name)
            if not isinstance(value, int | float) or not 0 < value < math.inf:
                raise ConfigError(f"{name} is {value!r}; it must be a number above 0")


_SWITCHES = {
    option.name
    for config in (ReplicaConfig, ServeConfig, EngineConfig)
    for option in fields(config)
    if option.type == "bool"
}


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise ConfigError(message)


def read_options(given: Mapping[str, Any]) -> tuple[ReplicaConfig, ServeConfig, EngineConfig]:
    """Options from names and values. Values may be text: `serve run` passes nothing else."""
    parser = _Parser(allow_abbrev=False, add_help=False)
    add_flags(parser, ReplicaConfig)
    add_flags(parser, ServeConfig, skip=_RAYS)
    add_flags(parser, EngineConfig)
    known = parser.parse_args(_flags(given))
    return (
        ReplicaConfig(**collect(known, ReplicaConfig)),
        ServeConfig(**collect(known, ServeConfig, skip=_RAYS)),
        EngineConfig.from_kwargs(collect(known, EngineConfig)),
    )


def _flags(given: Mapping[str, Any]) -> list[str]:
    flags: list[str] = []
    for name, value in given.items():
        if name in _RAYS:
            raise ConfigError(f"{name} is not an option here: Ray's proxy listens, see its options")
        flag = "--" + name.replace("_", "-")
        if name in _SWITCHES:
            switch = str(value).lower()
            if switch not in ("true", "false"):
                raise ConfigError(f"{name} is {value!r}; it must be true or false")
            flags += [flag] * (switch == "true")
        elif isinstance(value, list | tuple):
            flags += [f"{flag}={part}" for part in value]
        elif value is not None:
            flags.append(f"{flag}={value}")
    return flags
