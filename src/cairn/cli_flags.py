"""Command-line flags and subcommands; flags of options are made from their dataclass."""

from __future__ import annotations

import argparse
import math
import typing
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import MISSING, fields
from functools import partial
from importlib import import_module
from types import UnionType
from typing import Any, NamedTuple

from cairn.errors import ConfigError


class Flag(NamedTuple):
    name: str
    options: dict[str, Any]
    """Keyword arguments of `add_argument`."""


def flag(name: str, default: Any = None, text: str = "", **options: Any) -> Flag:
    """The flag --name. A default gives the flag its type and is stated in the help text."""
    if default is not None and "action" not in options:
        text = f"{text} Default: {default}.".lstrip() if default != "" else text
        options.setdefault("type", type(default))
        if isinstance(default, int | float):
            options.setdefault("metavar", "N")
    return Flag(f"--{name}", {"default": default, "help": text, **options})


def list_flag(
    name: str,
    default: Iterable[Any],
    text: str,
    kind: type = int,
    *,
    choices: Collection[str] = (),
    or_class: bool = False,
    low: float = 1,
    high: float = math.inf,
) -> Flag:
    """A flag that takes values with commas between them: some of `choices`, with `or_class` also
    a user's own `module:Class`, or numbers from `low` to `high`."""
    rule = f"choose among {', '.join(choices)}{', or your own module:Class' * or_class}"
    if not choices:
        numbers = "whole numbers" if kind is int else "numbers"
        rule = f"write {numbers} from {low}{f' to {high}' if high < math.inf else ''}, with commas"

    def parse(item: str) -> Any:
        try:
            value = kind(item)
            named = value in choices or (or_class and ":" in item)
            right = named if choices else kind is str or low <= value <= high
        except ValueError:
            right = False
        if not right:
            raise argparse.ArgumentTypeError(f"has {item!r}; {rule}")
        return value

    def parse_all(given: str) -> list[Any]:
        return [parse(item) for item in given.split(",")]

    shown = ",".join(f"{value:g}" if kind is float else str(value) for value in default)
    return flag(name, shown, text, type=parse_all, metavar="A,B")


OUTPUT = flag("output", None, "Write the JSON line to a file too.", metavar="FILE")
TEXT = flag("text", None, "Text to use; public-domain prose otherwise.", metavar="FILE")
PLOT = flag("plot", None, "Draw a PNG.", metavar="FILE")


def flags_of(config: type[Any], *, skip: Collection[str] = ()) -> list[Flag]:
    """One flag per field: --page-size for page_size. Absent flags stay out of the result."""
    hints = typing.get_type_hints(config)
    found = []
    for option in fields(config):
        if option.name in skip:
            continue
        default = None if option.default is MISSING else option.default
        text = option.metadata["help"].replace("%", "%%")
        kind, many = _scalar(hints[option.name])
        name = option.name.replace("_", "-")
        choices = option.metadata.get("listed")
        if choices is not None:
            found.append(list_flag(name, default or (), text, kind, choices=choices))
            continue
        if default not in (None, "", (), False):
            text += f" Default: {default}."
        options: dict[str, Any] = {"help": text, "default": argparse.SUPPRESS, "dest": option.name}
        if kind is bool:
            options["action"] = "store_true"
        else:
            word = option.metadata.get("word")
            options["type"] = kind if word is None else partial(_number_or, word, kind)
            if option.metadata.get("choices"):
                options["choices"] = option.metadata["choices"]
            else:
                options["metavar"] = option.name.rpartition("_")[2].upper()
            if many:
                options["action"] = "append"
        found.append(Flag(f"--{name}", options))
    return found


def add_flags(
    parser: argparse._ActionsContainer, config: type[Any], *, skip: Collection[str] = ()
) -> None:
    for name, options in flags_of(config, skip=skip):
        parser.add_argument(name, **options)


def add_command(
    commands: Any,
    name: str,
    text: str,
    run: str | Callable[[argparse.Namespace], int],
    groups: Mapping[str, Sequence[Flag]],
    **options: Any,
) -> Any:
    """Add a subcommand with groups of flags by their titles; returns its parser. It calls `run`,
    which may be "module:function": the module is then imported when the command runs."""
    parser: Any = commands.add_parser(name, help=text, allow_abbrev=False, **options)
    for title, flags in groups.items():
        group = parser.add_argument_group(title)
        for flag_name, flag_options in flags:
            group.add_argument(flag_name, **flag_options)
    parser.set_defaults(run=partial(_import_and_run, run) if isinstance(run, str) else run)
    return parser


def _import_and_run(path: str, arguments: argparse.Namespace) -> Any:
    module, _, function = path.partition(":")
    return getattr(import_module(module), function)(arguments)


def collect(
    arguments: argparse.Namespace, config: type[Any], *, skip: Collection[str] = ()
) -> dict[str, Any]:
    """The given flags that belong to `config`, as keyword arguments."""
    names = {option.name for option in fields(config)} - set(skip)
    return {name: value for name, value in vars(arguments).items() if name in names}


def check_at_least(arguments: argparse.Namespace, low: int, *names: str) -> None:
    """Raises ConfigError if one of the named flags, where the command has it, is below `low`."""
    for name in names:
        value = getattr(arguments, name, low)
        if value < low:
            raise ConfigError(f"--{name.replace('_', '-')} is {value}; it must be at least {low}")


def _number_or(word: str, kind: type, given: str) -> Any:
    return given if given == word else kind(given)


def _scalar(hint: Any) -> tuple[type, bool]:
    """The type a flag parses, and whether it may be given several times."""
    options = [hint]
    if isinstance(hint, UnionType) or typing.get_origin(hint) is typing.Union:
        options = [arg for arg in typing.get_args(hint) if arg is not type(None)]
    for option in options:
        if typing.get_args(option):
            return typing.get_args(option)[0], True
    return options[0], False
