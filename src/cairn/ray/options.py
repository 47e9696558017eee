"""Options of the Ray application, next to those of the server and the engine."""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any, NoReturn

from cairn.cli_flags import add_flags, collect
from cairn.config import EngineConfig, check_options, option
from cairn.errors import ConfigError
from cairn.server.options import ServeConfig

_RAYS = ("host", "port", "client_timeout")  # Ray's proxy has its own


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplicaConfig:
    replicas: int = option(2, "Copies of the model.", low=1)
    cpus: float = option(1.0, "CPUs that Ray reserves for each.", low=0)
    gpus: float = option(
        0.0, "GPUs that Ray reserves for each. With 0 all share what the machine shows.", low=0
    )
    replicas_per_node: int | None = option(None, "Most replicas on one machine.", low=1)
    imbalance: int = option(
        32,
        "Open requests a replica may have more than another before a prefix goes there instead.",
        low=0,
    )
    health_period: float = option(5.0, "Seconds between two checks of a replica's health.", above=0)
    health_timeout: float = option(
        30.0, "Seconds a replica may take to answer such a check.", above=0
    )

    def __post_init__(self) -> None:
        check_options(self, ConfigError)


_SWITCHES = {
    known.name
    for config in (ReplicaConfig, ServeConfig, EngineConfig)
    for known in fields(config)
    if known.type == "bool"
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
