"""Command-line flags made from a dataclass, so that they cannot drift from it."""

from __future__ import annotations

import argparse
import typing
from collections.abc import Collection
from dataclasses import MISSING, fields
from types import UnionType
from typing import Any


def add_flags(
    parser: argparse._ActionsContainer, config: type[Any], *, skip: Collection[str] = ()
) -> None:
    """One flag per field: --page-size for page_size. Absent flags stay out of the result."""
    hints = typing.get_type_hints(config)
    for option in fields(config):
        if option.name in skip:
            continue
        flag = "--" + option.name.replace("_", "-")
        default = None if option.default is MISSING else option.default
        text = option.metadata["help"].replace("%", "%%")
        if default not in (None, "", (), False):
            text += f" Default: {default}."
        kind, many = _scalar(hints[option.name])
        arguments: dict[str, Any] = {"help": text, "default": argparse.SUPPRESS}
        if kind is bool:
            arguments["action"] = "store_true"
        else:
            arguments["type"] = kind
            arguments["metavar"] = option.name.rpartition("_")[2].upper()
            if option.metadata.get("choices"):
                arguments["choices"] = option.metadata["choices"]
                del arguments["metavar"]
            if many:
                arguments["action"] = "append"
        parser.add_argument(flag, dest=option.name, **arguments)


def collect(
    arguments: argparse.Namespace, config: type[Any], *, skip: Collection[str] = ()
) -> dict[str, Any]:
    """The given flags that belong to `config`, as keyword arguments."""
    names = {option.name for option in fields(config)} - set(skip)
    return {name: value for name, value in vars(arguments).items() if name in names}


def _scalar(hint: Any) -> tuple[type, bool]:
    """The type a flag parses, and whether it may be given several times."""
    options = [hint]
    if isinstance(hint, UnionType) or typing.get_origin(hint) is typing.Union:
        options = [arg for arg in typing.get_args(hint) if arg is not type(None)]
    for option in options:
        if typing.get_args(option):
            return typing.get_args(option)[0], True
    return options[0], False
